"""The interface of a method, which is all that engines, checks and reports use.

A method is data (its settings), a declaration of what may be sent, and two factories: one for the
side that runs where a client's data are, and one for the side that runs on the server
(methods/sides.py). A complete method, which shares nothing and trains nothing::

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return ServerSide()

Pass an instance to `coterie.run(config, method=Silent())`, or put the class in a file for `--plugin
FILE.py` and use its name in run files. docs/develop/add-a-method.md describes the interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from coterie.adapters import Parameter
from coterie.bases import BaseSpec
from coterie.messages import Message, Schema
from coterie.methods.sides import ClientSide, ServerSide
from coterie.privacy.ledger import Budget
from coterie.training.context import ClientContext, ClientId, Log
from coterie.training.spec import TrainingSpec

SERVER = "server"
"""The name of a server with a model of its own, used where clients have their names."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that `Method.check` can use before the run begins."""

    clients: tuple[ClientId, ...]
    public: bool
    """Whether the run has a public text."""
    bases: Mapping[ClientId, BaseSpec] = field(default_factory=dict)
    """Each client's base."""
    server: bool = False
    """Whether the server has a model of its own."""
    instructions: bool = False
    """Whether the data are prompts with answers, without a chat template."""
    optimiser: str = "adamw"
    """The clients' optimiser: the lower-case name of a class in torch.optim."""
    server_optimiser: bool = False
    """Whether a server optimiser steps towards the aggregates instead of adopting them."""


@dataclass(frozen=True)
class ServerContext:
    """The arguments of a server side; `base` may have no weights (meta tensors)."""

    seed: int
    base: nn.Module
    clients: tuple[ClientId, ...]
    log: Log
    training: TrainingSpec
    own: ClientContext | None = None
    """The training context of a server with a model of its own, else None.

    The context's name is `server`, and its training text is the public text.
    """


class Method(BaseModel):
    """An algorithm for learning together: its settings, what may be sent, and two factories."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    summary: ClassVar[str]
    """One line on what the method shares and what stays with the client."""
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"
    """The model that is a client's result: after local training, or after the last download."""

    learns_preferences: ClassVar[bool] = False
    """Whether clients can learn from pairs of answers (`data.preferences`).

    Methods that train only through `LocalTraining` can.
    """

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, values: Any) -> Any:
        """Fill a partially specified section with the method's defaults."""
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        for key, info in cls.model_fields.items():
            section, default = filled.get(key), info.default
            if isinstance(section, Mapping) and isinstance(default, BaseModel):
                filled[key] = default.model_dump() | dict(section)
        return filled

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the schema of the method's messages (replaces a deprecated method of pydantic).

        Returns:
            Every field that may be sent, by direction.
        """
        return Schema()

    def shared(self, parameter: Parameter) -> bool:
        """Return whether a parameter may ever leave its client.

        Shared parameters have the same initial values on all clients, and downloads contain all of
        them.

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
            By default, whether the parameter is shared.
        """
        return self.shared(parameter)

    @property
    def mixes_bases(self) -> bool:
        """Whether clients may have different bases. By default, they may if nothing is uploaded."""
        return not self.schema().up

    @property
    def budget(self) -> Budget | None:
        """The epsilon and delta that a run spends on fields other than trained parameters.

        Infinite if such fields reveal a client's samples without noise; None if there are no such
        fields.
        """
        return None

    def client(self, context: ClientContext) -> ClientSide:
        """Create one client's side.

        Args:
            context: The client's data and the run's settings.

        Returns:
            The side that runs where the client's data are.
        """
        raise NotImplementedError

    def server(self, context: ServerContext) -> ServerSide:
        """Create the server's side.

        Args:
            context: The run's base, clients and settings.

        Returns:
            The side that runs on the server. By default, a side that shares nothing.
        """
        return ServerSide()

    def exchanges(self, rounds: int) -> int:
        """Return the number of exchanges in a run.

        Both sides, and all records of a run, count exchanges.

        Args:
            rounds: The number of rounds in the run file.

        Returns:
            By default, one exchange per round.
        """
        return rounds

    def counts(self, message: Message) -> dict[str, int]:
        """Return the units by which a report may divide the size of a message.

        Args:
            message: An upload or a download.

        Returns:
            The number of units in the message by the unit's name, such as 1,000 by
            "public sample".
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
        """Return the parts of the settings.

        Returns:
            The default value of each part, by name.
        """
        fields = cls.model_fields.items()
        return {name: f.default for name, f in fields if isinstance(f.default, BaseModel)}

    def described(self) -> dict[str, Any]:
        """Return the method in the form of a run file.

        Returns:
            The method's name and its settings, as JSON values.
        """
        return {"name": self.name, **self.model_dump(mode="json")}
