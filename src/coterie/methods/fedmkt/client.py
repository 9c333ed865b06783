"""FedMKT's clients: they learn from the server's predictions and offer their own."""

import logging
from functools import cached_property

import torch
from torch import Tensor

from coterie.alignment.knowledge import Knowledge
from coterie.alignment.vocabulary import Vocabulary
from coterie.messages import Message
from coterie.messages.names import TAUGHT
from coterie.methods.adapter import AdapterClient
from coterie.methods.fedmkt.distillation import Distiller, keys_of
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import spelt

log = logging.getLogger(__name__)


class FedMKTClient(AdapterClient[FedMKTSettings]):
    """Learns from the server, trains on private samples, and offers what it knows."""

    @cached_property
    def distiller(self) -> Distiller:
        """What learns; made when it is first needed: a model that is only loaded has no samples."""
        return Distiller(self.method, self.context, self.adapter)

    @cached_property
    def private(self) -> Tensor:
        """Keys of this client's own samples, of which no prediction leaves it: (any,) int64."""
        data = self.context.data
        keys = keys_of(data.train, data.validation, data.test)
        if both := int(torch.isin(self.distiller.positions.samples, keys).sum()):
            log.warning(
                "%s has %d of the public samples in its own data; it keeps its predictions on "
                "them, so the server can tell which they are",
                self.context.name,
                both,
            )
        return keys

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """This client's tokens."""
        return Vocabulary.of(self.context.base.tokenizer)

    def hello(self) -> Message:
        """This client's vocabulary."""
        values = {**super().hello().values, "roles": dict(self.vocabulary.roles)}
        return Message(0, {"vocabulary": spelt(self.vocabulary)}, values)

    def receive(self, download: Message) -> None:
        """Learn from what the server predicts better; before the first round it tells nothing.

        Where adapters are averaged, their mean comes with the other downloads.
        """
        if self.method.averages(download.round - 1):
            super().receive(download)
        if not download["knowledge"]:
            return
        size, distiller = len(self.vocabulary.tokens), self.distiller
        theirs = Knowledge.received(download["knowledge"], size, self.method.logits)
        distiller.begin(distiller.knowledge())
        distiller.offer(0, theirs)
        done = download.round // self.method.per_round
        loss, quality = distiller.distil(done), distiller.quality()
        self.context.log(TAUGHT, {"after": download.round, "loss": loss, **quality})

    def train(self, exchange: int) -> None:
        """The local steps, before predictions are exchanged."""
        if not self.method.averages(exchange):
            super().train(exchange // self.method.per_round)

    def upload(self, exchange: int) -> Message:
        """What is known now, of samples that are not this client's own; or the adapter."""
        if self.method.averages(exchange):
            return super().upload(exchange)
        private = self.private  # a warning, too, where nothing is taught
        if not self.method.teaches:
            return Message(exchange)
        known = self.distiller.knowledge()
        known = known.only(~torch.isin(known.samples, private))
        return Message(exchange, {"knowledge": known.tensors()})
