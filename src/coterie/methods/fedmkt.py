"""FedMKT: a large model and small ones with other tokenizers teach each other (arXiv 2406.02224).

Every client has a base of its own, and so has the server; all of them see a public set of prompts
with answers. In a round (the paper's algorithm 1)

1. clients train on their private samples;
2. they predict the public answers and upload how well they did, and their likeliest tokens;
3. the server moves these into its tokens (`alignment`), keeps for each sample those of the client
   that did best, where it did better than the server itself (DualMinCE), and learns from them:
   lambda * cross-entropy to the labels + (1 - lambda) * that to what it kept;
4. it sends what it predicts now, in each client's tokens, and clients choose and learn likewise.

How well a side did is compared in nats per byte of the answer, whatever its tokens. No weights
travel, and no private sample is predicted for others.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Role
from coterie.alignment.cache import cached_map
from coterie.alignment.knowledge import Knowledge, sample_keys
from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary
from coterie.data.examples import Examples
from coterie.data.tokens import Split
from coterie.errors import CoterieError
from coterie.messages import Field as Travels
from coterie.messages import Groups, Json, Message, MessageError, Schema, Shapes, State
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, copied, copy
from coterie.methods.contract import SERVER, ClientContext, ClientId, ServerContext, Setting
from coterie.methods.distillation import Distiller
from coterie.methods.settings import Attention, Lora

log = logging.getLogger(__name__)
MOST_TOKENS, LONGEST_TOKEN, MOST_BYTES = 2**19, 2**10, 2**23
"""Of a client's vocabulary, of a token, and of all: twice what the largest of today's have."""
KNOWLEDGE = Travels(
    "knowledge",
    "predictions on public samples: sample hashes, losses, start of each sample, end of the "
    "text read at each position, most likely tokens and their log-probabilities",
    {
        "samples": "int64",
        "losses": "float32",
        "starts": "int64",
        "ends": "int32",
        "tokens": "int32",
        "logprobs": "float16",
        "lognorm": "float32",
    },
)
VOCABULARY = (
    Travels(
        "vocabulary",
        "bytes of all tokens, concatenated, and the length of each",
        {"spelling": "uint8", "lengths": "int32"},
    ),
    Travels("roles", "tokens that begin, end or pad a text", "json"),
)


class FedMKT(AdapterMethod):
    """Clients and the server learn from one another's predictions; defaults are the paper's, but
    for `own`."""

    name: ClassVar[str] = "fedmkt"
    paper: ClassVar[str] = "arXiv 2406.02224"
    summary: ClassVar[str] = (
        "predictions on public samples exchanged; models and tokenizers may differ"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    learns_preferences: ClassVar[bool] = False
    shared_roles: ClassVar[tuple[Role, ...]] = ()
    teaches: ClassVar[bool] = True
    """Whether clients teach the server."""
    per_round: ClassVar[int] = 1
    """Exchanges that make a round."""

    attention: Attention = Attention()
    lora: Lora = Lora(scale="rank")
    task_weight: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="weight of the label loss (lambda); the rest is distillation",
    )
    logits: int = Field(default=128, ge=1, description="most likely tokens sent per position (k)")
    temperature: float = Field(
        default=1.0, gt=0, description="temperature of the teachers' distributions"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the public set per round")
    own: Literal["none", "labels", "self", "mean"] = Field(
        default="labels",
        description="target of distillation where no teacher is better: none (the paper's form: "
        "its mean is over the other samples of a batch), labels, or the model's own predictions "
        "(self); mean: as self, and elsewhere a mean of own and teacher's "
        "predictions weighted by exp(-loss)",
    )
    align: Literal["offsets", "warping"] = Field(
        default="offsets",
        description="match positions that have read the same characters, or by the paper's "
        "dynamic programme over edit distances",
    )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Predictions both ways; the client's vocabulary once."""
        mean = super().schema()
        up = (*mean.up, KNOWLEDGE) if self.teaches else mean.up
        return Schema((*mean.hello, *VOCABULARY), up, (*mean.down, KNOWLEDGE))

    def averages(self, exchange: int) -> bool:
        """Whether an exchange (0 is the first) ends with the mean of adapters; else predictions
        are exchanged. The first download, as if after exchange -1, has adapters, too."""
        return exchange % self.per_round == 1

    def exchanges(self, rounds: int) -> int:
        """Two a round where adapters are averaged, too."""
        return rounds * self.per_round

    @property
    def mixes_bases(self) -> bool:
        """Clients may have any base, unless their adapters are averaged, too."""
        return not self.shared_roles

    def check(self, setting: Setting) -> None:
        """There are public samples and a server's model, which has an adapter, too."""
        super().check(replace(setting, clients=(*setting.clients, SERVER)))
        for there, remedy in (
            (
                setting.instructions,
                "prompts with answers that no chat template renders: set "
                "data.instructions, with another template than chat",
            ),
            (setting.public, "public samples: set data.public, or divide.public: true"),
            (setting.server, "a model of the server's own: set server.base"),
        ):
            if not there:
                raise CoterieError(f"The method {self.name!r} needs {remedy}.")

    def counts(self, message: Message) -> dict[str, int]:
        """The public samples that a message tells of."""
        samples = message["knowledge"].get("samples")
        return {} if samples is None else {"public sample": len(samples)}

    def client(self, context: ClientContext) -> "FedMKTClient":
        """Trains, then learns from the server."""
        return FedMKTClient(self, context)

    def server(self, context: ServerContext) -> "FedMKTServer":
        """Learns from the clients."""
        return FedMKTServer(self, context)


class FedMKTFedAvg(FedMKT):
    """The paper's homogeneous setting: clients with one base average their adapters as well.

    Each has learnt from the server by then, so a round takes two exchanges: of predictions, and
    then of adapters.
    """

    name: ClassVar[str] = "fedmkt-fedavg"
    summary: ClassVar[str] = "as fedmkt, with averaged LoRA pairs; all clients have the same base"
    shared_roles: ClassVar[tuple[Role, ...]] = ("dense",)
    per_round: ClassVar[int] = 2


class LLM2SLM(FedMKT):
    """The paper's baseline: the server teaches, and learns nothing."""

    name: ClassVar[str] = "llm2slm"
    summary: ClassVar[str] = (
        "as fedmkt, in one direction: the server's model teaches and is not trained"
    )
    teaches: ClassVar[bool] = False


class FedMKTClient(AdapterClient):
    """Learns from the server, trains on private samples, and offers what it knows."""

    method: FedMKT

    @cached_property
    def distiller(self) -> Distiller:
        """What learns; made when it is first needed: a model that is only loaded has no samples."""
        return Distiller(self.method, self.context, self.adapter)

    @cached_property
    def private(self) -> Tensor:
        """Keys of this client's own samples, of which no prediction leaves it: (any,) int64."""
        data = self.context.data
        keys = _keys(data.train, data.validation, data.test)
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
        return Message(0, {"vocabulary": _spelt(self.vocabulary)}, values)

    def take(self, download: Message) -> None:
        """Learn from what the server predicts better; before the first round it tells nothing.

        Where adapters are averaged, their mean comes with the other downloads.
        """
        if self.method.averages(download.round - 1):
            super().take(download)
        if not download["knowledge"]:
            return
        size, distiller = len(self.vocabulary.tokens), self.distiller
        theirs = Knowledge.received(download["knowledge"], size, self.method.logits)
        distiller.begin(distiller.knowledge())
        distiller.offer(0, theirs)
        done = download.round // self.method.per_round
        loss, quality = distiller.distil(done), distiller.quality()
        self.context.log("taught", {"after": download.round, "loss": loss, **quality})

    def train(self, round: int) -> None:
        """The local steps, before predictions are exchanged."""
        if not self.method.averages(round):
            super().train(round // self.method.per_round)

    def upload(self, round: int) -> Message:
        """What is known now, of samples that are not this client's own; or the adapter."""
        if self.method.averages(round):
            return super().upload(round)
        private = self.private  # a warning, too, where nothing is taught
        if not self.method.teaches:
            return Message(round)
        known = self.distiller.knowledge()
        known = known.only(~torch.isin(known.samples, private))
        return Message(round, {"knowledge": known.tensors()})


class FedMKTServer(AdapterServer):
    """Learns from the clients, round after round; averages their adapters where those travel."""

    method: FedMKT

    def __init__(self, method: FedMKT, context: ServerContext) -> None:
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
        scored = _keys(self.own.data.validation, self.own.data.test)
        if both := int(torch.isin(distiller.positions.samples, scored).sum()):
            log.warning("the server learns %d of the samples that it is scored on", both)
        return distiller

    def prepare(self, client: ClientId, hello: Message) -> None:
        """Map the client's vocabulary into the server's, and the other way."""
        theirs = _read(hello["vocabulary"], hello.values.get("roles"))
        there, back = cached_map(theirs, self.vocabulary), cached_map(self.vocabulary, theirs)
        self.prepared[client] = len(theirs.tokens), there, back

    def join(self, client: ClientId, hello: Message) -> None:
        """Take the maps, which `prepare` has found."""
        super().join(client, hello)
        self.clients[client] = self.prepared.pop(client)

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Await what clients know."""
        super().open(round, participants)
        self.names = sorted(participants)
        if self.method.teaches and not self.method.averages(round):
            self.distiller.begin(self.known or self.distiller.knowledge())

    def download(self, client: ClientId) -> Message:
        """The mean of adapters, or what the server predicts, in the client's tokens."""
        if self.known is None or self.method.averages(self.round - 1):
            return super().download(client)
        _, _, back = self.clients[client]
        tokens = back.ids[self.known.tokens.long()]
        told = replace(self.known, tokens=tokens).tensors()
        return Message(self.round, {"knowledge": told})

    def reference(self, client: ClientId) -> Groups:
        """Return the adapter that the client last received; predictions have no reference."""
        return super().download(client).groups

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Adapters, where these are exchanged."""
        return super().expects(client) if self.method.averages(self.round) else {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep what this client predicts best so far."""
        size, there, _ = self.clients[client]
        if self.method.teaches and not self.method.averages(self.round):
            theirs = Knowledge.received(upload["knowledge"], size, self.method.logits)
            self.distiller.offer(self.names.index(client), theirs, there.ids)

    def close(self, mean: Message) -> None:
        """Learn, and predict anew; or take the mean of adapters in."""
        if not self.method.averages(self.round):
            self._learn()
        super().close(mean)

    def _learn(self) -> None:
        if self.method.teaches:
            done = self.round // self.method.per_round
            loss, teachers = self.distiller.distil(done), self.distiller.teachers
            counts = {name: int((teachers == n).sum()) for n, name in enumerate(self.names)}
            quality = self.distiller.quality()
            self.log("taught", {"after": self.round, "loss": loss, **quality, "by": counts})
        if self.method.teaches or self.known is None:
            self.known = self.distiller.knowledge()

    def model(self) -> PreTrainedModel:
        """The server's own."""
        return self.adapter.attach(self.own.base.model)

    def state(self) -> State:
        """The server's adapter and what it predicts, beside what is averaged."""
        state, groups = super().state(), {"own": copied(self.adapter.parameters())}
        if self.known is not None:
            groups["knowledge"] = self.known.tensors()
        return replace(state, groups={**state.groups, **groups})

    def restore(self, state: State) -> None:
        """Take them back."""
        super().restore(state)
        self.known = Knowledge.of(state["knowledge"]) if state["knowledge"] else None
        copy(state["own"], self.adapter.parameters())


def _keys(*splits: Split) -> Tensor:
    """The keys of all samples of some splits: (any,) int64."""
    found = [sample_keys(split.instructions) for split in splits if isinstance(split, Examples)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *found])


def _spelt(vocabulary: Vocabulary) -> dict[str, Tensor]:
    """A vocabulary for a message; -1 is the length of a token without bytes."""
    spelling = b"".join(token or b"" for token in vocabulary.tokens)
    lengths = [-1 if token is None else len(token) for token in vocabulary.tokens]
    return {
        "spelling": torch.frombuffer(bytearray(spelling), dtype=torch.uint8),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def _read(vocabulary: Mapping[str, Tensor], roles: Json) -> Vocabulary:
    """The vocabulary in a message; raises MessageError if there is none."""
    empty = torch.zeros(0)
    lengths, spelling = (vocabulary.get(name, empty) for name in ("lengths", "spelling"))
    sound = lengths.dim() == spelling.dim() == 1 and len(lengths) > 0 and isinstance(roles, dict)
    sound = sound and len(lengths) <= MOST_TOKENS and int(lengths.max()) <= LONGEST_TOKEN
    if not sound or int(lengths.clamp(min=0).long().sum()) != len(spelling):
        raise MessageError("The client sent no vocabulary.")
    if len(spelling) > MOST_BYTES:
        raise MessageError(f"The client's vocabulary has more than {MOST_BYTES:,} bytes.")
    if not all(isinstance(i, int) and 0 <= i < len(lengths) for i in roles.values()):
        raise MessageError("The client's vocabulary assigns roles to unknown tokens.")
    spelt, sizes = spelling.numpy().tobytes(), lengths.tolist()
    after = accumulate(max(0, size) for size in sizes)
    tokens = (None if n < 0 else spelt[end - n : end] for n, end in zip(sizes, after, strict=True))
    return Vocabulary(tuple(tokens), roles)
