"""FedMKT's server: it learns from the clients' best predictions and sends its own predictions."""

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from coterie.alignment.cache import cached_map
from coterie.alignment.knowledge import Knowledge
from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary
from coterie.exchanges.exchange import Exchange
from coterie.messages import Groups, Message, Tensors, check_shapes
from coterie.messages.names import TAUGHT
from coterie.methods.adapter import AdapterServer, Shared
from coterie.methods.contract import ClientId, ServerContext
from coterie.methods.fedmkt.distillation import Distiller, keys_of
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import decode_vocabulary
from coterie.methods.tensors import copied, copy
from coterie.methods.value import PerClient, from_hello

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Teaching(Shared):
    """The server's model and predictions."""

    own: Tensors = field(default_factory=dict)
    """The adapter of the server's model."""
    knowledge: Tensors = field(default_factory=dict)
    """The server's current predictions; empty before the end of the first round."""
    clients: PerClient[tuple[int, VocabularyMap, VocabularyMap]] = from_hello()
    """Each client's vocabulary size, and two token maps: client to server, server to client."""


class FedMKTServer(AdapterServer[FedMKTSettings, Teaching]):
    """A server that learns from the clients and, in `fedmkt-fedavg`, averages their adapters."""

    def __init__(self, method: FedMKTSettings, context: ServerContext) -> None:
        super().__init__(method, context)
        assert context.own is not None, "FedMKT.check refuses runs whose server has no model"
        self.own, self.log = context.own, context.log
        self.adapter = method.adapter(self.own.base.model, self.own.seed, self.own.name)
        self.vocabulary = Vocabulary.of(self.own.base.tokenizer)
        self.prepared: dict[ClientId, tuple[int, VocabularyMap, VocabularyMap]] = {}
        """Entries of `Teaching.clients` that `prepare` has computed for `join`."""

    def initial(self) -> Teaching:
        return Teaching(self.start, own=copied(self.adapter.tensors()))

    @cached_property
    def distiller(self) -> Distiller:
        """The server's distiller.

        The distiller is created on first use. It needs the public samples, which are missing if a
        server object is created only to load the server's model.
        """
        distiller = Distiller(self.method, self.own, self.adapter)
        scored = keys_of(self.own.data.validation, self.own.data.test)
        if overlap := int(torch.isin(distiller.positions.samples, scored).sum()):
            log.warning("the server is trained on %d of the samples that it is scored on", overlap)
        return distiller

    def prepare(self, client: ClientId, hello: Message) -> None:
        vocabulary = decode_vocabulary(hello["vocabulary"], hello.values.get("roles"))
        to_server = cached_map(vocabulary, self.vocabulary)
        to_client = cached_map(self.vocabulary, vocabulary)
        self.prepared[client] = len(vocabulary.tokens), to_server, to_client

    def join(self, value: Teaching, client: ClientId, hello: Message) -> Teaching:
        value = super().join(value, client, hello)
        return replace(value, clients=value.clients | {client: self.prepared.pop(client)})

    def download(self, value: Teaching, client: ClientId, exchange: Exchange) -> Message:
        number = exchange.turn.exchange
        if not value.knowledge or self.method.averages(number - 1):
            return super().download(value, client, exchange)
        _, _, to_client = value.clients[client]
        tokens = to_client.ids[value.knowledge["tokens"].long()]
        return Message(number, {"knowledge": {**value.knowledge, "tokens": tokens}})

    def reference(
        self, value: Teaching, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        # Predictions have no reference, so the engine limits their norm.
        return super().download(value, client, exchange).only(["adapter"]).groups

    def check(self, value: Teaching, client: ClientId, upload: Message, exchange: Exchange) -> None:
        averages = self.method.averages(exchange.turn.exchange)
        check_shapes(upload["adapter"], value.held[client] if averages else {})
        if self.method.teaches and not averages:
            size, _, _ = value.clients[client]
            Knowledge.received(upload["knowledge"], size, self.method.logits)

    def aggregate(self, value: Teaching, exchange: Exchange) -> Teaching:
        if self.method.averages(exchange.turn.exchange):
            return super().aggregate(value, exchange)
        copy(value.own, self.adapter.tensors())
        if self.method.teaches:
            self._learn(value, exchange)
        elif value.knowledge:
            return value
        knowledge = self.distiller.knowledge().tensors()
        return replace(value, own=copied(self.adapter.tensors()), knowledge=knowledge)

    def _learn(self, value: Teaching, exchange: Exchange) -> None:
        """Train the server's model on the clients' best predictions."""
        own = Knowledge.of(value.knowledge) if value.knowledge else self.distiller.knowledge()
        self.distiller.begin(own)
        for client, tensors in exchange.each("knowledge").items():
            number, (_, to_server, _) = exchange.clients.index(client), value.clients[client]
            self.distiller.offer(number, Knowledge.of(tensors), to_server.ids)
        round = exchange.turn.round
        loss, teachers = self.distiller.distil(round), self.distiller.teachers
        counts = {name: int((teachers == n).sum()) for n, name in enumerate(exchange.clients)}
        quality = self.distiller.quality()
        self.log(TAUGHT, {"after": round, "loss": loss, **quality, "by": counts})

    def model(self, value: Teaching) -> PreTrainedModel:
        copy(value.own, self.adapter.tensors())
        return self.adapter.attach(self.own.base.model)
