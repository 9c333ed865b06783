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
        return ServerSide() if context.own is None else PretrainedServer(context.own.base)


class PretrainedClient(ClientSide):
    """Does nothing in any round."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def model(self) -> PreTrainedModel:
        """The base, bare."""
        return bare(self.context.base)


class PretrainedServer(ServerSide):
    """A server with a model of its own, which stays as it is."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def model(self) -> PreTrainedModel:
        """The base, bare."""
        return bare(self.base)


def bare(base: Base) -> PreTrainedModel:
    """The base as it came, without an adapter."""
    detach(base.model)
    return base.model
