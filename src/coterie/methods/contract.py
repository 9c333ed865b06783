"""The interface of methods. Engines, checks and reports use nothing else of a method.

A method consists of its settings, a declaration of the fields that its messages may contain, and
two factories: `client` creates an object that runs where a client's data are, and `server` creates
an object that runs on the server. The base classes of the two objects are in methods/sides.py. The
following class is a complete method, which shares nothing and trains nothing::

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return Server()

To use a method in Python, pass an instance to `coterie.run(config, method=Silent())`. To use it in
run files, put the class in a file, pass the file with `--plugin FILE.py`, and write the class's
`name` in the run file. docs/develop/add-a-method.md describes the interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, model_validator
from torch import nn

from coterie.adapters import Parameter
from coterie.bases import BaseSpec
from coterie.messages import Message, Schema
from coterie.methods.sides import ClientSide, Server
from coterie.privacy.ledger import Budget
from coterie.registry import Section
from coterie.training.context import ClientContext, ClientId, Log
from coterie.training.spec import TrainingSpec

SERVER = "server"
"""The name of a server that has its own model, used in the same places as a client's name."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that `Method.check` can use before the run begins."""

    clients: tuple[ClientId, ...]
    public: bool
    """Whether the run has public data."""
    bases: Mapping[ClientId, BaseSpec] = field(default_factory=dict)
    """A mapping from each client's name to the client's base."""
    server: bool = False
    """Whether the server has a model of its own."""
    instructions: bool = False
    """Whether the data are pairs of a prompt and an answer, rendered without a chat template."""
    optimiser: str = "adamw"
    """The clients' optimiser: the lower-case name of a class in torch.optim."""
    server_optimiser: bool = False
    """Whether the server moves towards the aggregates by steps of an optimiser.

    If False, the aggregates replace the server's parameters.
    """
    token_weights: bool = False
    """Whether the run weights clients by their training tokens (`aggregation.weights`)."""
    least_others: int = 1
    """The smallest number of other clients whose uploads a client receives in a mean
    (`aggregation.least_others`)."""


@dataclass(frozen=True)
class ServerContext:
    """The data and settings that the server-side object of a method receives.

    The attribute `base` is the run's base without weights, on the meta device. An adapter that is
    created for `base` has its parameters on the CPU.
    """

    seed: int
    base: nn.Module
    clients: tuple[ClientId, ...]
    log: Log
    training: TrainingSpec
    rounds: int = 1
    """The number of rounds of the run."""
    least_others: int = 1
    """The smallest number of other clients whose uploads a client receives in a mean
    (`aggregation.least_others`)."""
    own: ClientContext | None = None
    """The server's training context if the server has its own model, else None.

    The context's name is `server`, and its training text is the public text.
    """


class Method(Section):
    """A federated learning method: its settings, the schema of its messages, and two factories.

    The factories are `client` and `server`, which create the objects that run on the clients and on
    the server.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    summary: ClassVar[str]
    """One line that says what the method shares and what stays on the client."""
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"
    """The model that counts as a client's result.

    "trained" is the model after local training, "aggregated" the model after the last download.
    """

    learns_preferences: ClassVar[bool] = False
    """Whether clients can learn from pairs of answers (`data.preferences`).

    A method that trains only through `LocalTraining` can set this to True.
    """

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, values: Any) -> Any:
        """Add the method's defaults for the keys that are missing in a section of the settings."""
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        for key, info in cls.model_fields.items():
            section, default = filled.get(key), info.default
            if isinstance(section, Mapping) and isinstance(default, BaseModel):
                filled[key] = default.model_dump() | dict(section)
        return filled

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the schema of the method's messages.

        The function overrides pydantic's deprecated `schema`, which returned a JSON schema.

        Returns:
            The fields that a hello, an upload and a download may contain.
        """
        return Schema()

    def shared(self, parameter: Parameter) -> bool:
        """Return whether a parameter may ever leave its client.

        Shared parameters have the same initial values on all clients, and downloads contain all
        shared parameters.

        Args:
            parameter: A parameter of a client's adapter.

        Returns:
            True for a shared parameter, False for a private one.
        """
        return False

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        """Return whether the upload of an exchange contains a parameter.

        Args:
            parameter: A parameter of a client's adapter.
            exchange: The number of the exchange; the first is 0.

        Returns:
            True if the upload contains the parameter. By default, True for shared parameters.
        """
        return self.shared(parameter)

    @property
    def mixes_bases(self) -> bool:
        """Whether clients may have different bases.

        By default, this is True if clients upload nothing, and False otherwise.
        """
        return not self.schema().up

    @property
    def budget(self) -> Budget | None:
        """The privacy budget (epsilon, delta) of uploaded fields other than trained parameters.

        The budget covers all uploaded fields that are computed from a client's samples, except for
        trained parameters. Epsilon is infinite if a covered field is sent without noise. The
        budget is None if no field is covered.
        """
        return None

    def client(self, context: ClientContext) -> ClientSide:
        """Create the client-side object for one client.

        Args:
            context: The client's data and the run's settings.

        Returns:
            The object that runs where the client's data are.
        """
        raise NotImplementedError

    def server(self, context: ServerContext) -> Server[Any]:
        """Create the server-side object.

        Args:
            context: The run's base, clients and settings.

        Returns:
            The object that runs on the server. By default, the object sends only empty downloads
            and ignores uploads.
        """
        return Server()

    def exchanges(self, rounds: int) -> int:
        """Return the number of exchanges in the first rounds of a run.

        In one exchange, every participating client receives a download and sends an upload.

        Args:
            rounds: A number of rounds, from 1 to the number in the run file.

        Returns:
            The number of exchanges. By default, there is one exchange per round.
        """
        return rounds

    def counts(self, message: Message) -> dict[str, int]:
        """Count the items in a message, such as public samples.

        A report divides the message's size by each count, to state the average size per item.

        Args:
            message: An upload or a download.

        Returns:
            A mapping from the name of a kind of item to the number of items of this kind, for
            example `{"public sample": 1000}`. By default, the mapping is empty, and reports state
            no size per item.
        """
        return {}

    def check(self, run: RunFacts) -> None:
        """Refuse a run that the method cannot carry out.

        Args:
            run: Facts about the run.

        Raises:
            CoterieError: The method cannot carry out the run.
        """

    @classmethod
    def parts(cls) -> dict[str, BaseModel]:
        """Return the defaults of the parts of the settings.

        A part is a section with several keys.

        Returns:
            A mapping from the name of each part to the part's default value.
        """
        fields = cls.model_fields.items()
        return {name: f.default for name, f in fields if isinstance(f.default, BaseModel)}

    def described(self) -> dict[str, Any]:
        """Return the value of the key `method` in a run file that uses this method.

        Returns:
            The method's name and its settings, as JSON values.
        """
        return {"name": self.name, **self.model_dump(mode="json")}
