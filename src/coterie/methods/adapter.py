"""Methods whose clients train an adapter and whose server averages its shared parameters.

A method chooses what is attached to the base (its settings, or `adapter`), which parameters are
`shared` and which of these an upload `sends`, when each parameter is updated (`levels`), and what
is added to the loss (`penalty`). Both sides are the same for all of these methods. The engine
computes the mean; see aggregation/mean.py.
"""

from collections.abc import Mapping
from typing import ClassVar, Generic

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from coterie.adapters import Adapter, Layout, Parameter, Role, Trainable, trained
from coterie.errors import CoterieError
from coterie.messages import Field as Travels
from coterie.messages import Message, MessageError, Schema, Shapes, State, Tensors, check_shapes
from coterie.messages.names import ROUTING
from coterie.methods.contract import (
    ClientContext,
    ClientId,
    ClientSide,
    Holders,
    Method,
    RunFacts,
    ServerContext,
    ServerSide,
)
from coterie.methods.exact import Residuals, residual_shapes, with_residuals
from coterie.methods.settings import Attention, Lora, Mlp, Router, Settings, check_names, for_client
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, Penalty, learning_rate

S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound="AdapterMethod", default="AdapterMethod", covariant=True)
WHAT: dict[Role, str] = {
    "dense": "LoRA pairs on single linear layers, usually of attention",
    "generalist": "LoRA pairs of the generalists on the MLPs",
    "specialist": "LoRA pairs of the specialists on the MLPs",
    "router": "router weights",
    "weight": "differences from the base's weights",
    "prompt": "soft prompt, or the encoder that computes it",
}


class AdapterMethod(Method):
    """A method that trains an adapter and replaces its shared parameters by their mean.

    By default, the parts `mlp`, `attention`, `lora` and `router` of the settings, where the method
    has them, describe the adapter.
    """

    shared_roles: ClassVar[tuple[Role, ...]] = ("dense", "generalist")
    """The roles of the shared parameters, unless `shared` is overridden."""
    learns_preferences: ClassVar[bool] = True
    mixes_ranks: ClassVar[bool] = False
    """Whether clients with different ranks can share experts."""

    def shared(self, parameter: Parameter) -> bool:
        """Return whether the parameter's role is one of `shared_roles`."""
        return parameter.role in self.shared_roles

    def layout(self, client: ClientId) -> Layout:
        """Return what is attached to the base for a client; raises CoterieError if it cannot be."""
        mlp, attention = self.part("mlp", Mlp), self.part("attention", Attention)
        router, lora = self.part("router", Router), self.part("lora", Lora) or Lora()
        generalists, specialists = (0, 0) if mlp is None else mlp.counts(client)
        return Layout(
            generalists=generalists,
            specialists=specialists,
            rank=1 if mlp is None else for_client(mlp.rank, client, "rank"),
            placement="auto" if mlp is None else mlp.placement,
            attention_rank=0 if attention is None else attention.rank,
            targets=None if attention is None else attention.targets,
            alpha=lora.alpha,
            scale=lora.scale,
            routed=router is not None,
            top_k=None if router is None else router.top_k,
            dropout=lora.dropout,
        )

    def part(self, name: str, kind: type[S]) -> S | None:
        """Return a part of the settings; None if it is null or if the method does not have it.

        Raises:
            TypeError: the part is of another kind.
        """
        part: object = getattr(self, name, None)
        if part is None or isinstance(part, kind):
            return part
        raise TypeError(f"{type(self).__name__}.{name} must be a {kind.__name__}, not {part!r}.")

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        """Create what a client trains. Shared parameters start equal, from the seed alone.

        Args:
            base: may have no weights (meta tensors).
        """
        return Adapter(base, self.layout(client), seed, client, self.shared)

    def kinds(self, clients: tuple[ClientId, ...]) -> list[ClientId]:
        """Return one client for each layout of adapters, sorted from the highest rank down."""
        layouts = {self.layout(client): client for client in clients}
        return [layouts[layout] for layout in sorted(layouts, key=lambda layout: -layout.rank)]

    def levels(self, client: "AdapterClient") -> list[Level]:
        """Return the schedule of a client; by default, all parameters at once on training text."""
        rate = learning_rate(client.context.training, client.context.rounds)
        return [Level("joint", trained, "train", rate, penalty=self.penalty(client))]

    def penalty(self, client: "AdapterClient") -> Penalty | None:
        """Return what is added to a client's loss: called once, computed at every step."""
        return None

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the fields of the shared parameters: their values both ways, and their shapes."""
        if not self.shared_roles:
            return Schema()
        what = "; ".join(WHAT[role] for role in self.shared_roles)
        adapter = Travels("adapter", what, reduce="mean")
        shapes = Travels("shapes", "names and shapes of the tensors to share", "json")
        schema = Schema(hello=(shapes,), up=(adapter,), down=(adapter,))
        return with_residuals(schema) if self.averages_exactly else schema

    @property
    def averages_exactly(self) -> bool:
        """Whether products B A are averaged, in a method that has the setting `exact`."""
        return bool(getattr(self, "exact", False))

    def check(self, run: RunFacts) -> None:
        """Refuse clients without a layout, and names in mappings that are not those of clients."""
        clients = run.clients
        for part in ("mlp", "attention"):
            check_names(self.part(part, Settings), part, clients)
        if run.server_optimiser and self.averages_exactly:
            raise CoterieError(
                "`exact: true` sends what makes means exact, which a step of aggregation.optimiser "
                "would undo; remove one of them."
            )
        layouts = [self.layout(client) for client in clients]
        empty = any(layout.experts + layout.attention_rank == 0 for layout in layouts)
        if empty and type(self).adapter is AdapterMethod.adapter:
            raise CoterieError(
                f"The method {self.name!r} has nothing to train: it needs one of the parts mlp and "
                "attention, or an adapter() of its own."
            )
        ranks = {layout.rank for layout in layouts}
        if len(ranks) > 1 and "generalist" in self.shared_roles and not self.mixes_ranks:
            raise CoterieError(
                f"The method {self.name!r} averages experts and needs the same rank for all "
                f"clients, not {', '.join(map(str, sorted(ranks)))}; set one rank, or use "
                "hetlora or flexlora."
            )

    def client(self, context: ClientContext) -> "AdapterClient":
        """Create a side that trains an adapter."""
        return AdapterClient(self, context)

    def server(self, context: ServerContext) -> "AdapterServer":
        """Create a side that holds the means."""
        return AdapterServer(self, context)


class AdapterClient(ClientSide, Generic[M]):
    """Receives the shared parameters, trains its adapter, and uploads the shared parameters."""

    def __init__(self, method: M, context: ClientContext) -> None:
        self.method, self.context = method, context
        self.adapter = method.adapter(context.base.model, context.seed, context.name)
        parameters = self.adapter.parameters()
        self.shared = {n: p.tensor for n, p in parameters.items() if method.shared(p)}
        """The tensors of the shared parameters, by name."""
        self.kept: dict[str, dict[str, Tensor]] = {}
        """Groups of tensors beside the adapter that must survive a restart.

        Groups that the schema lets down are received, and those that it lets up are uploaded; their
        tensors have the names and shapes of the shared parameters.
        """
        self.training = LocalTraining(context, self.adapter, method.levels(self))

    def hello(self) -> Message:
        """Return the shapes of the shared parameters."""
        shapes = {name: list(tensor.shape) for name, tensor in self.shared.items()}
        return Message(values={"shapes": shapes} if shapes else {})

    def receive(self, download: Message) -> None:
        """Replace the shared parameters, and groups beside them, by the server's."""
        shapes, residual = shapes_of(self.shared), download["residual"]
        down = {field.name for field in self.method.schema().down}
        received = {"adapter": self.shared, **{g: t for g, t in self.kept.items() if g in down}}
        for group in received:
            check_shapes(download[group], shapes)
        check_shapes(residual, residual_shapes(self.parameters(), shapes, residual))
        for group, tensors in received.items():
            copy(download[group], tensors)
        if self.method.averages_exactly:
            self.adapter.set_residual(residual)

    def train(self, exchange: int) -> None:
        """Take the local steps of an exchange."""
        self.training.round(exchange)
        for layer, weights in self.adapter.routing().items():
            self.context.log(f"{ROUTING}{layer}", weights.tolist())  # of the round's last batch

    def upload(self, exchange: int) -> Message:
        """Return the shared parameters that are sent in this exchange, and groups beside them."""
        parameters, method = self.parameters(), self.method
        sent = [name for name in self.shared if method.sends(parameters[name], exchange)]
        up = {field.name for field in method.schema().up}
        groups = {g: t for g, t in {"adapter": self.shared, **self.kept}.items() if g in up}
        return Message(exchange, {g: copied({n: t[n] for n in sent}) for g, t in groups.items()})

    def model(self) -> PreTrainedModel:
        """Return the base with this client's adapter attached."""
        return self.adapter.attach(self.context.base.model)

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the parameters of the adapter."""
        return self.adapter.parameters()

    def state(self) -> State:
        """Return copies of the adapter, its optimisers' moments and the groups in `kept`."""
        groups = {"adapter": copied(self.adapter.tensors())}
        groups |= {group: copied(tensors) for group, tensors in self.kept.items()}
        if self.method.averages_exactly:
            groups["residual"] = copied(self.adapter.residual())
        return State(groups, parts={"training": self.training.state()})

    def restore(self, state: State) -> None:
        """Restore the adapter, its moments and the groups in `kept`."""
        copy(state["adapter"], self.adapter.tensors())
        for group in self.kept:
            self.kept[group] = {n: self._beside(n, t) for n, t in state[group].items()}
        self.training.restore(state.parts["training"])
        if self.method.averages_exactly:
            self.adapter.set_residual(state["residual"])

    def _beside(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device of the trained tensor of that name, or of the base."""
        like = self.adapter.tensors().get(name)
        return tensor.to(self.context.base.device if like is None else like.device, copy=True)


class AdapterServer(ServerSide, Generic[M]):
    """Holds the shared parameters, which are replaced by their mean in every exchange."""

    def __init__(self, method: M, context: ServerContext) -> None:
        self.method = method
        # The first values are drawn from the run's seed alone, so the server can draw them too;
        # where ranks differ, at the largest.
        self.shared: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        """The descriptions of the shared tensors, by name."""
        for client in method.kinds(context.clients) if method.shared_roles else ():
            adapter = method.adapter(context.base, context.seed, client)
            for name, parameter in adapter.parameters().items():
                if method.shared(parameter) and name not in self.parameters:
                    self.parameters[name] = parameter
                    self.shared[name] = parameter.tensor.detach()
        self.kept: dict[str, dict[str, Tensor]] = {}
        """Groups of tensors beside the shared parameters that must survive a restart.

        Groups that the schema lets down are sent to clients; their tensors have the names of the
        shared parameters.
        """
        self.held: dict[ClientId, dict[str, tuple[int, ...]]] = {}
        self.residuals = Residuals(self.parameters if method.averages_exactly else {})

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Begin an exchange."""
        super().start_round(exchange, participants)
        self.residuals.start_round()

    def join(self, client: ClientId, hello: Message) -> None:
        """Store the shapes of the shared tensors that a client holds."""
        self.held[client] = self.declared(client, hello)

    def declared(self, client: ClientId, hello: Message) -> dict[str, tuple[int, ...]]:
        """Return the shapes in a client's hello; raises MessageError unless they are the run's."""
        told = hello.values.get("shapes", {})
        if not isinstance(told, dict) or not all(isinstance(s, list) for s in told.values()):
            raise MessageError(
                f"The client {client!r} did not send the shapes of its shared tensors."
            )
        shapes = {name: tuple(shape) for name, shape in told.items()}
        for name, shape in shapes.items():
            if name not in self.shared or shape != self.shape(client, name):
                raise MessageError(
                    f"The client {client!r} declares the shared tensor {name!r} {shape}, which the "
                    "server does not expect; `shared` must choose the same on both sides."
                )
        return shapes

    def leave(self, client: ClientId) -> None:
        """Forget a client, and the shapes that it holds."""
        self.held.pop(client, None)
        super().leave(client)

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """Return the shape that a client's tensor must have."""
        return tuple(self.shared[name].shape)

    def download(self, client: ClientId) -> Message:
        """Return the shared tensors that a client holds, and groups beside them."""
        held, down = self.held[client], {field.name for field in self.method.schema().down}
        groups = {
            group: {name: tensors[name] for name in held}
            for group, tensors in {"adapter": self.shared, **self.kept}.items()
            if group in down
        }
        return Message(self.exchange, {**groups, **self.residuals.groups(held)})

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Return the shapes of what the client sends in this exchange, for every averaged group."""
        held, parameters, sends = self.held[client], self.parameters, self.method.sends
        shapes = {n: s for n, s in held.items() if sends(parameters[n], self.exchange)}
        return dict.fromkeys(self.method.schema().reduced("mean"), shapes)

    def replaces(self) -> dict[str, Tensors]:
        """Return the shared parameters."""
        return {"adapter": self.shared}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Add the client's products B A, where averages are exact."""
        self.residuals.receive(upload)

    def end_round(self, mean: Message, held: Holders) -> None:
        """Replace the shared parameters by their means; parameters that nobody sent stay."""
        self.shared.update(mean["adapter"])
        self.residuals.end_round(self.shared)
        super().end_round(mean, held)

    def state(self) -> State:
        """Return the shared parameters and the groups in `kept`."""
        groups = {"adapter": self.shared, **self.kept, **self.residuals.groups(self.shared)}
        return State(groups, {"round": self.exchange})

    def restore(self, state: State) -> None:
        """Restore the shared parameters and the groups in `kept`."""
        super().restore(state)
        self.shared = dict(state["adapter"])
        self.kept = {group: dict(state[group]) for group in self.kept}
        self.residuals.tensors = dict(state["residual"])


def fine_tuned(name: str) -> dict[str, dict[str, str]]:
    """Return the preset of a method whose result is the model after local training, by its name."""
    summary = f"as {name}; reports each client's model after local training"
    return {f"{name}-ft": {"summary": summary, "reports": "trained"}}


@torch.no_grad()
def copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Write the source's values into the target's tensors, by name."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros of the shapes, dtypes and devices of tensors, by name."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
