"""FedMKT's server: it learns from the clients' best predictions and teaches them."""

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
from coterie.methods.adapter import AdapterServer, copied, copy
from coterie.methods.contract import ClientId, Holders, ServerContext
from coterie.methods.fedmkt.distillation import Distiller, keys_of
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import read

log = logging.getLogger(__name__)


class FedMKTServer(AdapterServer[FedMKTSettings]):
    """Learns from the clients, round after round; averages their adapters where those travel."""

    def __init__(self, method: FedMKTSettings, context: ServerContext) -> None:
        super().__init__(method, context)
        assert context.own is not None, "FedMKT.check makes sure of it"
        self.own, self.log = context.own, context.log
        self.adapter = method.adapter(self.own.base.model, self.own.seed, self.own.name)
        self.vocabulary = Vocabulary.of(self.own.base.tokenizer)
        self.known: Knowledge | None = None
        """What the server predicts; not before the end of the first round."""
        self.clients: dict[ClientId, tuple[int, VocabularyMap, VocabularyMap]] = {}
        """How many tokens a client has, the map of them into the server's, and that back."""
        self.prepared = dict(self.clients)
        """The same, of clients that are about to join."""

    @cached_property
    def distiller(self) -> Distiller:
        """What learns; made when it is first needed: a model that is only loaded has no samples."""
        distiller = Distiller(self.method, self.own, self.adapter)
        scored = keys_of(self.own.data.validation, self.own.data.test)
        if both := int(torch.isin(distiller.positions.samples, scored).sum()):
            log.warning("the server learns %d of the samples that it is scored on", both)
        return distiller

    def prepare(self, client: ClientId, hello: Message) -> None:
        """Map the client's vocabulary into the server's, and the other way."""
        theirs = read(hello["vocabulary"], hello.values.get("roles"))
        there, back = cached_map(theirs, self.vocabulary), cached_map(self.vocabulary, theirs)
        self.prepared[client] = len(theirs.tokens), there, back

    def join(self, client: ClientId, hello: Message) -> None:
        """Take the maps, which `prepare` has found."""
        super().join(client, hello)
        self.clients[client] = self.prepared.pop(client)

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Await what clients know."""
        super().start_round(exchange, participants)
        self.names = sorted(participants)
        if self.method.teaches and not self.method.averages(exchange):
            self.distiller.begin(self.known or self.distiller.knowledge())

    def download(self, client: ClientId) -> Message:
        """The mean of adapters, or what the server predicts, in the client's tokens."""
        if self.known is None or self.method.averages(self.exchange - 1):
            return super().download(client)
        _, _, back = self.clients[client]
        tokens = back.ids[self.known.tokens.long()]
        told = replace(self.known, tokens=tokens).tensors()
        return Message(self.exchange, {"knowledge": told})

    def reference(self, client: ClientId) -> Groups:
        """Return the adapter that the client last received; predictions have no reference."""
        return super().download(client).groups

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Adapters, where these are exchanged."""
        return super().expects(client) if self.method.averages(self.exchange) else {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep what this client predicts best so far."""
        size, there, _ = self.clients[client]
        if self.method.teaches and not self.method.averages(self.exchange):
            theirs = Knowledge.received(upload["knowledge"], size, self.method.logits)
            self.distiller.offer(self.names.index(client), theirs, there.ids)

    def end_round(self, mean: Message, held: Holders) -> None:
        """Learn, and predict anew; or take the mean of adapters in."""
        if not self.method.averages(self.exchange):
            self._learn()
        super().end_round(mean, held)

    def _learn(self) -> None:
        if self.method.teaches:
            done = self.exchange // self.method.per_round
            loss, teachers = self.distiller.distil(done), self.distiller.teachers
            counts = {name: int((teachers == n).sum()) for n, name in enumerate(self.names)}
            quality = self.distiller.quality()
            self.log(TAUGHT, {"after": self.exchange, "loss": loss, **quality, "by": counts})
        if self.method.teaches or self.known is None:
            self.known = self.distiller.knowledge()

    def model(self) -> PreTrainedModel:
        """The server's own."""
        return self.adapter.attach(self.own.base.model)

    def state(self) -> State:
        """The server's adapter and what it predicts, beside what is averaged."""
        state, groups = super().state(), {"own": copied(self.adapter.tensors())}
        if self.known is not None:
            groups["knowledge"] = self.known.tensors()
        return replace(state, groups={**state.groups, **groups})

    def restore(self, state: State) -> None:
        """Take them back."""
        super().restore(state)
        self.known = Knowledge.of(state["knowledge"]) if state["knowledge"] else None
        copy(state["own"], self.adapter.tensors())
