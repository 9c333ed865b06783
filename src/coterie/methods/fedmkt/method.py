"""FedMKT: mutual knowledge transfer between large and small models (arXiv 2406.02224).

The server has a large base, and each client has a small base with its own tokenizer. All
participants have the same public set of prompts with answers. In a round (the paper's algorithm 1),

1. clients train on their private samples;
2. clients predict the public answers and upload, for each sample, their loss and their most likely
   tokens at every position;
3. the server translates these tokens into its own vocabulary (`alignment`), selects for each sample
   the predictions of the client with the lowest loss, if the client's loss is lower than the
   server's (DualMinCE), and minimises lambda * cross-entropy to the labels + (1 - lambda) *
   cross-entropy to the selected predictions;
4. the server translates its new predictions into each client's vocabulary and sends them; clients
   select from the server's predictions and learn from the selected predictions in the same way.

Losses are compared in nats per byte of the answer, a unit that does not depend on the tokenizer.
Weights are never sent, and neither are predictions on private samples.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.alignment.cache import cached_map
from coterie.alignment.knowledge import Knowledge
from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Message, Schema, Tensors, check_shapes
from coterie.messages.names import TAUGHT
from coterie.methods.adapter import AdapterClient, AdapterServer, Shared
from coterie.methods.contract import SERVER, ClientContext, ClientId, RunFacts, ServerContext
from coterie.methods.fedmkt.distillation import Distiller, keys_of
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import VOCABULARY, decode_vocabulary, encode_vocabulary
from coterie.methods.tensors import copied, copy
from coterie.methods.value import PerClient, from_hello
from coterie.turn import Turn

log = logging.getLogger(__name__)

KNOWLEDGE = MessageField(
    "knowledge",
    "predictions on public samples: for each sample, a hash, the loss and the index of the first "
    "token position of the sample's answer; for each token position in an answer, the number of "
    "the answer's characters before it, the most likely tokens and their log-probabilities",
    {
        "samples": "int64",
        "losses": "float32",
        "starts": "int64",
        "ends": "int32",
        "tokens": "int32",
        "logprobs": "float16",
        "lognorm": "float32",
    },
    when="every round",
)


class FedMKT(FedMKTSettings):
    """Mutual distillation: the clients and the server learn from each other's predictions."""

    name: ClassVar[str] = "fedmkt"
    paper: ClassVar[str] = "arXiv 2406.02224"
    summary: ClassVar[str] = (
        "predictions on public samples exchanged; models and tokenizers may differ"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    learns_preferences: ClassVar[bool] = False
    shared_roles: ClassVar[tuple[str, ...]] = ()

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        mean = super().schema()
        up, down = (
            [replace(field, when=KNOWLEDGE.when) for field in fields]
            for fields in (mean.up, mean.down)
        )
        up += [KNOWLEDGE] if self.teaches else []
        taught = replace(KNOWLEDGE, description="the server's predictions on public samples")
        return Schema((*mean.hello, *VOCABULARY), tuple(up), (*down, taught))

    def exchanges(self, rounds: int) -> int:
        return rounds * self.per_round

    @property
    def mixes_bases(self) -> bool:
        return not self.shared_roles

    def check(self, run: RunFacts) -> None:
        super().check(replace(run, clients=(*run.clients, SERVER)))  # the server has an adapter too
        for satisfied, need in (
            (
                run.instructions,
                "pairs of a prompt and an answer that are rendered without a chat template: set "
                "data.instructions, and set data.instructions.template to a value other than chat",
            ),
            (run.public, "public samples: set data.public, or divide.public: true"),
            (run.server, "a server that has its own model: set server.base"),
        ):
            if not satisfied:
                raise CoterieError(f"The method {self.name!r} needs {need}.")

    def counts(self, message: Message) -> dict[str, int]:
        samples = message["knowledge"].get("samples")
        return {} if samples is None else {"public sample": len(samples)}

    def client(self, context: ClientContext) -> "FedMKTClient":
        return FedMKTClient(self, context)

    def server(self, context: ServerContext) -> "FedMKTServer":
        return FedMKTServer(self, context)


PRESETS = {
    # The paper's homogeneous setting. Adapters are averaged after the clients have learnt from the
    # server, so a round takes two exchanges: first of predictions, then of adapters.
    "fedmkt-fedavg": {
        "summary": "like fedmkt, but LoRA pairs are averaged too; all clients have the same base",
        "shared_roles": ("dense",),
        "per_round": 2,
    },
    # The paper's baseline: the server learns nothing.
    "llm2slm": {
        "summary": "like fedmkt, but the server's model only teaches and is not trained",
        "teaches": False,
    },
}


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
        if self.method.averages(download.exchange - 1):
            super().receive(download)
        if not download["knowledge"]:
            return
        size, distiller = len(self.vocabulary.tokens), self.distiller
        knowledge = Knowledge.received(download["knowledge"], size, self.method.logits)
        distiller.begin(distiller.knowledge())
        distiller.offer(0, knowledge)
        rounds = download.exchange // self.method.per_round
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
