"""FedAMoLE: domain experts choose their clients (arXiv 2411.19128).

On every chosen linear layer stand one expert that all clients share and some of E domain experts.
After local training a client sends what it trained, and for every layer two kinds of means over a
few of its samples: of each expert's embedding A_j x and of its tokens' embedding W_t x. The server
averages shared parts over all clients, each domain expert over those that hold it, and lets every
expert choose its k_c clients anew, by the relevance of the clients' tokens (RSEA; one exact linear
programme per layer).
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import AmoleAdapter, AmoleLayout, Role
from coterie.aggregation import Bounds, RunningMean, assign_all, relevance
from coterie.bases.sites import chosen_linears
from coterie.chance import generator
from coterie.data import Batch
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, State, check_shapes
from coterie.methods.contract import (
    ClientContext,
    ClientId,
    ClientSide,
    Method,
    ServerContext,
    ServerSide,
    Setting,
)
from coterie.privacy.mechanisms import noise_for, private_mean
from coterie.training.embeddings import embedding_set, mean_embeddings
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate

Held = dict[str, list[int]]
"""By layer, the domain experts that a client holds there, ascending."""
TRAINED: tuple[Role, ...] = ("shared", "domain", "projection")
MOST_EXPERTS = 2**16
"""Per layer, that a client believes a server to have."""


class Privacy(BaseModel):
    """Differential privacy of what a client tells of its samples: the means of embeddings.

    It says nothing of the trained adapters, which travel too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0, description="over all rounds, for one sample of the embedding set")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="the chance that epsilon fails")
    clip: float = Field(
        default=1.0, gt=0, description="largest l2 norm of one sample's embeddings, all layers'"
    )


class FedAMoLE(Method):
    """The defaults are the paper's: 30 domain experts per layer for its 10 clients."""

    name: ClassVar[str] = "fedamole"
    paper: ClassVar[str] = "arXiv 2411.19128"
    summary: ClassVar[str] = "a shared expert; domain experts choose their clients every round"
    common: ClassVar[tuple[str, ...]] = ("rank", "alpha", "targets")

    experts: int | None = Field(
        default=None, ge=1, description="E: domain experts per layer; default: three per client"
    )
    clients_per_expert: int = Field(default=2, ge=1, description="k_c: clients an expert chooses")
    least_experts: int = Field(default=2, ge=0, description="k_e: experts that a client has, per")
    most_experts: int = Field(default=8, ge=1, description="b: layer, at least and at most")
    top_k: int = Field(default=2, ge=1, description="domain experts that work on a token")
    rank: int = Field(default=8, ge=1, description="r of every pair and of the router")
    alpha: float = Field(default=16.0, gt=0, description="LoRA's alpha; the scale is alpha / r")
    targets: str = Field(
        default=r"q_proj|v_proj|c_attn",
        description="which linear layers carry experts: a pattern of their names",
    )
    load_balance_weight: float = Field(default=1e-3, ge=0, description="beta")
    assignment: Literal["rsea", "homogeneous", "random", "random-once"] = Field(
        default="rsea",
        description="experts choose; so, but as many for each client; drawn every round; or once",
    )
    shared_expert: bool = Field(default=True, description="false: domain experts alone")
    router: Literal["token", "vanilla"] = Field(
        default="token",
        description="by the experts' own embeddings; or a gate with a row for each of all experts",
    )
    score_scale: Literal["rank", "dim"] = Field(
        default="rank", description="scores are divided by sqrt(r); in the paper by sqrt(dim)"
    )
    renormalise: bool = Field(
        default=True, description="a token's weights sum to 1; not so in the paper"
    )
    embedding_share: float = Field(
        default=0.05, gt=0, le=1, description="of the training samples, for mean embeddings"
    )
    embedding_samples: int = Field(default=200, ge=1, description="of them at most")
    privacy: Privacy | None = Field(default=None, description="of the mean embeddings")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.router == "vanilla" and self.chooses:
            raise ValueError(
                "a vanilla router gives no embeddings to choose by; set `assignment` to random or "
                "random-once"
            )
        if self.experts is not None and self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, but there are {self.experts} experts; lower top_k"
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
            rank=self.rank,
            alpha=self.alpha,
            top_k=self.top_k,
            targets=self.targets,
            shared=self.shared_expert,
            router=self.router,
            score_scale=self.score_scale,
            renormalise=self.renormalise,
        )

    def bounds(self, experts: int, clients: int) -> Bounds:
        """How many clients and experts get each other; where clients are missing, relaxed."""
        bounds = Bounds(self.clients_per_expert, self.least_experts, self.most_experts)
        relaxed = bounds.relaxed(experts, clients)
        if self.assignment == "homogeneous":
            return relaxed.homogeneous(experts, clients)
        return relaxed

    def check(self, setting: Setting) -> None:
        """There is an assignment within the bounds."""
        clients = len(setting.clients)
        bounds = Bounds(self.clients_per_expert, self.least_experts, self.most_experts)
        bounds.refuse(self.count(clients), clients)

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is trained both ways, means of embeddings up."""
        pairs = [Travels("domain.*", "low-rank pairs of the domain experts the client holds")]
        if self.shared_expert:
            pairs.append(Travels("shared/*", "the low-rank pair of every layer's shared expert"))
        token = self.router == "token"
        router = "projection/*" if token else "gate/*"
        trained = (*pairs, Travels(router, "the routers: token projections, or gates"))
        means = (
            Travels("embedding.*", "of each expert held, its mean embedding of some samples"),
            Travels("tokens/*", "the mean token embedding of the same samples"),
        )
        count = Travels("experts", "how many domain experts there are", "json")
        return Schema(up=(*trained, *(means if self.chooses else ())), down=(*trained, count))

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
        self.adapter = self._holding({}, 1)
        self.secret = secrets.randbits(62)
        """What noise is drawn from: the server knows the run's seed, and could take it off."""

    def _holding(self, held: Held, experts: int) -> AmoleAdapter:
        base, layout = self.context.base.model, self.method.layout(experts)
        nothing: Held = {path: [] for path in chosen_linears(base, layout.targets)}
        return AmoleAdapter(base, layout, self.context.seed, nothing | held)

    def step(self, download: Message) -> Message:
        """Take experts in, train them, and say how they see some samples."""
        self.finish(download)
        context, adapter = self.context, self.adapter
        rate = learning_rate(context.training, context.rounds)
        penalty = self._load_balance if adapter.balances else None
        level = Level("joint", TRAINED, "train", rate, penalty=penalty)
        LocalTraining(context, adapter, [level]).round(download.round)
        for layer, weights in adapter.routing().items():
            context.log(f"routing/{layer}", weights.tolist())  # of the round's last batch
        tensors = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
        means = self._means(download) if self.method.chooses else {}
        return Message(download.round, tensors | means)

    def _load_balance(self, start: Mapping[str, Tensor]) -> Tensor:
        return self.method.load_balance_weight * self.adapter.load_balance()

    def finish(self, download: Message) -> None:
        """Hold the experts that the server hands out."""
        experts = download.values.get("experts")
        if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
            raise MessageError("The server does not say how many experts there are.")
        self.adapter = self._holding(held(download.tensors), experts)
        shapes = {name: tuple(t.shape) for name, t in self.adapter.tensors().items()}
        check_shapes(download, shapes)
        self.adapter.load(download.tensors)

    def _means(self, download: Message) -> dict[str, Tensor]:
        """`embedding.ID/PATH` and `tokens/PATH`: (r,), the means over the embedding set."""
        context, privacy = self.context, self.method.privacy
        private = None
        if privacy is not None:
            noise = noise_for(privacy.epsilon, context.rounds, privacy.delta)
            # A round may be opened again with other experts: equal noise would cancel out.
            digest = blake2b(download.encode(), digest_size=16).hexdigest()
            chance = generator(self.secret, "embedding noise", digest)
            private = partial(private_mean, clip=privacy.clip, noise=noise, chance=chance)
        samples = self.samples()
        means = mean_embeddings(
            context.base, self.adapter, samples, context.training.batch, private
        )
        found = {f"tokens/{path}": mean[-1].clone() for path, mean in means.items()}
        for path, experts in held(self.adapter.tensors()).items():
            rows = zip(experts, means[path][:-1], strict=True)
            found |= {f"embedding.{j}/{path}": mean.clone() for j, mean in rows}
        return found

    def samples(self) -> Batch:
        """The embedding set: the same training samples in every round."""
        context, method = self.context, self.method
        chance = generator(context.seed, "embedding", context.name)
        share, most = method.embedding_share, method.embedding_samples
        return embedding_set(context.data.train, context.window, share, most, chance)

    def model(self) -> PreTrainedModel:
        """The base with the experts that are held."""
        return self.adapter.attach(self.context.base.model)

    def state(self) -> State:
        """The experts held, copied, and the noise's secret."""
        tensors = {f"adapter/{n}": t.clone() for n, t in self.adapter.tensors().items()}
        values = {"experts": self.adapter.layout.experts}
        return State(tensors, values | ({"secret": self.secret} if self.method.privacy else {}))

    def restore(self, state: State) -> None:
        """Hold the experts of a state."""
        tensors = {name.removeprefix("adapter/"): t for name, t in state.tensors.items()}
        self.adapter = self._holding(held(tensors), state.values["experts"])
        self.adapter.load(tensors)
        self.secret = state.values.get("secret", self.secret)


class FedAMoLEServer(ServerSide):
    """Holds all experts, averages what comes back of them, and lets them choose."""

    def __init__(self, method: FedAMoLE, context: ServerContext) -> None:
        self.method, self.seed, self.log = method, context.seed, context.log
        self.experts = method.count(len(context.clients))
        layout = method.layout(self.experts)
        self.paths = list(chosen_linears(context.base, layout.targets))
        everything = dict.fromkeys(self.paths, range(self.experts))
        adapter = AmoleAdapter(context.base, layout, context.seed, everything)
        self.values = adapter.tensors()
        self.embeddings: dict[str, Tensor] = {}
        """The last means: `embedding.ID/PATH`, and `tokens/PATH CLIENT`."""
        self.joined: set[ClientId] = set()
        self.assigned: dict[ClientId, Held] = {}
        self.assigned_for: tuple[int, Sequence[ClientId]] = -1, ()
        """The round, and who takes part in it."""
        self.mean = RunningMean()

    def join(self, client: ClientId, hello: Message) -> None:
        """Experts can choose it from the next round on."""
        self.joined.add(client)

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Assign experts to those who take part."""
        super().open(round, participants)
        self.mean = RunningMean()
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
        names = self._names(client)
        return Message(self.round, {n: self.values[n] for n in names}, {"experts": self.experts})

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count an upload in."""
        shapes = {name: tuple(self.values[name].shape) for name in self._names(client)}
        if self.method.chooses:
            shapes |= dict.fromkeys(self._means(client), (self.method.rank,))
        check_shapes(upload, shapes)
        self.mean.add(
            {
                f"{name} {client}" if name.startswith("tokens/") else name: tensor
                for name, tensor in upload.tensors.items()
            }
        )

    def close(self) -> None:
        """Average, and assign for the next round; what nobody sent stays as it was."""
        for name, tensor in self.mean.result().items():
            (self.values if name in self.values else self.embeddings)[name] = tensor
        super().close()
        self._assign(sorted(self.joined))

    def _names(self, client: ClientId) -> list[str]:
        """Of all tensors, those that a client holds."""
        mine = {f"domain.{j}/{p}" for p, experts in self.assigned[client].items() for j in experts}
        return [
            name
            for name in self.values
            if not name.startswith("domain.") or name.rpartition(".")[0] in mine
        ]

    def _means(self, client: ClientId) -> Iterable[str]:
        """Names of the mean embeddings that a client sends."""
        for path, experts in self.assigned[client].items():
            yield f"tokens/{path}"
            yield from (f"embedding.{j}/{path}" for j in experts)

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
        """How much each expert of a layer prefers each client: (experts, clients).

        At random before anything is known; a client of which nothing is known counts as the mean.
        """
        tokens = {c: self.embeddings.get(f"tokens/{path} {c}") for c in participants}
        known = [tensor for tensor in tokens.values() if tensor is not None]
        if not self.method.chooses or not known:
            round = 0 if self.method.assignment == "random-once" else self.round
            draws = [
                torch.rand(self.experts, generator=generator(self.seed, "assign", round, path, c))
                for c in participants
            ]
            return torch.stack(draws, dim=1).numpy()
        mean = torch.stack(known).mean(0)
        nothing = torch.zeros_like(mean)  # relevant for all clients alike
        experts = [
            self.embeddings.get(f"embedding.{j}/{path}", nothing) for j in range(self.experts)
        ]
        clients = [mean if tensor is None else tensor for tensor in tokens.values()]
        return relevance(torch.stack(experts).numpy(), torch.stack(clients).numpy())

    def state(self) -> State:
        """All experts, and what is known of them and of clients."""
        return State({**self.values, **self.embeddings}, {"round": self.round})

    def restore(self, state: State) -> None:
        """Take all back, and assign again for the round to come."""
        self.values = {name: state.tensors[name] for name in self.values}
        self.embeddings = {n: t for n, t in state.tensors.items() if n not in self.values}
        self.round = state.values["round"]
        self._assign(sorted(self.joined))


def held(names: Iterable[str]) -> Held:
    """The domain experts of which there are tensors, by layer: `domain.17/PATH.A` and `.B`."""
    found = sorted(
        (match[2], int(match[1]))
        for name in names
        if (match := re.fullmatch(r"domain\.(\d{1,5})/(.+)\.A", name))
    )
    layers: Held = {}
    for path, expert in found:
        layers.setdefault(path, []).append(expert)
    return layers
