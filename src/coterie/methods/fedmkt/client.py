"""FedMKT's clients: they learn from the server's predictions and upload their own predictions."""

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
from coterie.methods.fedmkt.vocabulary import encode_vocabulary
from coterie.turn import Turn

log = logging.getLogger(__name__)


class FedMKTClient(AdapterClient[FedMKTSettings]):
    """A client that learns from the server, trains on private samples, and uploads predictions."""

    @cached_property
    def distiller(self) -> Distiller:
        """The client's distiller.

        The distiller is created on first use. It needs the public samples, which are missing if a
        client object is created only to load the client's model.
        """
        return Distiller(self.method, self.context, self.adapter)

    @cached_property
    def private(self) -> Tensor:
        """The keys (hashes) of the client's private samples, shaped (samples,), int64.

        If a public sample has one of these keys, the client uploads no predictions on the sample.
        """
        data = self.context.data
        keys = keys_of(data.train, data.validation, data.test)
        if overlap := int(torch.isin(self.distiller.positions.samples, keys).sum()):
            log.warning(
                "%s has %d of the public samples in its own data. It sends no predictions on these "
                "samples, and the gaps reveal to the server which samples they are",
                self.context.name,
                overlap,
            )
        return keys

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the client's tokenizer."""
        return Vocabulary.of(self.context.base.tokenizer)

    def hello(self) -> Message:
        values = {**super().hello().values, "roles": dict(self.vocabulary.roles)}
        return Message(0, {"vocabulary": encode_vocabulary(self.vocabulary)}, values)

    def receive(self, download: Message) -> None:
        # If the last exchange averaged adapters, the download contains their mean; otherwise it
        # contains the server's predictions. The first download has no predictions.
        if self.method.averages(download.round - 1):
            super().receive(download)
        if not download["knowledge"]:
            return
        size, distiller = len(self.vocabulary.tokens), self.distiller
        knowledge = Knowledge.received(download["knowledge"], size, self.method.logits)
        distiller.begin(distiller.knowledge())
        distiller.offer(0, knowledge)
        rounds = download.round // self.method.per_round
        loss, quality = distiller.distil(rounds), distiller.quality()
        self.context.log(TAUGHT, {"after": rounds, "loss": loss, **quality})

    def train(self, turn: Turn) -> None:
        if not self.method.averages(turn.exchange):
            self.training.run(turn.round)

    def upload(self, turn: Turn) -> Message:
        if self.method.averages(turn.exchange):
            return super().upload(turn)
        private = self.private  # logs its warning even if nothing is taught
        if not self.method.teaches:
            return Message(turn.exchange)
        knowledge = self.distiller.knowledge()
        knowledge = knowledge.only(~torch.isin(knowledge.samples, private))
        return Message(turn.exchange, {"knowledge": knowledge.tensors()})
