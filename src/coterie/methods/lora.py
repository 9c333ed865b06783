"""The LoRA family: adapter x schedule x sharing x aggregation, each a choice made by data.

FedAvg, Local and the CoMiGS methods are a few lines over this file (averaging.py, comigs.py).
A client trains low-rank experts on every MLP and one low-rank pair on every attention linear;
the server averages those roles that the method shares.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Adapter, Layout, Role
from coterie.aggregation import RunningMean
from coterie.errors import CoterieError
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, State, check_shapes
from coterie.methods.base import (
    ClientContext,
    ClientId,
    ClientSide,
    Method,
    ServerContext,
    ServerSide,
    Setting,
)
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, Penalty, cosine

PerClient = int | dict[ClientId, int]
"""One number for all clients, or a number by client name, `others` standing for the rest."""

WHAT: dict[Role, str] = {
    "dense": "low-rank pairs on attention's linear layers",
    "generalist": "low-rank pairs of the generalist experts on the MLPs",
    "specialist": "low-rank pairs of the specialist experts on the MLPs",
    "router": "routers' weights",
}


class LoraMethod(Method):
    """What the methods of the family have in common; the defaults are CoMiGS's settings."""

    generalists: PerClient = Field(default=1, description="experts that are averaged over clients")
    specialists: PerClient = Field(default=0, description="experts that stay at home")
    rank: PerClient = Field(default=8, description="r of the experts")
    attention_rank: int = Field(default=8, ge=0, description="r of attention's pairs; 0: none")
    alpha: float = Field(default=16.0, gt=0, description="LoRA's alpha")
    scale: Literal["sqrt", "rank"] = Field(
        default="sqrt", description="alpha / sqrt(r), or alpha / r"
    )
    top_k: int | None = Field(
        default=None, ge=1, description="experts per token; default min(2, experts)"
    )

    common: ClassVar[tuple[str, ...]] = ("rank", "attention_rank", "alpha", "scale")
    routed: ClassVar[bool] = False
    mixes_ranks: ClassVar[bool] = False
    """Whether clients with different ranks can share experts."""
    shares: ClassVar[tuple[Role, ...]] = ("dense", "generalist")

    def levels(self, context: ClientContext, adapter: Adapter) -> list[Level]:
        """The schedule of a client: everything at once on training text."""
        everything: tuple[Role, ...] = ("dense", "generalist", "specialist", "router")
        rate = cosine(context.training, context.rounds)
        return [Level("joint", everything, "train", rate, penalty=self.penalty(adapter))]

    def penalty(self, adapter: Adapter) -> Penalty | None:
        """What is added to the loss, if anything."""
        return None

    def layout(self, client: ClientId) -> Layout:
        """What is attached to the base for a client; raises CoterieError if it cannot be."""
        return Layout(
            generalists=for_client(self.generalists, client, "number of experts"),
            specialists=for_client(self.specialists, client, "number of experts"),
            rank=for_client(self.rank, client, "rank"),
            attention_rank=self.attention_rank,
            alpha=self.alpha,
            scale=self.scale,
            routed=self.routed,
            top_k=self.top_k,
        )

    def check(self, setting: Setting) -> None:
        """Every client has a layout, and names given in mappings are those of clients."""
        clients = setting.clients
        for what in ("generalists", "specialists", "rank"):
            counts = getattr(self, what)
            for name in set(counts) - {*clients, "others"} if isinstance(counts, dict) else ():
                raise CoterieError(
                    f"The method's {what} setting names {name!r}, which is not a client "
                    f"(clients: {', '.join(clients)})."
                )
        ranks = {self.layout(client).rank for client in clients}
        if len(ranks) > 1 and "generalist" in self.shares and not self.mixes_ranks:
            raise CoterieError(
                f"The method {self.name!r} averages experts and needs the same rank for all "
                f"clients, not {', '.join(map(str, sorted(ranks)))}; give one rank, or take "
                "hetlora or flexlora."
            )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The shared roles, both ways, and their shapes in the hello."""
        fields = tuple(Travels(f"{role}*", WHAT[role]) for role in self.shares)
        shapes = Travels("shapes", "names and shapes of the tensors that will be shared", "json")
        return Schema(hello=(shapes,) if fields else (), up=fields, down=fields)

    def client(self, context: ClientContext) -> "LoraClient":
        """An adapter and its local training."""
        return LoraClient(self, context)

    def server(self, context: ServerContext) -> "LoraServer":
        """The mean of what is shared."""
        return LoraServer(self, context)


class LoraClient(ClientSide):
    """Takes the shared parameters in, trains all of its own, sends the shared ones back."""

    def __init__(self, method: LoraMethod, context: ClientContext) -> None:
        self.method = method
        self.context = context
        model = context.base.model
        layout = method.layout(context.name)
        self.adapter = Adapter(model, layout, context.seed, context.name, method.shares)
        self.training = LocalTraining(context, self.adapter, method.levels(context, self.adapter))
        self.shared = self.adapter.parameters(*method.shares) if method.shares else {}

    def hello(self) -> Message:
        """The shapes of what is shared."""
        shapes = {name: list(tensor.shape) for name, tensor in self.shared.items()}
        return Message(values={"shapes": shapes} if shapes else {})

    def step(self, download: Message) -> Message:
        """Replace the shared parameters, train, upload them."""
        self.finish(download)
        self.training.round(download.round)
        for layer, weights in self.adapter.routing().items():
            self.context.log(f"routing/{layer}", weights.tolist())  # of the round's last batch
        return Message(download.round, {n: p.detach().clone() for n, p in self.shared.items()})

    def finish(self, download: Message) -> None:
        """Replace the shared parameters by the server's."""
        check_shapes(download, {name: tuple(p.shape) for name, p in self.shared.items()})
        copy(download.tensors, self.shared)

    def model(self) -> PreTrainedModel:
        """The base with this client's adapter attached."""
        self.adapter.attach(self.context.base.model)
        return self.context.base.model

    def state(self) -> State:
        """The adapter and its optimisers' moments, copied."""
        adapter = {f"adapter/{name}": p for name, p in self.adapter.parameters().items()}
        tensors = adapter | self.training.tensors()
        return State({name: tensor.detach().clone() for name, tensor in tensors.items()})

    def restore(self, state: State) -> None:
        """Take back an adapter and its moments."""
        mine = self.adapter.parameters()
        copy({name: state.tensors[f"adapter/{name}"] for name in mine}, mine)
        self.training.restore(state.tensors)


class LoraServer(ServerSide):
    """Holds the shared parameters; a round's uploads replace them by their mean."""

    def __init__(self, method: LoraMethod, context: ServerContext) -> None:
        self.method = method
        # The first values are drawn from the run's seed alone, so the server can draw them too;
        # where ranks differ, at the largest.
        self.shared: dict[str, Tensor] = {}
        self.roles: dict[str, Role] = {}
        clients = {method.layout(client): client for client in context.clients}
        for layout in sorted(clients, key=lambda layout: -layout.rank) if method.shares else ():
            adapter = Adapter(context.base, layout, context.seed, clients[layout], method.shares)
            self.roles |= adapter.roles
            for name, parameter in adapter.parameters(*method.shares).items():
                self.shared.setdefault(name, parameter.detach())
        self.held: dict[ClientId, dict[str, tuple[int, ...]]] = {}
        self.mean = RunningMean()

    def join(self, client: ClientId, hello: Message) -> None:
        """Note which shared tensors a client holds; their shapes must be the run's."""
        told = hello.values.get("shapes", {})
        if not isinstance(told, dict) or not all(isinstance(s, list) for s in told.values()):
            raise MessageError(f"The client {client!r} gives no shapes of what it would share.")
        shapes = {name: tuple(shape) for name, shape in told.items()}
        for name, shape in shapes.items():
            if name not in self.shared or shape != self.shape(client, name):
                raise MessageError(f"The client {client!r} would share {name!r} {shape}: unknown.")
        self.held[client] = shapes

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """The shape that a client's tensor must have."""
        return tuple(self.shared[name].shape)

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Start a mean."""
        super().open(round, participants)
        self.mean = RunningMean()

    def download(self, client: ClientId) -> Message:
        """The shared tensors that the client holds."""
        return Message(self.round, {name: self.shared[name] for name in self.held[client]})

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count an upload in."""
        check_shapes(upload, self.held[client])
        self.mean.add(upload.tensors)

    def close(self) -> None:
        """Replace what was uploaded by its mean; what nobody sent stays."""
        self.shared.update(self.mean.result())
        super().close()

    def state(self) -> State:
        """The shared parameters."""
        return State(self.shared, {"round": self.round})

    def restore(self, state: State) -> None:
        """Take shared parameters back."""
        self.shared = dict(state.tensors)
        self.round = state.values["round"]


@torch.no_grad()
def copy(source: Mapping[str, Tensor], target: Mapping[str, torch.nn.Parameter]) -> None:
    """Write the source's values into the target's parameters, by name."""
    for name, parameter in target.items():
        parameter.copy_(source[name])


def for_client(counts: PerClient, client: ClientId, what: str) -> int:
    """The number that is meant for a client; CoterieError, which says what it is, without one."""
    count = counts if isinstance(counts, int) else counts.get(client, counts.get("others"))
    if count is None:
        raise CoterieError(
            f"The method gives no {what} for the client {client!r}; add its name or `others`."
        )
    if count < 0:
        raise CoterieError(f"The client {client!r} cannot have a {what} of {count}.")
    return count
