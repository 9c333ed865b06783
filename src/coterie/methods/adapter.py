"""Methods whose clients train an adapter and whose server averages the part of it that is shared.

A method says what is attached (`adapter`), which roles of it travel (`shares`), and when what is
updated (`levels`); the two sides are the same for all of them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coterie.adapters import Role, Trainable
from coterie.aggregation import RunningMean
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, State, check_shapes
from coterie.methods.contract import (
    ClientContext,
    ClientId,
    ClientSide,
    Method,
    ServerContext,
    ServerSide,
)
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, Penalty, learning_rate

WHAT: dict[Role, str] = {
    "dense": "low-rank pairs on attention's linear layers",
    "generalist": "low-rank pairs of the generalist experts on the MLPs",
    "specialist": "low-rank pairs of the specialist experts on the MLPs",
    "router": "routers' weights",
    "prompt": "the soft prompt, or the encoder that makes it",
}


class AdapterMethod(Method):
    """An adapter is trained on training text; the roles in `shares` are averaged."""

    shares: ClassVar[tuple[Role, ...]]

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        """What a client trains. Shared parameters begin equal for all, from the seed alone.

        `base` may have no weights (meta tensors).
        """
        raise NotImplementedError

    def kinds(self, clients: tuple[ClientId, ...]) -> list[ClientId]:
        """One client for each kind of adapter, that with the largest tensors first."""
        return list(clients[:1])

    def levels(self, context: ClientContext, adapter: Any) -> list[Level]:
        """The schedule of a client: everything at once on training text."""
        everything = tuple(sorted({*adapter.roles.values()} - {"frozen"}))
        rate = learning_rate(context.training, context.rounds)
        return [Level("joint", everything, "train", rate, penalty=self.penalty(adapter))]

    def penalty(self, adapter: Any) -> Penalty | None:
        """What is added to the loss, if anything."""
        return None

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The shared roles, both ways, and their shapes in the hello."""
        fields = tuple(Travels(f"{role}*", WHAT[role]) for role in self.shares)
        shapes = Travels("shapes", "names and shapes of the tensors that will be shared", "json")
        return Schema(hello=(shapes,) if fields else (), up=fields, down=fields)

    def client(self, context: ClientContext) -> "AdapterClient":
        """An adapter and its local training."""
        return AdapterClient(self, context)

    def server(self, context: ServerContext) -> "AdapterServer":
        """The mean of what is shared."""
        return AdapterServer(self, context)


class AdapterClient(ClientSide):
    """Takes the shared parameters in, trains all of its own, sends the shared ones back."""

    def __init__(self, method: AdapterMethod, context: ClientContext) -> None:
        self.method = method
        self.context = context
        self.adapter = method.adapter(context.base.model, context.seed, context.name)
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
        return self.adapter.attach(self.context.base.model)

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


class AdapterServer(ServerSide):
    """Holds the shared parameters; a round's uploads replace them by their mean."""

    def __init__(self, method: AdapterMethod, context: ServerContext) -> None:
        self.method = method
        # The first values are drawn from the run's seed alone, so the server can draw them too;
        # where ranks differ, at the largest.
        self.shared: dict[str, Tensor] = {}
        self.roles: dict[str, Role] = {}
        for client in method.kinds(context.clients) if method.shares else ():
            adapter = method.adapter(context.base, context.seed, client)
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
