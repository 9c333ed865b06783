"""The base as it is: the first line of every table."""

from typing import ClassVar

from transformers import PreTrainedModel

from coterie.adapters import detach
from coterie.exchange import Message
from coterie.methods.base import ClientContext, ClientSide, Method


class Pretrained(Method):
    """Trains nothing, shares nothing."""

    name: ClassVar[str] = "pretrained"
    summary: ClassVar[str] = "the base alone; nothing is trained, nothing travels"

    def client(self, context: ClientContext) -> "PretrainedClient":
        """The bare base."""
        return PretrainedClient(context)


class PretrainedClient(ClientSide):
    """Answers every round with an empty message."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def step(self, download: Message) -> Message:
        """Nothing to do."""
        return Message(download.round)

    def model(self) -> PreTrainedModel:
        """The base, bare."""
        detach(self.context.base.model)
        return self.context.base.model
