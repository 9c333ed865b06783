"""FedAMoLE's clients: they train the assigned experts and upload mean embeddings of their text."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import AmoleAdapter, Parameter, of_roles
from coterie.bases.sites import chosen_linears
from coterie.messages import Message, MessageError, State, check_shapes
from coterie.methods.contract import ClientContext, ClientSide
from coterie.methods.fedamole.experts import Held, expert_name
from coterie.methods.fedamole.settings import FedAMoLESettings, Privacy
from coterie.methods.tensors import copied, copy, log_routing, shapes_of
from coterie.privacy.mechanisms import noise_for, only_noise, private_mean
from coterie.privacy.secrets import Secrets
from coterie.privacy.stream import Stream
from coterie.training.apart import set_apart
from coterie.training.embeddings import mean_embeddings
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate
from coterie.transforms.context import digest_of
from coterie.turn import Turn

log = logging.getLogger(__name__)
TRAINED = of_roles("shared", "domain", "projection")
MOST_EXPERTS = 2**16
"""The largest number of experts per layer that a client accepts from a server."""


class FedAMoLEClient(ClientSide):
    """A client that receives newly assigned experts in every round.

    The optimiser is therefore reset in every round, as in the code that the authors of FedAMoLE
    released.
    """

    def __init__(self, settings: FedAMoLESettings, context: ClientContext) -> None:
        self.settings = settings
        if settings.chooses:
            share, most = settings.embeddings.share, settings.embeddings.samples
            context, self.samples = set_apart(context, "embedding", share, most)
        self.context = context
        base = context.base.model
        self.paths = list(chosen_linears(base, settings.attention.targets))
        self.held: Held = {path: [] for path in self.paths}
        self.adapter = self._adapter_with(self.held, 1)
        self.secrets = Secrets()
        """The secret keys of the noise."""
        self.means: dict[str, dict[str, Tensor]] = {}
        """The mean embeddings of the last round: the upload's groups `experts` and `tokens`."""

    def _adapter_with(self, held: Held, experts: int) -> AmoleAdapter:
        layout = self.settings.layout(experts)
        return AmoleAdapter(self.context.base.model, layout, self.context.seed, held)

    def receive(self, download: Message) -> None:
        self.held, count = self._assignment(download)
        self.adapter = self._adapter_with(self.held, count)
        check_shapes(download["adapter"], shapes_of(self.adapter.values()))
        copy(download["adapter"], self.adapter.values())

    def _assignment(self, download: Message) -> tuple[Held, int]:
        """Return the experts that a download assigns, and the total number of experts per layer."""
        count, held = download.values.get("count"), download.values.get("held")
        if type(count) is not int or not 1 <= count <= MOST_EXPERTS:
            raise MessageError("The download has no valid number of experts.")
        if (
            not isinstance(held, dict)
            or held.keys() != set(self.paths)
            or not all(_are_experts(experts, count) for experts in held.values())
        ):
            raise MessageError("The download does not list the client's experts for every layer.")
        return held, count

    def train(self, turn: Turn) -> None:
        context, adapter = self.context, self.adapter
        rate = learning_rate(context.training, context.rounds)
        penalty = self._load_balance if adapter.balances else None
        level = Level("joint", TRAINED, "train", rate, penalty=penalty)
        LocalTraining(context, adapter, [level]).run(turn.exchange)
        log_routing(context, adapter.routing())
        self.means = self._means(turn.exchange) if self.settings.chooses else {}

    def upload(self, turn: Turn) -> Message:
        return Message(turn.exchange, {"adapter": copied(self.adapter.values()), **self.means})

    def _load_balance(self) -> Tensor:
        return self.settings.router.load_balance_weight * self.adapter.load_balance()

    def _means(self, round: int) -> dict[str, dict[str, Tensor]]:
        """Compute mean embeddings over the tokens of the samples in the embedding set.

        On each layer, expert j embeds the input x of a token as A_j x, where A_j is the matrix A of
        the expert's LoRA pair. The router embeds the input x as W_t x, where W_t is the router's
        projection. With the setting `embeddings.privacy`, the means contain noise.

        Returns:
            Two groups of means, each shaped (r,), where r is the LoRA rank. The group `experts`
            contains the mean of A_j x for each layer and each domain expert j of this client. The
            group `tokens` contains the mean of W_t x for each layer.
        """
        context, privacy = self.context, self.settings.embeddings.privacy
        private = None if privacy is None else partial(self._private_mean, round, privacy)
        at_once = context.training.at_once
        means = mean_embeddings(context.base, self.adapter, self.samples, at_once, private)
        experts = {
            expert_name(path, j): mean.clone()
            for path, held in self.held.items()
            for j, mean in zip(held, means[path][:-1], strict=True)
        }
        return {"experts": experts, "tokens": {p: mean[-1].clone() for p, mean in means.items()}}

    def _private_mean(self, round: int, privacy: Privacy, embeddings: Tensor) -> Tensor:
        """Return the mean of the samples' embeddings, shaped (samples, values), with noise.

        If the privacy budget is spent, the result is noise only.
        """
        context = self.context
        noise = noise_for(privacy.epsilon, context.rounds, privacy.delta)
        # If a round is repeated with other embeddings, the noise must be new: equal noise would
        # cancel in the difference of the two uploads.
        digest = digest_of({"embeddings": {"embeddings": embeddings}})
        key = self.secrets.of(round)
        release = Stream(key, "release", digest).bytes(16).hex()
        mean = private_mean
        if not context.ledger.spend(release, noise, context.rounds):
            log.warning(
                "round %d: the privacy budget is spent, so the client sends pure noise instead of "
                "mean embeddings",
                round + 1,
            )
            mean = only_noise
        return mean(embeddings, privacy.clip, noise, Stream(key, "embedding noise", digest))

    def model(self) -> PreTrainedModel:
        return self.adapter.attach(self.context.base.model)

    def parameters(self) -> Mapping[str, Parameter]:
        return self.adapter.parameters()

    def state(self) -> State:
        values: dict[str, Any] = {"count": self.adapter.layout.experts, "held": self.held}
        if self.settings.embeddings.privacy is not None:
            values["secrets"] = self.secrets.state()
        return State({"adapter": copied(self.adapter.values())}, values)

    def restore(self, state: State) -> None:
        self.held = state.values["held"]
        self.adapter = self._adapter_with(self.held, state.values["count"])
        copy(state["adapter"], self.adapter.values())
        self.secrets.restore(state.values.get("secrets", self.secrets.state()))


def _are_experts(numbers: Any, count: int) -> bool:
    """Return whether a value is an ascending list of distinct expert numbers below `count`."""
    integers = isinstance(numbers, list) and all(type(n) is int for n in numbers)
    return integers and numbers == sorted({n for n in numbers if 0 <= n < count})
