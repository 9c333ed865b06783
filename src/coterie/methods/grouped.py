"""Methods whose server computes a mean for each client, such as averaging within groups."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

from pydantic import Field
from typing_extensions import TypeVar

from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Message, MessageError, Schema, Tensors
from coterie.methods.adapter import AdapterMethod, AdapterServer, Shared
from coterie.methods.contract import ClientId, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, PhasedRouter, SharedSets
from coterie.methods.value import PerClient
from coterie.transforms.context import Rows


class PersonalMethod(AdapterMethod):
    """A method whose server sends each client its own weighted mean; see `PersonalServer`."""

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        averaged = super().schema()
        return replace(averaged, up=tuple(replace(f, reduce="rows") for f in averaged.up))


M = TypeVar("M", bound=AdapterMethod, default=PersonalMethod, covariant=True)


@dataclass(frozen=True, eq=False)
class Personal(Shared):
    """The initial values, and the clients' means."""

    means: PerClient[Tensors] = PerClient()
    """The latest mean of each client."""


V = TypeVar("V", bound=Personal, default=Personal)


class PersonalServer(AdapterServer[M, V]):
    """The server of a `PersonalMethod`.

    Subclasses override `rows`, and name each mean after the client that receives it. A client
    without a mean receives the initial values.
    """

    def initial(self) -> V:
        return cast("V", Personal(self.start))

    def rows(self, value: V, exchange: Exchange) -> Rows:
        """Return the clients' weights in each client's mean."""
        raise NotImplementedError

    def download(self, value: V, client: ClientId, exchange: Exchange) -> Message:
        message, mean = super().download(value, client, exchange), value.means.get(client, {})
        own = {name: mean.get(name, tensor) for name, tensor in message["adapter"].items()}
        return replace(message, groups={**message.groups, "adapter": own})

    def aggregate(self, value: V, exchange: Exchange) -> V:
        means = exchange.means("adapter", self.rows(value, exchange))
        # Parameters that no client sent keep their values.
        return replace(value, means=value.means.updated(means))


class Grouped(PersonalMethod):
    """Federated averaging within groups of clients that the run file names."""

    name: ClassVar[str] = "grouped"
    summary: ClassVar[str] = "all trained parameters averaged within groups that you name"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    shared_roles: ClassVar[tuple[str, ...]] = ("dense", "generalist", "router")

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    router: PhasedRouter | None = None
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

    def join(self, value: Personal, client: ClientId, hello: Message) -> Personal:
        if client not in self.method.groups:
            raise MessageError(f"The run file names no group of the client {client!r}.")
        return super().join(value, client, hello)

    def rows(self, value: Personal, exchange: Exchange) -> Rows:
        group = {client: self.method.groups[client] for client in value.held}
        return {
            client: dict.fromkeys((c for c in group if group[c] == group[client]), 1.0)
            for client in group
        }
