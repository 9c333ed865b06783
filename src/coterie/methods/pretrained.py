"""The base as it is: the first line of every table."""

from typing import ClassVar

from transformers import PreTrainedModel

from coterie.adapters import detach
from coterie.bases import Base
from coterie.methods.contract import ClientContext, ClientSide, Method, ServerContext, ServerSide


class Pretrained(Method):
    """Trains nothing, shares nothing."""

    name: ClassVar[str] = "pretrained"
    summary: ClassVar[str] = "the base alone; nothing is trained or sent"
    learns_preferences: ClassVar[bool] = True

    def client(self, context: ClientContext) -> "PretrainedClient":
        """The bare base."""
        return PretrainedClient(context)

    def server(self, context: ServerContext) -> ServerSide:
        """The server's bare base, where it has one."""
        return PretrainedServer(context)


class PretrainedClient(ClientSide):
    """Does nothing in any round."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def model(self) -> PreTrainedModel:
        """The base, bare."""
        return bare(self.context.base)


class PretrainedServer(ServerSide):
    """Keeps its own model as it is, where it has one."""

    def __init__(self, context: ServerContext) -> None:
        self.own = context.own

    def model(self) -> PreTrainedModel | None:
        """The base, bare."""
        return None if self.own is None else bare(self.own.base)


def bare(base: Base) -> PreTrainedModel:
    """The base as it came, without an adapter."""
    detach(base.model)
    return base.model
