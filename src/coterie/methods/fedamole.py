"""FedAMoLE: domain experts choose their clients (arXiv 2411.19128).

On every chosen linear layer stand one expert that all clients share and some of E domain experts.
After local training a client sends what it trained, and for every layer two kinds of means over a
few of its samples: of each expert's embedding A_j x and of its tokens' embedding W_t x. The server
averages shared parts over all clients, each domain expert over those that hold it, and lets every
expert choose its k_c clients anew, by the relevance of the clients' tokens (RSEA; one exact linear
programme per layer).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import AmoleAdapter, AmoleLayout, Part, Role
from coterie.aggregation.assignment import Bounds, assign_all, relevance_of_known
from coterie.bases.sites import chosen_linears
from coterie.chance import generator
from coterie.data.batch import Batch
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, Shapes, State, Tensors, check_shapes
from coterie.methods.adapter import copied, copy, shapes_of
from coterie.methods.contract import (
    ClientContext,
    ClientId,
    ClientSide,
    Method,
    ServerContext,
    ServerSide,
    Setting,
)
from coterie.methods.settings import AmoleRouter, Attention, Embeddings, LoraAlpha, refuse_unused
from coterie.privacy.mechanisms import noise_for, private_mean
from coterie.privacy.secrets import Secrets
from coterie.training.embeddings import embedding_set, mean_embeddings
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate

Held = dict[str, list[int]]
"""By the path of an adapted layer, the domain experts that a client holds there, ascending."""
TRAINED: tuple[Role, ...] = ("shared", "domain", "projection")
MOST_EXPERTS = 2**16
"""Per layer, that a client believes a server to have."""


class FedAMoLE(Method):
    """The defaults are the paper's: 30 domain experts per layer for its 10 clients."""

    name: ClassVar[str] = "fedamole"
    paper: ClassVar[str] = "arXiv 2411.19128"
    summary: ClassVar[str] = "shared expert averaged; domain experts choose clients every round"

    attention: Attention = Attention(targets="q_proj|v_proj|c_attn")
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

    def server(self, context: ServerContext) -> "FedAMoLEServer":
        """Averages, and assigns."""
        return FedAMoLEServer(self, context)


class FedAMoLEClient(ClientSide):
    """Holds other experts every round, so its optimiser begins anew with each (as released)."""

    def __init__(self, method: FedAMoLE, context: ClientContext) -> None:
        self.method, self.context = method, context
        self.paths = list(chosen_linears(context.base.model, method.attention.targets))
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
        check_shapes(download["adapter"], shapes_of(_values(self.adapter)))
        copy(download["adapter"], _values(self.adapter))
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
        return Message(round, {"adapter": copied(_values(self.adapter)), **self.means})

    def _load_balance(self) -> Tensor:
        return self.method.router.load_balance_weight * self.adapter.load_balance()

    def _means(self, round: int) -> dict[str, dict[str, Tensor]]:
        """Means over the embedding set, each (r,): by layer and expert, and by layer."""
        context, privacy = self.context, self.method.embeddings.privacy
        private = None
        if privacy is not None:
            noise = noise_for(privacy.epsilon, context.rounds, privacy.delta)
            # A round may be opened again with other experts: equal noise would cancel out.
            chance = generator(self.secrets.of(round), "embedding noise", self.digest)
            private = partial(private_mean, clip=privacy.clip, noise=noise, chance=chance)
        at_once = context.training.at_once
        means = mean_embeddings(context.base, self.adapter, self.samples(), at_once, private)
        experts = {
            _expert(path, j): mean.clone()
            for path, held in self.held.items()
            for j, mean in zip(held, means[path][:-1], strict=True)
        }
        return {"experts": experts, "tokens": {p: mean[-1].clone() for p, mean in means.items()}}

    def samples(self) -> Batch:
        """The embedding set: the same training samples in every round."""
        context, of = self.context, self.method.embeddings
        chance = generator(context.seed, "embedding", context.name)
        return embedding_set(context.data.train, context.window, of.share, of.samples, chance)

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
        return State({"adapter": copied(_values(self.adapter))}, values)

    def restore(self, state: State) -> None:
        """Hold the experts of a state."""
        self.held = state.values["held"]
        self.adapter = self._holding(self.held, state.values["count"])
        copy(state["adapter"], _values(self.adapter))
        self.secrets.restore(state.values.get("secrets", self.secrets.state()))


class FedAMoLEServer(ServerSide):
    """Holds all experts, takes their means in, and lets them choose."""

    def __init__(self, method: FedAMoLE, context: ServerContext) -> None:
        self.method, self.seed, self.log = method, context.seed, context.log
        self.experts = method.count(len(context.clients))
        layout = method.layout(self.experts)
        self.paths = list(chosen_linears(context.base, layout.targets))
        everything = dict.fromkeys(self.paths, range(self.experts))
        adapter = AmoleAdapter(context.base, layout, context.seed, everything)
        self.parts, self.values = adapter.parts(), _values(adapter)
        self.expert_means: dict[str, Tensor] = {}
        """The last mean embeddings, by layer and expert."""
        self.token_means: dict[ClientId, Tensors] = {}
        """The last mean token embeddings of each client, by layer."""
        self.coming: dict[ClientId, Tensors] = {}
        """The same, of the round in progress."""
        self.joined: set[ClientId] = set()
        self.assigned: dict[ClientId, Held] = {}
        self.assigned_for: tuple[int, Sequence[ClientId]] = -1, ()
        """The round, and who takes part in it."""

    def join(self, client: ClientId, hello: Message) -> None:
        """Experts can choose it from the next round on."""
        self.joined.add(client)

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Assign experts to those who take part."""
        super().open(round, participants)
        self.coming = {}
        if self.assigned_for != (round, participants):  # else they are those of `close`
            self._assign(participants)
        for path in self.paths:
            of = {client: layers[path] for client, layers in self.assigned.items()}
            self.log(f"assignment/{path}", of)

    def download(self, client: ClientId) -> Message:
        """The shared parts, and the client's experts."""
        if client not in self.assigned:  # it came when all the others had theirs
            late = self._choices(sorted(self.joined))[client]
            self.assigned = self.assigned | {client: late}
        told = {"count": self.experts, "held": self.assigned[client]}
        return Message(self.round, {"adapter": self._held_by(client)}, told)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """The client's experts back, and a mean embedding of each."""
        means = {_expert(p, j): (self.method.attention.rank,) for p, j in self._experts_of(client)}
        shapes = {"adapter": shapes_of(self._held_by(client))}
        return {**shapes, "experts": means} if self.method.chooses else shapes

    def averaged(self) -> dict[str, Tensors]:
        """All experts, and routers."""
        return {"adapter": self.values}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep the client's token embeddings until the end of the round."""
        paths = self.paths if self.method.chooses else ()
        check_shapes(upload["tokens"], dict.fromkeys(paths, (self.method.attention.rank,)))
        self.coming[client] = upload["tokens"]

    def close(self, mean: Message) -> None:
        """Take the means in, and assign for the next round; what nobody sent stays as it was."""
        self.values.update(mean["adapter"])
        self.expert_means.update(mean["experts"])
        self.token_means.update(self.coming)
        super().close(mean)
        self._assign(sorted(self.joined))

    def _experts_of(self, client: ClientId) -> set[tuple[str, int]]:
        return {(path, j) for path, held in self.assigned[client].items() for j in held}

    def _held_by(self, client: ClientId) -> dict[str, Tensor]:
        """Of all tensors, those that a client holds."""
        mine, parts = self._experts_of(client), self.parts
        return {
            name: tensor
            for name, tensor in self.values.items()
            if (j := parts[name].expert) is None or (parts[name].path, j) in mine
        }

    def _assign(self, participants: Sequence[ClientId]) -> None:
        self.assigned_for = self.round, participants
        self.assigned = self._choices(participants)

    def _choices(self, participants: Sequence[ClientId]) -> dict[ClientId, Held]:
        """Every layer's experts choose among these clients; depends on the round and them alone."""
        bounds = self.method.bounds(self.experts, len(participants))
        scores = {path: self._scores(path, participants) for path in self.paths}
        chosen = assign_all(scores, bounds)
        return {
            client: {path: np.flatnonzero(of[:, i]).tolist() for path, of in chosen.items()}
            for i, client in enumerate(participants)
        }

    def _scores(self, path: str, participants: Sequence[ClientId]) -> np.ndarray:
        """How much each expert of a layer prefers each client: (experts, clients); at random before
        anything is known."""
        tokens = [self.token_means.get(c, {}).get(path) for c in participants]
        if self.method.chooses and any(mean is not None for mean in tokens):
            experts = [self.expert_means.get(_expert(path, j)) for j in range(self.experts)]
            return relevance_of_known(experts, tokens)
        round = 0 if self.method.assignment == "random-once" else self.round
        chances = (generator(self.seed, "assign", round, path, c) for c in participants)
        return torch.stack([torch.rand(self.experts, generator=c) for c in chances], 1).numpy()

    def state(self) -> State:
        """All experts, and what is known of them and of clients."""
        clients = {client: State({"tokens": means}) for client, means in self.token_means.items()}
        means = self.expert_means
        return State({"adapter": self.values, "experts": means}, {"round": self.round}, clients)

    def restore(self, state: State) -> None:
        """Take all back, and assign again for the round to come."""
        super().restore(state)
        self.values = {name: state["adapter"][name] for name in self.values}
        self.expert_means = dict(state["experts"])
        self.token_means = {client: part["tokens"] for client, part in state.parts.items()}
        self._assign(sorted(self.joined))


def _values(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """What travels of an adapter, by name: views of its parameters, not copies."""
    return {name: part.parameter.detach() for name, part in adapter.parts().items()}


def _expert(path: str, number: int) -> str:
    """The name of a domain expert's mean embedding."""
    return f"{path}.{number}"


def _are_experts(numbers: Any, count: int) -> bool:
    """Whether a value holds different numbers of experts, ascending."""
    whole = isinstance(numbers, list) and all(type(n) is int for n in numbers)
    return whole and numbers == sorted({n for n in numbers if 0 <= n < count})
