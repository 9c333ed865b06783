"""PCL: each client averages everybody's LoRA updates with trust weights of its own.

Personalised collaborative fine-tuning (arXiv 2404.09753). After `warmup` rounds alone, and then
every `every` rounds, clients exchange their adapters through the server, which only passes them on.
On its own machine each client scores the others' models, turns the scores into a row of trust, and
mixes: theta_i <- theta_i + sum_j w_ij Delta_j, with Delta_j the update of client j since its last
exchange (algorithm 1). The strategies differ in the score alone.

The released code differs from the paper; `form: released` selects it: it averages weights rather
than updates, and its scores are others (see each strategy).
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from coterie.aggregation.trust import cosine, sparse_distance, trust_row
from coterie.chance import generator
from coterie.data import Batch, sample_batch
from coterie.errors import CoterieError
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, State, check_shapes
from coterie.methods.adapter import WHAT, AdapterClient, AdapterServer, copy
from coterie.methods.contract import ClientContext, ClientId, ServerContext, Setting
from coterie.methods.lora import LoraMethod, PerClient
from coterie.scoring.evaluation import mean_loss, top_logits

Tensors = Mapping[str, Tensor]
Row = dict[ClientId, float]


class PCL(LoraMethod):
    """What the strategies have in common; defaults are those of CoMiGS's baseline."""

    paper: ClassVar[str] = "arXiv 2404.09753"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    evidence: ClassVar[tuple[Travels, ...]] = ()
    """What travels beside the adapters, for the scores."""

    generalists: PerClient = Field(default=2, description="LoRA sets whose outputs are averaged")
    warmup: int = Field(default=4, ge=1, description="rounds before the first exchange")
    every: int = Field(default=2, ge=1, description="rounds from one exchange to the next")
    mix: bool = Field(default=True, description="false: measure trust, and change no model")
    form: Literal["paper", "released"] = Field(
        default="paper", description="as in the paper, or as its released code computes"
    )
    top: int | None = Field(default=None, ge=1, description="trust only so many, the best")
    threshold: float | None = Field(
        default=None, description="trust only scores above it, and always the best two"
    )

    @model_validator(mode="after")
    def _one_choice(self) -> "PCL":
        if self.top is not None and self.threshold is not None:
            raise ValueError("`top` and `threshold` exclude each other; give one of them")
        return self

    def due(self, rounds: int) -> bool:
        """Whether clients exchange their models after so many rounds."""
        return rounds >= self.warmup and (rounds - self.warmup) % self.every == 0

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adapters up; everybody else's down, under their names."""
        hello = super().schema().hello
        fields = [Travels(f"{role}*", WHAT[role]) for role in self.shares]
        if self.form == "paper":
            fields.append(Travels("update/*", "their change since the last exchange"))
        up = (*fields, *self.evidence)
        down = tuple(
            Travels(f"from/*/{f.pattern}", f"the other clients': {f.what}", f.dtype) for f in up
        )
        return Schema(hello, up, down)

    def client(self, context: ClientContext) -> "PCLClient":
        """Scores and mixes."""
        return PCLClient(self, context)

    def server(self, context: ServerContext) -> "PCLServer":
        """Passes on."""
        return PCLServer(self, context)

    def row(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """A client's trust in everybody who uploaded, itself included."""
        scores = self.scores(client, rounds, uploads)
        return trust_row(client.context.name, scores, self.top, self.threshold)

    def scores(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """How useful each client is, by name; more is better."""
        raise NotImplementedError

    def observed(self, context: ClientContext, rounds: int) -> dict[str, Tensor]:
        """What a client, whose adapter is attached, sends beside it."""
        return {}


class PCLWeights(PCL):
    """Strategy 1: cosine similarity of LoRA weights, as one vector (released: mean over rows)."""

    name: ClassVar[str] = "pcl-1"
    summary: ClassVar[str] = "adapters go to all clients; trust by similarity of weights"

    def scores(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """See the class."""
        by_rows, mine = self.form == "released", client.shared
        return {name: cosine(mine, theirs, by_rows) for name, theirs in uploads.items()}


class PCLValidation(PCL):
    """Strategy 2: minus the loss of the others' models on the client's own validation text.

    (Released: minus the perplexity.)
    """

    name: ClassVar[str] = "pcl-2"
    summary: ClassVar[str] = "adapters go to all clients; trust by loss on own validation text"

    validation_batches: int = Field(default=12, ge=1, description="batches to score a model on")

    def scores(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """See the class."""
        context = client.context
        count = self.validation_batches * context.training.batch
        chance = generator(context.seed, "trust", context.name, rounds)
        batch = sample_batch(context.data.validation, count, context.window, chance)
        losses = client.losses(uploads, batch)
        if self.form == "released":
            return {name: -math.exp(min(loss, 700)) for name, loss in losses.items()}
        return {name: -loss for name, loss in losses.items()}


VALUES, PLACES = "logits/values", "logits/places"


class PCLPredictions(PCL):
    """Strategy 3: minus the l1 distance of predictions on a public text, per token.

    Predictions are the top logits, which travel sparse. (Released: a client's distances are divided
    by their sum and multiplied by 10.)
    """

    name: ClassVar[str] = "pcl-3"
    summary: ClassVar[str] = "adapters and predictions on a public text go to all clients"
    evidence: ClassVar[tuple[Travels, ...]] = (
        Travels(VALUES, "the largest logits on the public text", "float16"),
        Travels(PLACES, "their places in the vocabulary", "int32"),
    )

    public_batches: int = Field(default=4, ge=1, description="batches of the public text")
    logits: int = Field(default=100, ge=1, description="logits sent for each token, the largest")

    def check(self, setting: Setting) -> None:
        """There is a public text, too."""
        super().check(setting)
        if not setting.public:
            raise CoterieError(
                f"The method {self.name!r} compares predictions on a public text; name one with "
                "`data: {public: FILE}`."
            )

    def observed(self, context: ClientContext, rounds: int) -> dict[str, Tensor]:
        """The client's top logits on this exchange's public windows: (tokens, logits)."""
        assert context.public is not None, "check() made sure of it"
        count = self.public_batches * context.training.batch
        chance = generator(context.seed, "public", rounds)  # the same windows for all clients
        batch = sample_batch(context.public, count, context.window, chance)
        values, places = top_logits(context.base, batch, self.logits)
        return {VALUES: values.half(), PLACES: places.int()}

    def scores(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """See the class."""
        mine = uploads[client.context.name]
        away = {
            name: sparse_distance((mine[VALUES], mine[PLACES]), (theirs[VALUES], theirs[PLACES]))
            for name, theirs in uploads.items()
        }
        total = sum(away.values())
        if self.form == "released" and total:
            return {name: -10 * distance / total for name, distance in away.items()}
        return {name: -distance for name, distance in away.items()}


class PCLUniform(PCL):
    """Everybody trusts everybody alike."""

    name: ClassVar[str] = "pcl-uniform"
    summary: ClassVar[str] = "adapters go to all clients; the same trust in all"

    def row(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """One over the number of clients."""
        return dict.fromkeys(uploads, 1 / len(uploads))


class PCLTheoretical(PCL):
    """Trust from known mixtures of topics: client i's trust in j is the product of their shares.

    Of the clients that take part, each row sums to 1.
    """

    name: ClassVar[str] = "pcl-theoretical"
    summary: ClassVar[str] = "adapters go to all clients; trust by known mixtures of topics"

    mixtures: dict[ClientId, dict[str, float]] = Field(
        default={}, description="each client's shares of topics, which sum to 1"
    )

    @field_validator("mixtures")
    @classmethod
    def _shares(
        cls, mixtures: dict[ClientId, dict[str, float]]
    ) -> dict[ClientId, dict[str, float]]:
        for client, shares in mixtures.items():
            if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
                raise ValueError(
                    f"the shares of {client!r} sum to {sum(shares.values()):g}; shares are "
                    "positive and sum to 1"
                )
        return mixtures

    def check(self, setting: Setting) -> None:
        """Every client's mixture is known, too."""
        super().check(setting)
        if missing := [name for name in setting.clients if name not in self.mixtures]:
            raise CoterieError(
                f"The method {self.name!r} needs the mixture of every client; add "
                f"{', '.join(missing)} to its `mixtures`."
            )

    def row(self, client: "PCLClient", rounds: int, uploads: Mapping[ClientId, Tensors]) -> Row:
        """See the class."""
        mine = self.mixtures[client.context.name]
        alike = {
            name: sum(share * self.mixtures[name].get(topic, 0) for topic, share in mine.items())
            for name in uploads
        }
        return {name: value / sum(alike.values()) for name, value in alike.items()}


class PCLClient(AdapterClient):
    """Trains, sends its adapter where an exchange is due, and mixes what comes back."""

    method: PCL

    def __init__(self, method: PCL, context: ClientContext) -> None:
        super().__init__(method, context)
        self.start = {name: p.detach().clone() for name, p in self.shared.items()}
        self._row: tuple[tuple[int, list[ClientId]], Row] | None = None

    def step(self, download: Message) -> Message:
        """Mix, train, and upload if the round ends with an exchange."""
        super().step(download)
        rounds = download.round + 1
        return Message(download.round, self._upload(rounds) if self.method.due(rounds) else {})

    def _upload(self, rounds: int) -> dict[str, Tensor]:
        """What the others learn of this client after so many rounds."""
        tensors = {name: p.detach().clone() for name, p in self.shared.items()}
        if self.method.form == "paper":
            tensors |= {f"update/{n}": p.detach() - self.start[n] for n, p in self.shared.items()}
        self.model()
        return tensors | self.method.observed(self.context, rounds)

    def finish(self, download: Message) -> None:
        """Score whoever uploaded, and mix."""
        if not download.tensors:
            return
        uploads: dict[ClientId, dict[str, Tensor]] = {
            self.context.name: self._upload(download.round)
        }
        for name, tensor in download.tensors.items():
            _, peer, what = name.split("/", 2)
            uploads.setdefault(peer, {})[what] = tensor
        uploads = {name: uploads[name] for name in sorted(uploads)}
        expected = _shapes(uploads[self.context.name])
        for tensors in uploads.values():
            check_shapes(Message(tensors=tensors), expected)
        # An evaluation takes a download in, and then the round does: it is scored once.
        exchange = download.round, list(uploads)
        if self._row is None or self._row[0] != exchange:
            self._row = exchange, self.method.row(self, download.round, uploads)
            self.context.log("trust", self._row[1])
        if self.method.mix:
            self._mix(self._row[1], uploads)

    @torch.no_grad()
    def _mix(self, row: Row, uploads: Mapping[ClientId, Tensors]) -> None:
        """The mean of all updates (released: of all weights), weighted by trust."""
        paper = self.method.form == "paper"
        for name, parameter in self.shared.items():
            total = self.start[name].clone() if paper else torch.zeros_like(parameter)
            for peer, weight in row.items():
                theirs = uploads[peer][f"update/{name}" if paper else name]
                total.add_(theirs.to(total.device), alpha=weight)
            parameter.copy_(total)
            self.start[name] = total

    def losses(self, uploads: Mapping[ClientId, Tensors], batch: Batch) -> dict[ClientId, float]:
        """Mean loss of everybody's model on samples, in nats per token."""
        self.model()
        mine = {name: p.detach().clone() for name, p in self.shared.items()}
        found = {}
        for peer, tensors in uploads.items():
            copy(tensors, self.shared)
            found[peer] = mean_loss(self.context.base, batch, self.context.training.batch)
        copy(mine, self.shared)
        return found

    def state(self) -> State:
        """The adapter, its moments, and what it was after the last exchange."""
        state = super().state()
        start = {f"start/{name}": tensor.clone() for name, tensor in self.start.items()}
        return State({**state.tensors, **start})

    def restore(self, state: State) -> None:
        """Take all three back."""
        super().restore(state)
        self.start = {name: state.tensors[f"start/{name}"].clone() for name in self.start}


class PCLServer(AdapterServer):
    """Passes every client's upload on to the others; it mixes nothing itself."""

    method: PCL

    def __init__(self, method: PCL, context: ServerContext) -> None:
        super().__init__(method, context)
        self.uploads: dict[ClientId, Tensors] = {}
        self._coming: dict[ClientId, Tensors] = {}

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Await uploads."""
        super().open(round, participants)
        self._coming = {}

    def download(self, client: ClientId) -> Message:
        """What the others uploaded at the end of the round before, if it was an exchange."""
        tensors = {
            f"from/{peer}/{name}": tensor
            for peer, upload in self.uploads.items()
            if peer != client
            for name, tensor in upload.items()
        }
        return Message(self.round, tensors)

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep an upload until the end of the round."""
        expected: dict[str, tuple[int, ...]] = {}
        if self.method.due(self.round + 1):
            expected = dict(self.held[client])
            if self.method.form == "paper":
                expected |= {f"update/{name}": shape for name, shape in expected.items()}
            for field in self.method.evidence:
                if field.pattern not in upload.tensors:
                    raise MessageError(f"The tensor {field.pattern!r} is missing from a message.")
                expected[field.pattern] = tuple(upload.tensors[field.pattern].shape)
        check_shapes(upload, expected)
        self._coming[client] = upload.tensors

    def close(self) -> None:
        """From now on, downloads hold this round's uploads."""
        self.uploads = {name: self._coming[name] for name in sorted(self._coming)}
        if not self.method.due(self.round + 1):
            self.uploads = {}
        self.round += 1

    def state(self) -> State:
        """The uploads that are to be passed on."""
        tensors = {f"{p}/{n}": t for p, upload in self.uploads.items() for n, t in upload.items()}
        return State(tensors, {"round": self.round})

    def restore(self, state: State) -> None:
        """Take them back."""
        self.round = state.values["round"]
        self.uploads = {}
        for name, tensor in state.tensors.items():
            peer, _, what = name.partition("/")
            self.uploads[peer] = {**self.uploads.get(peer, {}), what: tensor}


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
