"""FedMKT's server: it learns from the clients' best predictions and sends its own predictions."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from coterie.alignment.cache import cached_map
from coterie.alignment.knowledge import Knowledge
from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary
from coterie.messages import Groups, Message, Shapes, State
from coterie.messages.names import TAUGHT
from coterie.methods.adapter import AdapterServer
from coterie.methods.contract import ClientId, ServerContext
from coterie.methods.fedmkt.distillation import Distiller, keys_of
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import decode_vocabulary
from coterie.methods.sides import Holders
from coterie.methods.tensors import copied, copy

log = logging.getLogger(__name__)


class FedMKTServer(AdapterServer[FedMKTSettings]):
    """A server that learns from the clients and, in `fedmkt-fedavg`, averages their adapters."""

    def __init__(self, method: FedMKTSettings, context: ServerContext) -> None:
        super().__init__(method, context)
        assert context.own is not None, "FedMKT.check refuses runs whose server has no model"
        self.own, self.log = context.own, context.log
        self.adapter = method.adapter(self.own.base.model, self.own.seed, self.own.name)
        self.vocabulary = Vocabulary.of(self.own.base.tokenizer)
        self.knowledge: Knowledge | None = None
        """The server's current predictions; None before the end of the first round."""
        self.clients: dict[ClientId, tuple[int, VocabularyMap, VocabularyMap]] = {}
        """Each client's vocabulary size, and two token maps: client to server, server to client."""
        self.prepared = dict(self.clients)
        """Entries that `prepare` has computed and `join` will move to `clients`."""

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

    def join(self, client: ClientId, hello: Message) -> None:
        super().join(client, hello)
        self.clients[client] = self.prepared.pop(client)

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        super().start_round(exchange, participants)
        self.names = sorted(participants)
        if self.method.teaches and not self.method.averages(exchange):
            self.distiller.begin(self.knowledge or self.distiller.knowledge())

    def download(self, client: ClientId) -> Message:
        if self.knowledge is None or self.method.averages(self.exchange - 1):
            return super().download(client)
        _, _, to_client = self.clients[client]
        tokens = to_client.ids[self.knowledge.tokens.long()]
        knowledge = replace(self.knowledge, tokens=tokens).tensors()
        return Message(self.exchange, {"knowledge": knowledge})

    def reference(self, client: ClientId, upload: Message) -> Groups:
        return super().download(client).groups  # predictions have no reference

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        return super().expects(client) if self.method.averages(self.exchange) else {}

    def receive(self, client: ClientId, upload: Message) -> None:
        size, to_server, _ = self.clients[client]
        if self.method.teaches and not self.method.averages(self.exchange):
            knowledge = Knowledge.received(upload["knowledge"], size, self.method.logits)
            self.distiller.offer(self.names.index(client), knowledge, to_server.ids)

    def end_round(self, mean: Message, held: Holders) -> None:
        if not self.method.averages(self.exchange):
            self._learn()
        super().end_round(mean, held)

    def _learn(self) -> None:
        if self.method.teaches:
            round = self.exchange // self.method.per_round
            loss, teachers = self.distiller.distil(round), self.distiller.teachers
            counts = {name: int((teachers == n).sum()) for n, name in enumerate(self.names)}
            quality = self.distiller.quality()
            self.log(TAUGHT, {"after": self.exchange, "loss": loss, **quality, "by": counts})
        if self.method.teaches or self.knowledge is None:
            self.knowledge = self.distiller.knowledge()

    def model(self) -> PreTrainedModel:
        return self.adapter.attach(self.own.base.model)

    def state(self) -> State:
        state, groups = super().state(), {"own": copied(self.adapter.tensors())}
        if self.knowledge is not None:
            groups["knowledge"] = self.knowledge.tensors()
        return replace(state, groups={**state.groups, **groups})

    def restore(self, state: State) -> None:
        super().restore(state)
        self.knowledge = Knowledge.of(state["knowledge"]) if state["knowledge"] else None
        copy(state["own"], self.adapter.tensors())
