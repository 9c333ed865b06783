"""PCL: each client averages everybody's LoRA updates with trust weights of its own.

Personalised collaborative fine-tuning (arXiv 2404.09753). After `warmup` rounds alone, and then
every `every` rounds, clients exchange their adapters through the server, which only passes them on.
On its own machine each client scores the others' models, turns the scores into a row of trust, and
mixes: theta_i <- theta_i + sum_j w_ij Delta_j, with Delta_j the update of client j since its last
exchange (algorithm 1). The strategies differ in the score alone.

The released code differs from the paper; `form: released` selects it: it averages weights rather
than updates, draws the A of each client's pairs apart, and its scores are others (see each
strategy).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from coterie.adapters import Adapter, Trainable
from coterie.aggregation.trust import cosine, sparse_distance
from coterie.data.split import AnyBatch
from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import mean_loss, top_logits
from coterie.messages import Field as Travels
from coterie.messages import (
    Groups,
    Message,
    MessageError,
    Schema,
    Shapes,
    State,
    Tensors,
    check_shapes,
)
from coterie.messages.names import TRUST
from coterie.methods.adapter import (
    AdapterClient,
    AdapterMethod,
    AdapterServer,
    copied,
    copy,
    shapes_of,
)
from coterie.methods.contract import ClientContext, ClientId, Holders, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets, Trusted
from coterie.seeding import generator
from coterie.training.spec import TrainingSpec

Row = dict[ClientId, float]
Uploads = Mapping[ClientId, Message]
Mixtures = dict[ClientId, dict[str, float]]


class PCL(AdapterMethod):
    """What the strategies have in common; defaults are those of CoMiGS's baseline."""

    paper: ClassVar[str] = "arXiv 2404.09753"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    evidence: ClassVar[tuple[Travels, ...]] = ()
    """What travels beside what is mixed, for the scores."""
    compares: ClassVar[bool] = True
    """Whether scores are of the others' weights, so that these travel even where updates do."""

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    warmup: int = Field(default=5, ge=1)
    """rounds before the first exchange"""
    every: int = Field(default=2, ge=1)
    """rounds between exchanges"""
    mix: bool = True
    """mix models by trust; false: measure trust only"""
    form: Literal["paper", "released"] = "paper"
    """formulas of the paper, or of its released code"""

    def due(self, rounds: int) -> bool:
        """Whether clients exchange their models after so many rounds."""
        return rounds >= self.warmup and (rounds - self.warmup) % self.every == 0

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is mixed and compared up; everybody else's down, under their names."""
        family = super().schema()
        groups = {
            "adapter": replace(family.up[0], reduce="each"),
            "update": Travels("update", "change of the adapter since the last exchange"),
        }
        up = (*(groups[name] for name in self.groups), *self.evidence)
        theirs = (
            replace(f, description=f"from other clients: {f.description}", peers=True) for f in up
        )
        return Schema(family.hello, up, tuple(theirs))

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of an adapter's tensors that travel: what is mixed, and what is compared."""
        if self.form == "released":
            return ("adapter",)
        return ("adapter", "update") if self.compares else ("update",)

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        """As released, each client's A begins with values of its own."""
        if self.form == "paper":
            return super().adapter(base, seed, client)
        return Adapter(base, self.layout(client), seed, client, lambda p: p.factor != "A")

    def client(self, context: ClientContext) -> "PCLClient":
        """Scores and mixes."""
        return PCLClient(self, context)

    def server(self, context: ServerContext) -> "PCLServer":
        """Passes on."""
        return PCLServer(self, context)

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """A client's trust in everybody who uploaded, itself included: weights that sum to 1."""
        raise NotImplementedError

    def observed(self, context: ClientContext, rounds: int) -> Groups:
        """What a client, whose adapter is attached, sends beside it."""
        return {}

    def shapes(self, training: TrainingSpec) -> Mapping[str, Shapes]:
        """Of what is `observed`, by group."""
        return {}


class PCLWeights(PCL):
    """Strategy 1: cosine similarity of LoRA weights, as one vector (released: mean over rows)."""

    name: ClassVar[str] = "pcl-1"
    summary: ClassVar[str] = "adapters sent to all clients; trust by weight similarity"

    trusted: Trusted = Trusted()

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """See the class."""
        by_columns, mine = self.form == "released", client.shared
        alike = {name: cosine(mine, u["adapter"], by_columns) for name, u in uploads.items()}
        return self.trusted.row(client.context.name, alike)


class PCLValidation(PCL):
    """Strategy 2: minus the loss of the others' models on the client's own validation text.

    (Released: minus the perplexity.)
    """

    name: ClassVar[str] = "pcl-2"
    summary: ClassVar[str] = "adapters sent to all clients; trust by loss on own validation text"

    trusted: Trusted = Trusted()
    validation_batches: int = Field(default=12, ge=1)
    """validation batches per scored model"""

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """See the class."""
        context = client.context
        count = self.validation_batches * context.training.batch
        chance = generator(context.seed, "trust", context.name, rounds)
        batch = sample_batch(context.data.validation, count, context.window, chance)
        losses = client.losses(uploads, batch)
        released = self.form == "released"
        scores = {n: -math.exp(min(loss, 700)) if released else -loss for n, loss in losses.items()}
        return self.trusted.row(context.name, scores)


class PCLPredictions(PCL):
    """Strategy 3: minus the l1 distance of predictions on a public text, the mean over samples.

    A prediction is the top logits after a sample's last token, which travel sparse. (Released: a
    client's distances are divided by their sum and multiplied by 10.)
    """

    name: ClassVar[str] = "pcl-3"
    summary: ClassVar[str] = "adapters and predictions on a public set sent to all clients"
    learns_preferences: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    evidence: ClassVar[tuple[Travels, ...]] = (
        Travels(
            "logits",
            "largest logits on the public set, and their token ids",
            {"values": "float16", "places": "int32"},
        ),
    )

    trusted: Trusted = Trusted()
    public_batches: int = Field(default=4, ge=1)
    """batches of the public set"""
    logits: int = Field(default=100, ge=1)
    """largest logits sent per sample"""

    def check(self, run: RunFacts) -> None:
        """There is a public text, too."""
        super().check(run)
        if not run.public:
            raise CoterieError(
                f"The method {self.name!r} compares predictions on a public set; set one with "
                f"`data: {{public: FILE}}`."
            )

    def observed(self, context: ClientContext, rounds: int) -> Groups:
        """The client's top logits on this exchange's public samples: (samples, logits)."""
        assert context.public is not None, "check() made sure of it"
        count = self.public_batches * context.training.batch
        chance = generator(context.seed, "public", rounds)  # the same windows for all clients
        batch = sample_batch(context.public, count, context.window, chance)
        values, places = top_logits(context.base, batch.read, self.logits, context.training.batch)
        return {"logits": {"values": values.half(), "places": places.int()}}

    def shapes(self, training: TrainingSpec) -> Mapping[str, Shapes]:
        """Those of the values and places."""
        shape = (self.public_batches * training.batch, self.logits)
        return {"logits": {"values": shape, "places": shape}}

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """See the class."""
        logits = {n: (u["logits"]["values"], u["logits"]["places"]) for n, u in uploads.items()}
        mine = logits[client.context.name]
        away = {name: sparse_distance(mine, theirs) for name, theirs in logits.items()}
        total, released = sum(away.values()), self.form == "released"
        if released and total:
            away = {name: 10 * distance / total for name, distance in away.items()}
        scores = {name: -distance for name, distance in away.items()}
        return self.trusted.row(client.context.name, scores)


class PCLUniform(PCL):
    """Everybody trusts everybody alike: federated averaging that begins after `warmup` rounds."""

    name: ClassVar[str] = "pcl-uniform"
    compares: ClassVar[bool] = False
    summary: ClassVar[str] = "adapters sent to all clients; equal trust in all"

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """One over the number of clients."""
        return dict.fromkeys(uploads, 1 / len(uploads))


class PCLTheoretical(PCL):
    """Trust from known mixtures of topics: client i's trust in j is the product of their shares.

    Of the clients that take part, each row sums to 1.
    """

    name: ClassVar[str] = "pcl-theoretical"
    compares: ClassVar[bool] = False
    summary: ClassVar[str] = "adapters sent to all clients; trust by known topic mixtures"

    mixtures: Mixtures = Field(default={})
    """topic shares of each client; each client's sum to 1"""

    @field_validator("mixtures")
    @classmethod
    def _shares(cls, mixtures: Mixtures) -> Mixtures:
        for client, shares in mixtures.items():
            if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
                raise ValueError(
                    f"the shares of {client!r} sum to {sum(shares.values()):g}; shares must be "
                    "positive and sum to 1"
                )
        return mixtures

    def check(self, run: RunFacts) -> None:
        """Every client's mixture is known, too."""
        super().check(run)
        if missing := [name for name in run.clients if name not in self.mixtures]:
            raise CoterieError(
                f"The method {self.name!r} needs the mixture of every client; add "
                f"{', '.join(missing)} to its `mixtures`."
            )

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """See the class."""
        mine = self.mixtures[client.context.name]
        alike = {
            name: sum(share * self.mixtures[name].get(topic, 0) for topic, share in mine.items())
            for name in uploads
        }
        return {name: value / sum(alike.values()) for name, value in alike.items()}


class PCLClient(AdapterClient[PCL]):
    """Trains, sends its adapter where an exchange is due, and mixes what comes back."""

    def __init__(self, method: PCL, context: ClientContext) -> None:
        super().__init__(method, context)
        self.kept["start"] = copied(self.shared)  # as the last exchange left them

    def receive(self, download: Message) -> None:
        """Score whoever uploaded, and mix."""
        if not download.peers:
            return
        me, rounds = self.context.name, download.round
        peers = {name: download.from_peer(name) for name in download.peers}
        uploads = dict(sorted({me: self._exchanged(rounds), **peers}.items()))
        for upload in uploads.values():
            for group in {*upload.groups, *uploads[me].groups}:
                check_shapes(upload[group], shapes_of(uploads[me][group]))
        row = self.method.row(self, rounds, uploads)
        self.context.log(TRUST, row)
        if self.method.mix:
            self._mix(row, uploads)

    def upload(self, exchange: int) -> Message:
        """The adapter, if the round ends with an exchange."""
        return self._exchanged(exchange + 1) if self.method.due(exchange + 1) else Message(exchange)

    def _exchanged(self, rounds: int) -> Message:
        """What the others learn of this client after so many rounds."""
        start = self.kept["start"]
        update = {n: p.detach() - start[n] for n, p in self.shared.items()}
        groups: dict[str, Tensors] = {"adapter": copied(self.shared), "update": update}
        self.model()
        mine = {name: groups[name] for name in self.method.groups}
        return Message(rounds - 1, {**mine, **self.method.observed(self.context, rounds)})

    @torch.no_grad()
    def _mix(self, row: Row, uploads: Uploads) -> None:
        """The mean of all updates (released: of all weights), weighted by trust."""
        paper, start = self.method.form == "paper", self.kept["start"]
        for name, parameter in self.shared.items():
            total = start[name].clone() if paper else torch.zeros_like(parameter)
            for peer, weight in row.items():
                theirs = uploads[peer]["update" if paper else "adapter"][name]
                total.add_(theirs.to(total.device), alpha=weight)
            parameter.copy_(total)
            start[name] = total

    def losses(self, uploads: Uploads, batch: AnyBatch) -> dict[ClientId, float]:
        """Mean loss of everybody's model on samples, in nats per token (of pairs, DPO's)."""
        base, model = self.context.base, self.model()
        mine, found = copied(self.shared), {}
        for peer, upload in uploads.items():
            copy(upload["adapter"], self.shared)
            found[peer] = mean_loss(base, model, batch, self.context.training.at_once)
        copy(mine, self.shared)
        return found


class PCLServer(AdapterServer[PCL]):
    """Passes every client's upload on to the others; it mixes nothing itself."""

    def __init__(self, method: PCL, context: ServerContext) -> None:
        super().__init__(method, context)
        self.context = context
        self.uploads: dict[ClientId, Groups] = {}
        self._coming: dict[ClientId, Groups] = {}

    def declared(self, client: ClientId, hello: Message) -> dict[str, tuple[int, ...]]:
        """The same, of all shared tensors: nobody can mix with one who lacks some."""
        shapes = super().declared(client, hello)
        if missing := self.shared.keys() - shapes:
            raise MessageError(f"The client {client!r} declares no {min(missing)!r}.")
        return shapes

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Await uploads."""
        super().start_round(exchange, participants)
        self._coming = {}

    def download(self, client: ClientId) -> Message:
        """What the others uploaded at the end of the round before, if it was an exchange."""
        others = {peer: groups for peer, groups in self.uploads.items() if peer != client}
        return Message(self.exchange, peers=others)

    def reference(self, client: ClientId) -> Groups:
        """Return the client's first adapter, as its mixture is unknown; an update is a change."""
        adapter = self.method.adapter(self.context.base, self.context.seed, client)
        start = {n: tensor for n, tensor in adapter.tensors().items() if n in self.shared}
        return {"adapter": start, "update": {n: torch.zeros_like(t) for n, t in start.items()}}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep an upload until the end of the round."""
        adapter = dict.fromkeys(self.method.groups, self.held[client])
        for group, shapes in {**adapter, **self.method.shapes(self.context.training)}.items():
            check_shapes(upload[group], shapes if self.method.due(self.exchange + 1) else {})
        self._coming[client] = upload.groups

    def end_round(self, mean: Message, held: Holders) -> None:
        """From now on, downloads hold this round's uploads."""
        self.uploads = self._coming if self.method.due(self.exchange + 1) else {}
        self.exchange += 1

    def state(self) -> State:
        """The uploads that are to be passed on."""
        parts = {peer: State(groups) for peer, groups in self.uploads.items()}
        return State(values={"round": self.exchange}, parts=parts)

    def restore(self, state: State) -> None:
        """Take them back."""
        self.exchange = state.values["round"]
        self.uploads = {peer: part.groups for peer, part in state.parts.items()}
