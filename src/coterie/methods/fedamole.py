"""FedAMoLE: domain experts choose their clients (arXiv 2411.19128).

On every chosen linear layer stand one expert that all clients share and some of E domain experts.
After local training a client sends what it trained, and for every layer two kinds of means over a
few of its samples: of each expert's embedding A_j x and of its tokens' embedding W_t x. The server
averages shared parts over all clients, each domain expert over those that hold it, and lets every
expert choose its k_c clients anew, by the relevance of the clients' tokens (RSEA; one exact linear
programme per layer).
"""

import logging
import math
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import AmoleAdapter, AmoleLayout, Part, Role
from coterie.aggregation.assignment import Bounds
from coterie.bases.sites import QUERY_VALUE, chosen_linears
from coterie.messages import Field as Travels
from coterie.messages import Message, MessageError, Schema, State, check_shapes
from coterie.methods.adapter import copied, copy, shapes_of
from coterie.methods.contract import (
    ClientContext,
    ClientSide,
    Method,
    ServerContext,
    Setting,
)
from coterie.methods.reverse_selection import FedAMoLEServer, Held, expert_name, values_of
from coterie.methods.settings import AmoleRouter, Attention, Embeddings, LoraAlpha, refuse_unused
from coterie.privacy.ledger import Budget
from coterie.privacy.mechanisms import noise_for, only_noise, private_mean
from coterie.privacy.secrets import Secrets
from coterie.seeding import generator
from coterie.training.apart import set_apart
from coterie.training.embeddings import mean_embeddings
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate

log = logging.getLogger(__name__)
TRAINED: tuple[Role, ...] = ("shared", "domain", "projection")
MOST_EXPERTS = 2**16
"""Per layer, that a client believes a server to have."""


class FedAMoLE(Method):
    """The defaults are the paper's: 30 domain experts per layer for its 10 clients."""

    name: ClassVar[str] = "fedamole"
    paper: ClassVar[str] = "arXiv 2411.19128"
    summary: ClassVar[str] = "shared expert averaged; domain experts choose clients every round"
    learns_preferences: ClassVar[bool] = True

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: LoraAlpha = LoraAlpha()
    router: AmoleRouter = AmoleRouter()
    experts: int | None = Field(
        default=None, ge=1, description="domain experts per layer (E); default: three per client"
    )
    clients_per_expert: int = Field(
        default=2, ge=1, description="clients that each expert chooses (k_c)"
    )
    min_experts: int = Field(
        default=2, ge=0, description="fewest experts per client and layer (k_e)"
    )
    max_experts: int = Field(default=8, ge=1, description="most experts per client and layer (b)")
    assignment: Literal["rsea", "homogeneous", "random", "random-once"] = Field(
        default="rsea",
        description="who assigns experts to clients: the experts (rsea), the experts with as many "
        "for each client (homogeneous), chance in every round, or chance once",
    )
    shared_expert: bool = Field(default=True, description="add one expert shared by all clients")
    embeddings: Embeddings = Embeddings()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.router.kind == "vanilla" and self.chooses:
            raise ValueError(
                "a vanilla router has no embeddings for experts to choose by; set `assignment` "
                "to random or random-once"
            )
        if not self.chooses:
            refuse_unused(self, f"assignment: {self.assignment}", "embeddings")
        if self.assignment == "homogeneous":
            refuse_unused(self, "assignment: homogeneous", "min_experts", "max_experts")
        if self.experts is not None and self.router.top_k > self.experts:
            raise ValueError(
                f"router.top_k is {self.router.top_k}, but there are only {self.experts} "
                "experts; lower router.top_k"
            )
        return self

    @property
    def chooses(self) -> bool:
        """Whether assignments depend on embeddings."""
        return self.assignment in ("rsea", "homogeneous")

    def count(self, clients: int) -> int:
        """E, the number of domain experts per layer."""
        return 3 * clients if self.experts is None else self.experts

    @property
    def budget(self) -> Budget | None:
        """That of the mean embeddings."""
        if not self.chooses:
            return None
        privacy = self.embeddings.privacy
        return (math.inf, 1.0) if privacy is None else (privacy.epsilon, privacy.delta)

    def layout(self, experts: int) -> AmoleLayout:
        """What stands on the layers."""
        return AmoleLayout(
            experts=experts,
            rank=self.attention.rank,
            alpha=self.lora.alpha,
            dropout=self.lora.dropout,
            top_k=self.router.top_k,
            targets=self.attention.targets,
            shared=self.shared_expert,
            router=self.router.kind,
            score_scale=self.router.score_scale,
            renormalise=self.router.renormalise,
            load=self.router.load,
        )

    def bounds(self, experts: int, clients: int) -> Bounds:
        """How many clients and experts get each other; where clients are missing, relaxed."""
        relaxed, even = self._bounds().relaxed(experts, clients), self.assignment == "homogeneous"
        return relaxed.homogeneous(experts, clients) if even else relaxed

    def check(self, setting: Setting) -> None:
        """There is an assignment within the bounds."""
        clients = len(setting.clients)
        bounds, experts = self._bounds(), self.count(clients)
        even = self.assignment == "homogeneous"
        (bounds.homogeneous(experts, clients) if even else bounds).refuse(experts, clients)

    def _bounds(self) -> Bounds:
        return Bounds(self.clients_per_expert, self.min_experts, self.max_experts)

    def sends(self, part: Part) -> bool:
        """All that is trained."""
        return True

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is trained both ways, means of embeddings up."""
        shared = "the shared expert's and " if self.shared_expert else ""
        what = f"LoRA pairs: {shared}those of the domain experts held; router weights"
        adapter = Travels("adapter", what, reduce="mean")
        means = (
            Travels("experts", "mean embedding of a few samples, per expert held", reduce="mean"),
            Travels("tokens", "mean token embedding of the same samples"),
        )
        count = Travels("count", "number of domain experts", "json")
        held = Travels("held", "domain experts that the client holds, by layer", "json")
        return Schema(up=(adapter, *(means if self.chooses else ())), down=(adapter, count, held))

    def client(self, context: ClientContext) -> "FedAMoLEClient":
        """Trains what it is handed."""
        return FedAMoLEClient(self, context)

    def server(self, context: ServerContext) -> FedAMoLEServer:
        """Averages, and assigns."""
        return FedAMoLEServer(self, context)


class FedAMoLEClient(ClientSide):
    """Holds other experts every round, so its optimiser begins anew with each (as released)."""

    def __init__(self, method: FedAMoLE, context: ClientContext) -> None:
        self.method = method
        if method.chooses:
            share, most = method.embeddings.share, method.embeddings.samples
            context, self.samples = set_apart(context, "embedding", share, most)
        self.context = context
        base = context.base.model
        self.paths = list(chosen_linears(base, method.attention.targets))
        self.held: Held = {path: [] for path in self.paths}
        self.adapter = self._holding(self.held, 1)
        self.secrets = Secrets()
        """What noise is drawn from: the server knows the run's seed, and could take it off."""
        self.means: dict[str, dict[str, Tensor]] = {}
        """What the last round's samples say: `experts` and `tokens`, groups of the upload."""

    def _holding(self, held: Held, experts: int) -> AmoleAdapter:
        layout = self.method.layout(experts)
        return AmoleAdapter(self.context.base.model, layout, self.context.seed, held)

    def take(self, download: Message) -> None:
        """Hold the experts that the server hands out."""
        self.held, count = self._told(download)
        self.adapter = self._holding(self.held, count)
        check_shapes(download["adapter"], shapes_of(values_of(self.adapter)))
        copy(download["adapter"], values_of(self.adapter))
        self.digest = blake2b(download.encode(), digest_size=16).hexdigest()

    def _told(self, download: Message) -> tuple[Held, int]:
        """The experts held, and how many there are, as the server says."""
        count, held = download.values.get("count"), download.values.get("held")
        if type(count) is not int or not 1 <= count <= MOST_EXPERTS:
            raise MessageError("The server did not send the number of experts.")
        if (
            not isinstance(held, dict)
            or held.keys() != set(self.paths)
            or not all(_are_experts(experts, count) for experts in held.values())
        ):
            raise MessageError("The server did not send the experts that this client holds.")
        return held, count

    def train(self, round: int) -> None:
        """Train the experts, and see some samples with them."""
        context, adapter = self.context, self.adapter
        rate = learning_rate(context.training, context.rounds)
        penalty = self._load_balance if adapter.balances else None
        level = Level("joint", TRAINED, "train", rate, penalty=penalty)
        LocalTraining(context, adapter, [level]).round(round)
        for layer, weights in adapter.routing().items():
            context.log(f"routing/{layer}", weights.tolist())  # of the round's last batch
        self.means = self._means(round) if self.method.chooses else {}

    def upload(self, round: int) -> Message:
        """What was trained, and how it sees some samples."""
        return Message(round, {"adapter": copied(values_of(self.adapter)), **self.means})

    def _load_balance(self) -> Tensor:
        return self.method.router.load_balance_weight * self.adapter.load_balance()

    def _means(self, round: int) -> dict[str, dict[str, Tensor]]:
        """Means over the embedding set, each (r,): by layer and expert, and by layer."""
        context, privacy = self.context, self.method.embeddings.privacy
        private = None
        if privacy is not None:
            noise = noise_for(privacy.epsilon, context.rounds, privacy.delta)
            # A round may be opened again with other experts: equal noise would cancel out.
            secret = self.secrets.of(round)
            chance = generator(secret, "embedding noise", self.digest)
            private = partial(private_mean, clip=privacy.clip, noise=noise, chance=chance)
            release = generator(secret, "release", self.digest).initial_seed()
            if not context.ledger.spend(f"{release:016x}", noise, context.rounds):
                log.warning("round %d: the privacy budget is spent, only noise is sent", round + 1)
                private = partial(only_noise, clip=privacy.clip, noise=noise, chance=chance)
        at_once = context.training.at_once
        means = mean_embeddings(context.base, self.adapter, self.samples, at_once, private)
        experts = {
            expert_name(path, j): mean.clone()
            for path, held in self.held.items()
            for j, mean in zip(held, means[path][:-1], strict=True)
        }
        return {"experts": experts, "tokens": {p: mean[-1].clone() for p, mean in means.items()}}

    def model(self) -> PreTrainedModel:
        """The base with the experts that are held."""
        return self.adapter.attach(self.context.base.model)

    def parts(self) -> Mapping[str, Part]:
        """The adapter's."""
        return self.adapter.parts()

    def state(self) -> State:
        """The experts held, copied, and the noise's secrets."""
        values: dict[str, Any] = {"count": self.adapter.layout.experts, "held": self.held}
        if self.method.embeddings.privacy is not None:
            values["secrets"] = self.secrets.state()
        return State({"adapter": copied(values_of(self.adapter))}, values)

    def restore(self, state: State) -> None:
        """Hold the experts of a state."""
        self.held = state.values["held"]
        self.adapter = self._holding(self.held, state.values["count"])
        copy(state["adapter"], values_of(self.adapter))
        self.secrets.restore(state.values.get("secrets", self.secrets.state()))


def _are_experts(numbers: Any, count: int) -> bool:
    """Whether a value holds different numbers of experts, ascending."""
    whole = isinstance(numbers, list) and all(type(n) is int for n in numbers)
    return whole and numbers == sorted({n for n in numbers if 0 <= n < count})
