"""The pretrained base without training, which every comparison includes."""

from typing import ClassVar

from transformers import PreTrainedModel

from coterie.adapters import detach
from coterie.bases import Base
from coterie.methods.contract import ClientContext, ClientSide, Method, Server, ServerContext
from coterie.methods.value import Value


class Pretrained(Method):
    """A method that trains nothing and shares nothing."""

    name: ClassVar[str] = "pretrained"
    summary: ClassVar[str] = "the base alone; nothing is trained or sent"
    learns_preferences: ClassVar[bool] = True

    def client(self, context: ClientContext) -> "PretrainedClient":
        return PretrainedClient(context)

    def server(self, context: ServerContext) -> Server:
        return PretrainedServer(context)


class PretrainedClient(ClientSide):
    """A client whose model is the base without an adapter."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def model(self) -> PreTrainedModel:
        return bare(self.context.base)


class PretrainedServer(Server):
    """A server that trains nothing. Its model, if it has one, is a base without an adapter."""

    def __init__(self, context: ServerContext) -> None:
        self.own = context.own

    def model(self, value: Value) -> PreTrainedModel | None:
        return None if self.own is None else bare(self.own.base)


def bare(base: Base) -> PreTrainedModel:
    """Detach any adapter from a base and return the base's model."""
    detach(base.model)
    return base.model
