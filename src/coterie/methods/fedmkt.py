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
from coterie.data import Examples, Split
from coterie.errors import CoterieError
from coterie.exchange import Field as Travels
from coterie.exchange import Json, Message, MessageError, Schema, State
from coterie.methods.adapter import AdapterClient, AdapterServer, copy
from coterie.methods.contract import SERVER, ClientContext, ClientId, ServerContext, Setting
from coterie.methods.lora import LoraMethod, PerClient
from coterie.methods.teaching import Pupil

log = logging.getLogger(__name__)
MOST_TOKENS, LONGEST_TOKEN = 2**20, 2**10
"""Of a client's vocabulary, and bytes of a token: more than any has, and no strain on a map."""
KNOWLEDGE = (
    Travels("knowledge.samples", "hashes of public samples", "int64"),
    Travels("knowledge.losses", "how badly each was predicted", "float32"),
    Travels("knowledge.starts", "where each sample's positions begin", "int64"),
    Travels("knowledge.ends", "characters of the answer before each position", "int32"),
    Travels("knowledge.tokens", "likeliest tokens at each position", "int32"),
    Travels("knowledge.logprobs", "their log-probabilities", "float16"),
    Travels("knowledge.lognorm", "the log of their sum", "float32"),
)
VOCABULARY = (
    Travels("vocabulary.spelling", "the bytes of all tokens, one after another", "uint8"),
    Travels("vocabulary.lengths", "how many bytes each has", "int32"),
    Travels("roles", "which token begins, ends or pads a text", "json"),
)


class FedMKT(LoraMethod):
    """Clients and the server learn from one another's predictions; defaults are the paper's."""

    name: ClassVar[str] = "fedmkt"
    paper: ClassVar[str] = "arXiv 2406.02224"
    summary: ClassVar[str] = (
        "predictions of public samples travel; models and tokenizers may differ"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shares: ClassVar[tuple[Role, ...]] = ()
    teaches: ClassVar[bool] = True
    """Whether clients teach the server."""

    generalists: PerClient = Field(default=0, description="experts on MLPs; the paper has none")
    scale: Literal["sqrt", "rank"] = "rank"
    task_weight: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="lambda: the labels' part; the rest is learnt of others",
    )
    top: int = Field(default=128, ge=1, description="likeliest tokens that travel, per position")
    temperature: float = Field(default=1.0, gt=0, description="of what is learnt of others")
    epochs: int = Field(default=1, ge=1, description="passes over the public samples in a round")
    own: Literal["labels", "self", "mean"] = Field(
        default="labels",
        description="where nobody does better, learn labels; `self`: one's own predictions; `mean`:"
        " those, and elsewhere their mean with the teacher's, weighed by exp(-loss)",
    )
    align: Literal["offsets", "warping"] = Field(
        default="offsets",
        description="a position's counterpart has read the same characters; or by the paper's"
        " dynamic programme over edit distances",
    )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Predictions both ways; the client's vocabulary once."""
        mean = super().schema()
        up = (*mean.up, *KNOWLEDGE) if self.teaches else mean.up
        return Schema((*mean.hello, *VOCABULARY), up, (*mean.down, *KNOWLEDGE))

    @property
    def mixes_bases(self) -> bool:
        """Clients may have any base, unless their adapters are averaged, too."""
        return not self.shares

    def check(self, setting: Setting) -> None:
        """There are public samples and a server's model, which has an adapter, too."""
        super().check(replace(setting, clients=(*setting.clients, SERVER)))
        for there, remedy in (
            (setting.instructions, "prompts with answers: set data.instructions"),
            (setting.public, "public samples: set data.public, or divide.public: true"),
            (setting.server, "a model of the server's own: set server.base"),
        ):
            if not there:
                raise CoterieError(f"The method {self.name!r} needs {remedy}.")

    def counts(self, message: Message) -> dict[str, int]:
        """The public samples that a message tells of."""
        samples = message.tensors.get("knowledge.samples")
        return {} if samples is None else {"public sample": len(samples)}

    def client(self, context: ClientContext) -> "FedMKTClient":
        """Trains, then learns from the server."""
        return FedMKTClient(self, context)

    def server(self, context: ServerContext) -> "FedMKTServer":
        """Learns from the clients."""
        return FedMKTServer(self, context)


class FedMKTFedAvg(FedMKT):
    """The paper's homogeneous setting: clients with one base average their adapters as well."""

    name: ClassVar[str] = "fedmkt-fedavg"
    summary: ClassVar[str] = "as fedmkt, and clients' LoRA pairs are averaged; one base for clients"
    shares: ClassVar[tuple[Role, ...]] = ("dense",)


class LLM2SLM(FedMKT):
    """The paper's baseline: the server teaches, and learns nothing."""

    name: ClassVar[str] = "llm2slm"
    summary: ClassVar[str] = "as fedmkt, one way: the server's model teaches and stays as it is"
    teaches: ClassVar[bool] = False


class FedMKTClient(AdapterClient):
    """Learns from the server, trains on private samples, and offers what it knows."""

    method: FedMKT

    @cached_property
    def pupil(self) -> Pupil:
        """What learns; made when it is first needed: a model that is only loaded has no samples."""
        return Pupil(self.method, self.context, self.adapter)

    @cached_property
    def private(self) -> Tensor:
        """Keys of this client's own samples, of which no prediction leaves it: (any,) int64."""
        data = self.context.data
        keys = _keys(data.train, data.validation, data.test)
        if both := int(torch.isin(self.pupil.positions.samples, keys).sum()):
            log.warning(
                "%s holds %d of the public samples itself; what it predicts of these stays with "
                "it, and by that the server can tell which they are",
                self.context.name,
                both,
            )
        return keys

    @cached_property
    def words(self) -> int:
        """How many tokens this client's vocabulary has."""
        return len(Vocabulary.of(self.context.base.tokenizer).tokens)

    def hello(self) -> Message:
        """This client's vocabulary."""
        message = super().hello()
        vocabulary = Vocabulary.of(self.context.base.tokenizer)
        return Message(0, _spelt(vocabulary), {**message.values, "roles": dict(vocabulary.roles)})

    def step(self, download: Message) -> Message:
        """Learn from the server, train, tell what is known now."""
        upload, private = super().step(download), self.private
        if not self.method.teaches:
            return upload
        known = self.pupil.knowledge()
        known = known.only(~torch.isin(known.samples, private))
        return Message(upload.round, {**upload.tensors, **known.tensors()})

    def finish(self, download: Message) -> None:
        """Learn from what the server predicts better; before the first round it tells nothing."""
        theirs, mean = _parted(download)
        super().finish(mean)
        if not theirs:
            return
        knowledge = Knowledge.received(theirs, self.words, self.method.top)
        self.pupil.begin(self.pupil.knowledge())
        self.pupil.offer(0, knowledge)
        loss = self.pupil.study(download.round)
        quality = self.pupil.quality()
        self.context.log("taught", {"after": download.round, "loss": loss, **quality})


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

    @cached_property
    def pupil(self) -> Pupil:
        """What learns; made when it is first needed: a model that is only loaded has no samples."""
        pupil = Pupil(self.method, self.own, self.adapter)
        scored = _keys(self.own.data.validation, self.own.data.test)
        if both := int(torch.isin(pupil.positions.samples, scored).sum()):
            log.warning("the server learns %d of the samples that it is scored on", both)
        return pupil

    def join(self, client: ClientId, hello: Message) -> None:
        """Map the client's vocabulary into the server's, and the other way."""
        spelt = {name: t for name, t in hello.tensors.items() if name.startswith("vocabulary.")}
        rest = {name: t for name, t in hello.tensors.items() if name not in spelt}
        super().join(client, Message(hello.round, rest, hello.values))
        theirs = _read(spelt, hello.values.get("roles"))
        there, back = cached_map(theirs, self.vocabulary), cached_map(self.vocabulary, theirs)
        self.clients[client] = len(theirs.tokens), there, back

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Await what clients know."""
        super().open(round, participants)
        self.names = sorted(participants)
        if self.method.teaches:
            self.pupil.begin(self.known or self.pupil.knowledge())

    def download(self, client: ClientId) -> Message:
        """What the server predicts, in the client's tokens."""
        mean = super().download(client)
        if self.known is None:
            return mean
        _, _, back = self.clients[client]
        tokens = back.ids[self.known.tokens.long()]
        told = replace(self.known, tokens=tokens)
        return Message(mean.round, {**mean.tensors, **told.tensors()})

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep what this client predicts best so far."""
        theirs, mean = _parted(upload)
        size, there, _ = self.clients[client]
        top = self.method.top
        knowledge = Knowledge.received(theirs, size, top) if self.method.teaches else None
        super().receive(client, mean)
        if knowledge is not None:
            self.pupil.offer(self.names.index(client), knowledge, there.ids)

    def close(self) -> None:
        """Learn, and predict anew."""
        if self.method.teaches:
            loss, teachers = self.pupil.study(self.round), self.pupil.teachers
            counts = {name: int((teachers == n).sum()) for n, name in enumerate(self.names)}
            quality = self.pupil.quality()
            self.log("taught", {"after": self.round, "loss": loss, **quality, "by": counts})
        if self.method.teaches or self.known is None:
            self.known = self.pupil.knowledge()
        super().close()

    def model(self) -> PreTrainedModel:
        """The server's own."""
        return self.adapter.attach(self.own.base.model)

    def state(self) -> State:
        """The server's adapter and what it predicts, beside what is averaged."""
        mean = super().state()
        tensors = {f"mean/{name}": tensor for name, tensor in mean.tensors.items()}
        own = {f"own/{n}": p.detach().clone() for n, p in self.adapter.parameters().items()}
        known = {} if self.known is None else self.known.tensors()
        return State({**tensors, **own, **known}, mean.values)

    def restore(self, state: State) -> None:
        """Take them back."""
        known, _ = _parted(Message(0, state.tensors))
        self.known = Knowledge.of(known) if known else None
        own = self.adapter.parameters()
        copy({name: state.tensors[f"own/{name}"] for name in own}, own)
        mean = {n.removeprefix("mean/"): t for n, t in state.tensors.items() if n[:5] == "mean/"}
        super().restore(State(mean, state.values))


def _keys(*splits: Split) -> Tensor:
    """The keys of all samples of some splits: (any,) int64."""
    found = [sample_keys(split.items) for split in splits if isinstance(split, Examples)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *found])


def _parted(message: Message) -> tuple[dict[str, Tensor], Message]:
    """The predictions in a message, and the message without them."""
    known = {n: t for n, t in message.tensors.items() if n.startswith("knowledge.")}
    rest = {n: t for n, t in message.tensors.items() if n not in known}
    return known, Message(message.round, rest, message.values)


def _spelt(vocabulary: Vocabulary) -> dict[str, Tensor]:
    """A vocabulary for a message; -1 is the length of a token without bytes."""
    spelling = b"".join(token or b"" for token in vocabulary.tokens)
    lengths = [-1 if token is None else len(token) for token in vocabulary.tokens]
    return {
        "vocabulary.spelling": torch.frombuffer(bytearray(spelling), dtype=torch.uint8),
        "vocabulary.lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def _read(tensors: Mapping[str, Tensor], roles: Json) -> Vocabulary:
    """The vocabulary in a message; raises MessageError if there is none."""
    empty = torch.zeros(0)
    lengths = tensors.get("vocabulary.lengths", empty)
    spelling = tensors.get("vocabulary.spelling", empty)
    sound = lengths.dim() == spelling.dim() == 1 and len(lengths) > 0 and isinstance(roles, dict)
    sound = sound and len(lengths) <= MOST_TOKENS and int(lengths.max()) <= LONGEST_TOKEN
    if not sound or int(lengths.clamp(min=0).long().sum()) != len(spelling):
        raise MessageError("A client tells no vocabulary.")
    if not all(isinstance(i, int) and 0 <= i < len(lengths) for i in roles.values()):
        raise MessageError("A client's vocabulary has roles for tokens that it does not have.")
    spelt, sizes = spelling.numpy().tobytes(), lengths.tolist()
    after = accumulate(max(0, size) for size in sizes)
    tokens = (None if n < 0 else spelt[end - n : end] for n, end in zip(sizes, after, strict=True))
    return Vocabulary(tuple(tokens), roles)
