"""Methods that train an adapter and average its shared parameters on the server.

A method determines the adapter (by its settings, or by overriding `adapter`), which parameters are
shared (`shared`), which shared parameters an upload contains (`sends`), when each parameter is
updated (`levels`), and the term that is added to the loss (`penalty`). The client and server
classes are the same for all of these methods. The engine computes the mean (exchanges/mean.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from coterie.adapters import ROLES, Adapter, Layout, Parameter, Trainable, trained
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Message, MessageError, Schema, Shapes, State, Tensors, check_shapes
from coterie.methods.contract import ClientContext, ClientId, Method, RunFacts, ServerContext
from coterie.methods.exact import residual_shapes, residuals, with_residuals
from coterie.methods.settings import (
    Attention,
    Lora,
    Mlp,
    PhasedRouter,
    Router,
    Settings,
    check_names,
    for_client,
)
from coterie.methods.sides import ClientSide, Server
from coterie.methods.tensors import copied, copy, log_routing, shapes_of
from coterie.methods.value import PerClient, Value, from_hello
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, Penalty, learning_rate
from coterie.turn import Turn

S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound="AdapterMethod", default="AdapterMethod", covariant=True)


class AdapterMethod(Method):
    """A method that trains an adapter and averages the shared parameters over the clients.

    By default, the parts `mlp`, `attention`, `lora` and `router` of the settings determine the
    adapter. A method need not have all of these parts.
    """

    shared_roles: ClassVar[tuple[str, ...]] = ("dense", "generalist")
    """The names of the roles of the shared parameters, unless `shared` is overridden."""
    learns_preferences: ClassVar[bool] = True
    routers_learn: ClassVar[Literal["validation", "train"]] = "validation"
    """The text on which routers are trained, if they are trained in separate phases."""
    mixes_ranks: ClassVar[bool] = False
    """Whether clients with different ranks can share experts."""

    def shared(self, parameter: Parameter) -> bool:
        return parameter.role in self.shared_roles

    def layout(self, client: ClientId) -> Layout:
        """Return the layout of a client's adapter.

        Args:
            client: The client's name.

        Returns:
            The experts, ranks and layers that the settings specify for the client.

        Raises:
            CoterieError: A setting with one value per client has no valid value for the client.
        """
        mlp, attention = self.part("mlp", Mlp), self.part("attention", Attention)
        router, lora = self.part("router", Router), self.part("lora", Lora) or Lora()
        generalists, specialists = (0, 0) if mlp is None else mlp.counts(client)
        return Layout(
            generalists=generalists,
            specialists=specialists,
            rank=1 if mlp is None else for_client(mlp.rank, client, "mlp.rank"),
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
        """Return a part of the settings.

        Args:
            name: The name of the part.
            kind: The class that the part must have.

        Returns:
            The part, or None if it is null or if the method does not have it.

        Raises:
            TypeError: The part is not an instance of `kind`.
        """
        part: object = getattr(self, name, None)
        if part is None or isinstance(part, kind):
            return part
        raise TypeError(f"{type(self).__name__}.{name} must be a {kind.__name__}, not {part!r}.")

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        """Create a client's adapter.

        The initial values of shared parameters depend on the seed alone, so they are the same on
        all clients and on the server.

        Args:
            base: The base; it may have no weights (meta tensors).
            seed: The run's seed.
            client: The client's name.

        Returns:
            The adapter, not yet attached to the base.

        Raises:
            CoterieError: The layout does not fit the base.
        """
        return Adapter(base, self.layout(client), seed, client, self.shared)

    def representatives(self, clients: tuple[ClientId, ...]) -> list[ClientId]:
        """Return one of the run's clients for each distinct layout of the clients' adapters.

        Adapters with equal layouts (see `Layout`) have tensors with the same names and shapes.

        Returns:
            The names of the chosen clients, in descending order of the experts' LoRA rank.
        """
        layouts = {self.layout(client): client for client in clients}
        return [layouts[layout] for layout in sorted(layouts, key=lambda layout: -layout.rank)]

    def levels(self, client: "AdapterClient") -> list[Level]:
        """Return the levels of a client's training.

        Args:
            client: The client-side object, whose adapter has already been created.

        Returns:
            The levels, which are sets of parameters with separate optimisers and learning rates. By
            default, there is one level, or another one for routers that are trained in phases.
        """
        rate = learning_rate(client.context.training, client.context.rounds)
        penalty = self.penalty(client)
        if isinstance(router := self.part("router", Router), PhasedRouter):
            return router.levels(rate, self.routers_learn, penalty)
        return [Level("joint", trained, "train", rate, penalty=penalty)]

    def penalty(self, client: "AdapterClient") -> Penalty | None:
        """Return a function that computes the penalty added to a client's loss.

        Args:
            client: The client-side object, whose adapter has already been created.

        Returns:
            A function that computes the penalty at every step, or None if there is no penalty. By
            default, it computes the routers' load-balancing loss.
        """
        router = self.part("router", Router)
        return None if router is None else router.penalty(client.adapter)

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.shared_roles:
            return Schema()
        routed = self.part("router", Router) is not None
        roles = [role for role in self.shared_roles if routed or role != "router"]
        description = "; ".join(ROLES.get(role).summary for role in roles)
        adapter = MessageField("adapter", description, reduce="mean")
        shapes = MessageField("shapes", "names and shapes of the tensors to share", "json")
        schema = Schema(hello=(shapes,), up=(adapter,), down=(adapter,))
        return with_residuals(schema) if self.averages_exactly else schema

    @property
    def averages_exactly(self) -> bool:
        """Whether the products B A of LoRA pairs are averaged exactly (the setting `exact`)."""
        return bool(getattr(self, "exact", False))

    @property
    def needs_one_rank(self) -> bool:
        """Whether `mlp.rank` must be the same number for all clients."""
        return "generalist" in self.shared_roles and not self.mixes_ranks

    def check(self, run: RunFacts) -> None:
        for part in ("mlp", "attention"):
            check_names(self.part(part, Settings), part, run.clients)
        if run.server_optimiser and self.averages_exactly:
            raise CoterieError(
                "`exact: true` and aggregation.optimiser are incompatible: a step of the server "
                "optimiser would undo the correction that makes the averages exact; remove either."
            )
        layouts = [self.layout(client) for client in run.clients]
        empty = any(layout.experts + layout.attention_rank == 0 for layout in layouts)
        if empty and type(self).adapter is AdapterMethod.adapter:
            raise CoterieError(
                f"The method {self.name!r} has nothing to train; set method.mlp or "
                "method.attention, or override adapter()."
            )
        ranks = {layout.rank for layout in layouts}
        if len(ranks) > 1 and self.needs_one_rank:
            raise CoterieError(
                f"The method {self.name!r} averages experts and needs the same rank for all "
                f"clients, not {', '.join(map(str, sorted(ranks)))}; use hetlora or flexlora."
            )

    def client(self, context: ClientContext) -> "AdapterClient":
        return AdapterClient(self, context)

    def server(self, context: ServerContext) -> "AdapterServer[Any, Any]":
        return AdapterServer(self, context)


class AdapterClient(ClientSide, Generic[M]):
    """A client that receives and uploads shared parameters, and trains the whole adapter."""

    def __init__(self, method: M, context: ClientContext) -> None:
        self.method, self.context = method, context
        self.adapter = method.adapter(context.base.model, context.seed, context.name)
        self.shared = {n: p.tensor for n, p in self.parameters().items() if method.shared(p)}
        """A mapping from the name of each shared parameter to the parameter's tensor."""
        self.buffers: dict[str, dict[str, Tensor]] = {}
        """Groups of tensors, other than the adapter, that must survive a restart.

        Downloads overwrite the groups that `Schema.down` names, and uploads contain the groups that
        `Schema.up` names; the tensors have the names and shapes of the shared parameters.
        """
        self.training = LocalTraining(context, self.adapter, method.levels(self))

    def hello(self) -> Message:
        shapes = {name: list(tensor.shape) for name, tensor in self.shared.items()}
        return Message(values={"shapes": shapes} if shapes else {})

    def receive(self, download: Message) -> None:
        shapes, residual = shapes_of(self.shared), download["residual"]
        down = {field.name for field in self.method.schema().down}
        received = {"adapter": self.shared, **{g: t for g, t in self.buffers.items() if g in down}}
        for group in received:
            check_shapes(download[group], shapes)
        check_shapes(residual, residual_shapes(self.parameters(), shapes, residual))
        for group, tensors in received.items():
            copy(download[group], tensors)
        if self.method.averages_exactly:
            self.adapter.set_residual(residual)

    def train(self, turn: Turn) -> None:
        self.training.run(turn.exchange)
        log_routing(self.context, self.adapter.routing())

    def upload(self, turn: Turn) -> Message:
        parameters, sends = self.parameters(), self.method.sends
        sent = [name for name in self.shared if sends(parameters[name], turn.exchange)]
        up = {field.name for field in self.method.schema().up}
        tensors = {"adapter": self.shared, **self.buffers}.items()
        groups = {g: copied({n: t[n] for n in sent}) for g, t in tensors if g in up}
        return Message(turn.exchange, groups)

    def model(self) -> PreTrainedModel:
        return self.adapter.attach(self.context.base.model)

    def parameters(self) -> Mapping[str, Parameter]:
        return self.adapter.parameters()

    def state(self) -> State:
        groups = {"adapter": copied(self.adapter.tensors())}
        groups |= {group: copied(tensors) for group, tensors in self.buffers.items()}
        if self.method.averages_exactly:
            groups["residual"] = copied(self.adapter.residual())
        return State(groups, parts={"training": self.training.state()})

    def restore(self, state: State) -> None:
        copy(state["adapter"], self.adapter.tensors())
        for group in self.buffers:
            self.buffers[group] = {n: self._on_device(n, t) for n, t in state[group].items()}
        self.training.restore(state.parts["training"])
        if self.method.averages_exactly:
            self.adapter.set_residual(state["residual"])

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device of the adapter's tensor `name`."""
        original = self.adapter.tensors().get(name)
        # If the adapter has no tensor of this name, use the base's device.
        device = self.context.base.device if original is None else original.device
        return tensor.to(device, copy=True)


@dataclass(frozen=True, eq=False)
class Shared(Value):
    """The shared parameters, and which client holds which of them."""

    adapter: Tensors = field(default_factory=dict)
    """The shared parameters."""
    residual: Tensors = field(default_factory=dict)
    """The low-rank factors of residuals, if LoRA pairs are averaged exactly (methods/exact.py)."""
    held: PerClient[Shapes] = from_hello()
    """The shapes of each client's shared tensors."""


V = TypeVar("V", bound=Shared, default=Shared)


class AdapterServer(Server[V], Generic[M, V]):
    """A server that replaces each shared parameter with the clients' mean in every exchange."""

    needs_all: ClassVar[bool] = False
    """Whether every client must hold all shared tensors."""

    def __init__(self, method: M, context: ServerContext) -> None:
        self.method, self.context = method, context
        # The initial values depend on the run's seed alone, so the server can draw them as well.
        # If clients' ranks differ, the server holds the tensors of the highest rank.
        self.parameters: dict[str, Parameter] = {}
        """A mapping from the name of each shared tensor to the parameter that describes it."""
        for client in method.representatives(context.clients) if method.shared_roles else ():
            adapter = method.adapter(context.base, context.seed, client)
            for name, parameter in adapter.parameters().items():
                if method.shared(parameter):
                    self.parameters.setdefault(name, parameter)
        self.start: dict[str, Tensor] = {n: p.tensor.detach() for n, p in self.parameters.items()}
        """A mapping from the name of each shared tensor to the tensor's initial values."""

    def initial(self) -> V:
        return cast("V", Shared(self.start))

    def join(self, value: V, client: ClientId, hello: Message) -> V:
        return replace(value, held=value.held | {client: self.declared(client, hello)})

    def declared(self, client: ClientId, hello: Message) -> Shapes:
        """Return the shapes that a client's hello declares for the client's shared tensors.

        Args:
            client: The client's name.
            hello: The message that the client sent to join.

        Returns:
            A mapping from the name of each tensor to the tensor's shape.

        Raises:
            MessageError: The hello has no shapes, or shapes that the server does not expect.
        """
        declared = hello.values.get("shapes", {})
        if not isinstance(declared, dict) or not all(
            isinstance(shape, list) for shape in declared.values()
        ):
            raise MessageError(
                f"The client {client!r} did not send the shapes of its shared tensors."
            )
        shapes = {name: tuple(shape) for name, shape in declared.items()}
        for name, shape in shapes.items():
            if name not in self.start or shape != self.shape(client, name):
                raise MessageError(
                    f"The client {client!r} declares the shared tensor {name!r} with the shape "
                    f"{shape}, which the server does not expect; `shared` must return the same "
                    "value on the client and on the server."
                )
        if self.needs_all and (missing := self.start.keys() - shapes):
            raise MessageError(
                f"The client {client!r} does not declare the shared tensor {min(missing)!r}; "
                f"{self.method.name} needs all shared tensors of every client."
            )
        return shapes

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """Return the shape that a client's shared tensor must have.

        Args:
            client: The client's name.
            name: The tensor's name.

        Returns:
            By default, the shape of the server's tensor.
        """
        return tuple(self.start[name].shape)

    def download(self, value: V, client: ClientId, exchange: Exchange) -> Message:
        # The value's fields have the names of the groups in the download.
        names = {f.name for f in self.method.schema().down} & {f.name for f in fields(value)}
        tensors: dict[str, Tensors] = {name: getattr(value, name) for name in sorted(names)}
        groups = {g: {n: t[n] for n in value.held[client] if n in t} for g, t in tensors.items()}
        return Message(exchange.turn.exchange, groups)

    def expects(self, value: V, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        held, number, sends = value.held[client], exchange.turn.exchange, self.method.sends
        shapes = {n: s for n, s in held.items() if sends(self.parameters[n], number)}
        return {f.name: shapes for f in self.method.schema().up if f.dtype != "json"}

    def aggregate(self, value: V, exchange: Exchange) -> V:
        if not self.parameters:  # nothing is shared
            return value
        mean = exchange.mean("adapter", start=value.adapter)
        adapter = {**value.adapter, **mean}  # parameters that no client sent keep their values
        if not self.method.averages_exactly:
            return replace(value, adapter=adapter)
        residual = residuals(self.parameters, value.residual, adapter, exchange)
        return replace(value, adapter=adapter, residual=residual)
