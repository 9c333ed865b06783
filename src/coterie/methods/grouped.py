"""Methods whose server computes a mean for each client, such as averaging within groups."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import TypeVar

from coterie.errors import CoterieError
from coterie.messages import Message, Schema, State, Tensors
from coterie.methods.adapter import AdapterMethod, AdapterServer
from coterie.methods.contract import ClientId, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.methods.sides import Holders
from coterie.methods.tensors import copied
from coterie.transforms.context import Rows


class PersonalMethod(AdapterMethod):
    """A method whose server sends each client its own weighted mean; see `PersonalServer`."""

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        averaged = super().schema()
        return replace(averaged, up=tuple(replace(f, reduce="rows") for f in averaged.up))


M = TypeVar("M", bound=AdapterMethod, default=PersonalMethod, covariant=True)


class PersonalServer(AdapterServer[M]):
    """The server of a `PersonalMethod`.

    Subclasses override `rows`, and name each mean after the client that receives it. A client
    without a mean receives the initial values.
    """

    def __init__(self, method: M, context: ServerContext) -> None:
        super().__init__(method, context)
        self.means: dict[ClientId, Tensors] = {}
        """The latest mean of each client."""

    def download(self, client: ClientId) -> Message:
        message = super().download(client)
        mean = self.means.get(client, {})
        own = {name: mean.get(name, tensor) for name, tensor in message["adapter"].items()}
        return replace(message, groups={**message.groups, "adapter": own})

    def replaces(self) -> dict[str, Tensors]:
        return {}

    def end_round(self, mean: Message, held: Holders) -> None:
        # Parameters that no client sent keep their values.
        for client, groups in mean.peers.items():
            self.means[client] = {**self.means.get(client, {}), **groups["adapter"]}
        super().end_round(mean, held)

    def state(self) -> State:
        # Clients with equal rows have means of the same tensors, which are stored once.
        keys = {c: tuple(id(t) for t in mean.values()) for c, mean in self.means.items()}
        means = {keys[client]: self.means[client] for client in sorted(self.means)}
        numbers = {key: number for number, key in enumerate(means)}
        state = super().state()
        # Different means may share tensors that were not sent recently, hence the copies.
        groups = {f"mean-{numbers[key]}": copied(tensors) for key, tensors in means.items()}
        values = {"means": {client: numbers[key] for client, key in keys.items()}}
        return replace(state, groups={**state.groups, **groups}, values={**state.values, **values})

    def restore(self, state: State) -> None:
        super().restore(state)
        groups = {number: state[f"mean-{number}"] for number in {*state.values["means"].values()}}
        self.means = {client: groups[number] for client, number in state.values["means"].items()}


class Grouped(PersonalMethod):
    """Federated averaging within groups of clients that the run file names."""

    name: ClassVar[str] = "grouped"
    summary: ClassVar[str] = "all trained parameters averaged within groups that you name"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    groups: dict[ClientId, str] = Field(default={})
    """group of each client; clients in the same group share a model"""

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if missing := [name for name in run.clients if name not in self.groups]:
            raise CoterieError(
                f"The method {self.name!r} needs the group of every client; add "
                f"{', '.join(missing)} to its setting `groups`."
            )

    def server(self, context: ServerContext) -> "GroupedServer":
        return GroupedServer(self, context)


class GroupedServer(PersonalServer[Grouped]):
    """A server that averages the uploads of each group."""

    def rows(self) -> Rows:
        group = {client: self.method.groups[client] for client in self.held}
        return {
            client: dict.fromkeys((c for c in group if group[c] == group[client]), 1.0)
            for client in group
        }
