"""The contract of a method: the only thing that engines, checks and reports know about it.

A method is plain data (its hyper-parameters), a declaration of what may travel, and two makers:
one for the side that lives where the data live, one for the side that lives on the server.
A complete method of one's own, which shares nothing and changes nothing::

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return ServerSide()

Pass an instance to `coterie.run(config, method=Silent())`, or put the class in a file for `--plugin
FILE.py` to use it by its name in run files. docs/add-a-method.md tells all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn
from transformers import PreTrainedModel

from coterie.adapters import Part
from coterie.bases import BaseSpec
from coterie.messages import Groups, Message, Schema, Shapes, State
from coterie.privacy.ledger import Budget
from coterie.training.context import ClientContext, ClientId, Log
from coterie.training.spec import TrainingSpec

SERVER = "server"
"""The name of a server that has a model of its own, where clients have theirs."""


@dataclass(frozen=True)
class Setting:
    """What a method can know of a run before it begins, to refuse what it cannot do."""

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
    """One client's side; the default one shares nothing.

    Whoever runs it calls hello once; then, every round, take, train and upload; after the last
    round take once more. It is never asked how often its model is evaluated.
    """

    def hello(self) -> Message:
        """What the server must know once: ranks, sizes, a vocabulary."""
        return Message()

    def take(self, download: Message) -> None:
        """Take the server's word in; `download.round` rounds are complete. May compute."""

    def train(self, round: int) -> None:
        """The local work of a round (0 is the first), on what was taken in.

        A side that leaves this as it is learns nothing: its models are not compared.
        """

    def upload(self, round: int) -> Message:
        """What is sent after it; changes nothing."""
        return Message(round)

    def model(self) -> PreTrainedModel:
        """This client's model, ready for evaluation; valid until another client's is asked for."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, Part]:
        """What is trained here, by name. Those that the method does not send never leave."""
        return {}

    def state(self) -> State:
        """Everything that must survive a restart, and give the model back, whichever step came
        last. It is personal and never travels."""
        return State()

    def restore(self, state: State) -> None:
        """Go back to a state."""


class ServerSide:
    """The server's side; the default one shares nothing."""

    round: int = 0

    def prepare(self, client: ClientId, hello: Message) -> None:
        """What takes long of a join, before it. In a deployment other calls may come meanwhile, so
        this keeps what it finds for `join` and changes nothing else. Raises MessageError."""

    def join(self, client: ClientId, hello: Message) -> None:
        """A client takes part from now on, or again. Raises MessageError to refuse it."""

    def leave(self, client: ClientId) -> None:
        """Between rounds: a client takes no part any more, and nothing is kept of it but what was
        averaged in. A side that keeps something of clients outside its state forgets it here."""
        self.restore(self.state().without(client))

    def open(self, round: int, participants: list[ClientId]) -> None:
        """A round begins; or again, if too few of its uploads could be counted."""
        self.round = round

    def download(self, client: ClientId) -> Message:
        """What a client gets at the start of a round, or after the last one."""
        return Message(self.round)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Of the groups of which there is a mean: the shapes that a client must upload now."""
        return {}

    def reference(self, client: ClientId) -> Groups:
        """Return the parameters that a client's training starts from in this round, by group.

        Uploads are bounded by how far they are from them. Groups of an upload that are not here,
        such as predictions, are bounded by their norms. By default, all groups of the download.
        """
        return self.download(client).groups

    def averaged(self) -> Groups:
        """The parameters that a round's means replace, by group: where the step of a server
        optimiser begins. Other means, such as those of statistics, are never stepped."""
        return {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count an upload in: the fields that the schema reduces by `each`, and all values.

        Uploads come in the order of names. Raises MessageError to refuse one.
        """

    def close(self, mean: Message) -> None:
        """The round ends, with the mean of the other fields; `mean.values["held"]` says of how
        many clients each tensor's is. Downloads from now on are the next round's."""
        self.round += 1

    def model(self) -> PreTrainedModel | None:
        """The server's own model, where a method has one."""
        return None

    def state(self) -> State:
        """Everything that must survive a restart. What is of one client is a part by its name, or
        stands under its name in one of the values, where it is found when the client leaves."""
        return State(values={"round": self.round})

    def restore(self, state: State) -> None:
        """Go back to a state."""
        self.round = state.values["round"]


class Method(BaseModel):
    """A way of learning together: hyper-parameters, what travels, and two makers."""

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
        """Of a part that is given in part, the rest is the method's own default."""
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        for key, info in cls.model_fields.items():
            given, default = found.get(key), info.default
            if isinstance(given, Mapping) and isinstance(default, BaseModel):
                found[key] = default.model_dump() | dict(given)
        return found

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every field that may travel (it takes the place of a pydantic method of old)."""
        return Schema()

    def sends(self, part: Part) -> bool:
        """Whether a trained part travels: by its role, factor, expert, layer or place."""
        return False

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
        """The side that lives where the data live."""
        raise NotImplementedError

    def server(self, context: ServerContext) -> ServerSide:
        """The side that lives on the server."""
        return ServerSide()

    def exchanges(self, rounds: int) -> int:
        """How often a download and an upload are exchanged in so many rounds of a run file.

        The two sides, and all records of a run, count these.
        """
        return rounds

    def counts(self, message: Message) -> dict[str, int]:
        """What people may divide a message's size by, of which it holds so many.

        `{"public sample": 1000}` says that it tells of a thousand.
        """
        return {}

    def check(self, setting: Setting) -> None:
        """Raise CoterieError if the method cannot run in this setting."""

    @classmethod
    def parts(cls) -> dict[str, BaseModel]:
        """The typed parts of its settings, by name, as they are by default."""
        fields = cls.model_fields.items()
        return {name: f.default for name, f in fields if isinstance(f.default, BaseModel)}

    def described(self) -> dict[str, Any]:
        """The method as a run file would give it."""
        return {"name": self.name, **self.model_dump(mode="json")}
