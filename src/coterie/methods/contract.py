"""The contract of a method: the only thing that engines, checks and reports know about it.

A method is data (its settings), a declaration of what may be sent, and two factories: one for the
side that runs where the data are, and one for the side that runs on the server. A complete method,
which shares nothing and changes nothing::

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return ServerSide()

Pass an instance to `coterie.run(config, method=Silent())`, or put the class in a file for `--plugin
FILE.py` to use it by its name in run files. docs/develop/add-a-method.md describes the interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn
from transformers import PreTrainedModel

from coterie.adapters import Parameter
from coterie.bases import BaseSpec
from coterie.messages import Groups, Message, Schema, Shapes, State
from coterie.privacy.ledger import Budget
from coterie.training.context import ClientContext, ClientId, Log
from coterie.training.spec import TrainingSpec

Holders = Mapping[str, Mapping[str, int]]
"""The number of clients that a tensor of an aggregate comes from, by group and name."""
SERVER = "server"
"""The name of a server that has a model of its own, where clients have theirs."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it begins, for `Method.check`."""

    clients: tuple[ClientId, ...]
    public: bool
    """Whether there is a public text."""
    bases: Mapping[ClientId, BaseSpec] = field(default_factory=dict)
    """Each client's base."""
    server: bool = False
    """Whether the server has a model of its own."""
    instructions: bool = False
    """Whether the data are prompts with answers, without a chat template."""
    optimiser: str = "adamw"
    """What makes the updates: the name of a class of torch.optim in small letters."""
    server_optimiser: bool = False
    """Whether the server steps towards means, instead of taking them as they are."""


@dataclass(frozen=True)
class ServerContext:
    """What the server side of a method is given; `base` may have no weights (meta tensors)."""

    seed: int
    base: nn.Module
    clients: tuple[ClientId, ...]
    log: Log
    training: TrainingSpec
    own: ClientContext | None = None
    """What a server with a model of its own works with, as a client does.

    Its name is `server`; its training text is the public one.
    """


class ClientSide:
    """One client's side of a method. The default side shares nothing.

    An engine calls `hello` once; then `receive`, `train` and `upload` for every exchange; and
    `receive` once more after the last exchange. A side never learns how often its model is
    evaluated.
    """

    def hello(self) -> Message:
        """Return what the server must know once, such as ranks, sizes or a vocabulary."""
        return Message()

    def receive(self, download: Message) -> None:
        """Apply a download from the server. May run for minutes.

        Args:
            download: its `round` is the number of completed exchanges.

        Raises:
            MessageError: the download does not fit. Nothing may have changed then.
        """

    def train(self, exchange: int) -> None:
        """Train locally in an exchange (the first is 0), from what was last received.

        A side that does not override this method learns nothing, so its models are not compared.
        """

    def upload(self, exchange: int) -> Message:
        """Return what the client sends after training. Must not change any state."""
        return Message(exchange)

    def model(self) -> PreTrainedModel:
        """Return the client's model, ready for evaluation.

        The model is valid until the model of another client is requested.
        """
        raise NotImplementedError

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the trained parameters by name.

        A parameter that `Method.shared` does not choose never leaves the client.
        """
        return {}

    def state(self) -> State:
        """Return everything that must survive a restart, whichever call came last.

        The model must follow from it. A client's state is private and is never sent.
        """
        return State()

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""


class ServerSide:
    """The server's side of a method. The default side shares nothing."""

    exchange: int = 0
    """The number of the exchange in progress, or of the next one."""

    def prepare(self, client: ClientId, hello: Message) -> None:
        """Prepare a join outside the lock.

        In a deployment, other methods may be called at the same time, so this method may only
        store results for `join`.

        Raises:
            MessageError: the client is refused.
        """

    def join(self, client: ClientId, hello: Message) -> None:
        """Admit a client, for the first time or again.

        Raises:
            MessageError: the client is refused.
        """

    def leave(self, client: ClientId) -> None:
        """Forget a client between two rounds, except for what is already averaged.

        By default, the client is removed from the state. A side that holds data of clients outside
        its state deletes them here.
        """
        self.restore(self.state().without(client))

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Begin an exchange, or repeat one of which too few uploads could be counted."""
        self.exchange = exchange

    def download(self, client: ClientId) -> Message:
        """Return what a client receives at the start of an exchange, or after the last one."""
        return Message(self.exchange)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Return the shapes that a client must upload now, by group.

        The groups are those that the schema reduces by `mean`.
        """
        return {}

    def reference(self, client: ClientId) -> Groups:
        """Return the parameters that a client's training starts from in this round, by group.

        Uploads are bounded by how far they are from them. Groups of an upload that are not here,
        such as predictions, are bounded by their norms. By default, all groups of the download.
        """
        return self.download(client).groups

    def replaces(self) -> Groups:
        """Return the parameters that the aggregate replaces, by group.

        A server optimiser steps from them. Aggregates of other groups, such as statistics, are
        never stepped.
        """
        return {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Add an upload: the fields that the schema reduces by `each`, and all values.

        Uploads come in the order of the clients' names.

        Raises:
            MessageError: the upload is refused.
        """

    def end_round(self, mean: Message, held: Holders) -> None:
        """End the exchange. Later downloads belong to the next exchange.

        Args:
            mean: the aggregates of the fields that the schema reduces by `mean`.
            held: the number of clients that each tensor of `mean` comes from, by group and name.
        """
        self.exchange += 1

    def model(self) -> PreTrainedModel | None:
        """Return the server's own model, or None if the method has none."""
        return None

    def state(self) -> State:
        """Return everything that must survive a restart.

        What belongs to one client is the entry of its name in `State.parts` or in one of the
        values, so that `leave` can delete it.
        """
        return State(values={"round": self.exchange})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        self.exchange = state.values["round"]


class Method(BaseModel):
    """An algorithm for learning together: its settings, what may be sent, and two factories."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    summary: ClassVar[str]
    """What it shares and keeps, in one line."""
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"
    """Which model of a client is the result: after local training, or after the last download."""

    learns_preferences: ClassVar[bool] = False
    """Whether its clients can learn from pairs of answers (`data.preferences`): they can where
    `LocalTraining` does all that is learnt."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, values: Any) -> Any:
        """Fill a partially specified section with the method's defaults."""
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        for key, info in cls.model_fields.items():
            given, default = found.get(key), info.default
            if isinstance(given, Mapping) and isinstance(default, BaseModel):
                found[key] = default.model_dump() | dict(given)
        return found

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return every field that may be sent. This replaces a deprecated method of pydantic."""
        return Schema()

    def shared(self, parameter: Parameter) -> bool:
        """Return whether a parameter may ever leave its client.

        Shared parameters start equal for all clients, and downloads carry all of them.
        """
        return False

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        """Return whether the upload of an exchange has a parameter; by default, if it is shared."""
        return self.shared(parameter)

    @property
    def mixes_bases(self) -> bool:
        """Whether clients may have different bases; they may where nothing is uploaded."""
        return not self.schema().up

    @property
    def budget(self) -> Budget | None:
        """The epsilon and delta that a run spends of a client's samples, beside what is trained.

        Infinite if it tells of them without noise; None if it tells nothing of them.
        """
        return None

    def client(self, context: ClientContext) -> ClientSide:
        """Create the side that runs where the data are."""
        raise NotImplementedError

    def server(self, context: ServerContext) -> ServerSide:
        """Create the side that runs on the server."""
        return ServerSide()

    def exchanges(self, rounds: int) -> int:
        """Return the number of exchanges in this many rounds of a run file.

        Both sides, and all records of a run, count exchanges.
        """
        return rounds

    def counts(self, message: Message) -> dict[str, int]:
        """What people may divide a message's size by, of which it holds so many.

        `{"public sample": 1000}` says that it tells of a thousand.
        """
        return {}

    def check(self, run: RunFacts) -> None:
        """Raise CoterieError if the method cannot carry out a run."""

    @classmethod
    def parts(cls) -> dict[str, BaseModel]:
        """Return the parts of the settings by name, with their default values."""
        fields = cls.model_fields.items()
        return {name: f.default for name, f in fields if isinstance(f.default, BaseModel)}

    def described(self) -> dict[str, Any]:
        """The method as a run file would give it."""
        return {"name": self.name, **self.model_dump(mode="json")}
