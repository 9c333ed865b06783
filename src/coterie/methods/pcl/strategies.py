"""PCL's strategies: how a client computes its trust weights from all clients' uploads."""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import top_logits
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Shapes
from coterie.methods.contract import ClientContext, ClientId, RunFacts
from coterie.methods.pcl.method import PCL, PCLClient, Uploads
from coterie.methods.pcl.trust import Trusted, cosine, sparse_distance
from coterie.seeding import generator
from coterie.training.spec import TrainingSpec
from coterie.transforms.context import Row

Mixtures = dict[ClientId, dict[str, float]]


class PCLWeights(PCL):
    """Strategy 1: a score is the cosine similarity of two adapters, each flattened to one vector.

    With `form: released`, a score is the mean cosine similarity of corresponding columns.
    """

    name: ClassVar[str] = "pcl-1"
    summary: ClassVar[str] = "adapters sent to all clients; trust by similarity of adapters"

    trusted: Trusted = Trusted()

    def row(self, client: PCLClient, rounds: int, uploads: Uploads) -> Row:
        by_columns, own = self.form == "released", uploads[client.context.name]["adapter"]
        similarities = {
            name: cosine(own, upload["adapter"], by_columns) for name, upload in uploads.items()
        }
        return self.trusted.row(client.context.name, similarities)


class PCLValidation(PCL):
    """Strategy 2: a score is the negative loss of a model on the scoring client's validation text.

    With `form: released`, a score is the negative perplexity.
    """

    name: ClassVar[str] = "pcl-2"
    summary: ClassVar[str] = "adapters sent to all clients; trust by loss on own validation text"

    trusted: Trusted = Trusted()
    validation_batches: int = Field(default=12, ge=1)
    """number of validation batches per scored model"""

    def row(self, client: PCLClient, rounds: int, uploads: Uploads) -> Row:
        context = client.context
        count = self.validation_batches * context.training.batch
        chance = generator(context.seed, "trust", context.name, rounds)
        batch = sample_batch(context.data.validation, count, context.window, chance)
        losses = client.losses(uploads, batch)
        released = self.form == "released"
        scores = {n: -math.exp(min(loss, 700)) if released else -loss for n, loss in losses.items()}
        return self.trusted.row(context.name, scores)


class PCLPredictions(PCL):
    """Strategy 3: a score is the negative mean l1 distance between predictions on a public text.

    A prediction is the sparse vector of the largest logits after a sample's last token. With `form:
    released`, a client's distances to all clients are divided by their sum and multiplied by 10.
    """

    name: ClassVar[str] = "pcl-3"
    summary: ClassVar[str] = "adapters and predictions on a public set sent to all clients"
    learns_preferences: ClassVar[bool] = False
    scores_weights: ClassVar[bool] = False
    evidence_fields: ClassVar[tuple[MessageField, ...]] = (
        MessageField(
            "logits",
            "largest logits on the public set, and their token ids",
            {"values": "float16", "places": "int32"},
        ),
    )

    trusted: Trusted = Trusted()
    public_batches: int = Field(default=4, ge=1)
    """number of batches of the public set"""
    logits: int = Field(default=100, ge=1)
    """number of largest logits sent per sample"""

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if not run.public:
            raise CoterieError(
                f"The method {self.name!r} needs a public set; set one with "
                f"`data: {{public: FILE}}`."
            )

    def evidence(self, context: ClientContext, rounds: int) -> Groups:
        assert context.public is not None, "check() refuses runs without a public text"
        count = self.public_batches * context.training.batch
        chance = generator(context.seed, "public", rounds)  # the same windows for all clients
        batch = sample_batch(context.public, count, context.window, chance)
        values, places = top_logits(context.base, batch.read, self.logits, context.training.batch)
        return {"logits": {"values": values.half(), "places": places.int()}}

    def evidence_shapes(self, training: TrainingSpec) -> Mapping[str, Shapes]:
        shape = (self.public_batches * training.batch, self.logits)
        return {"logits": {"values": shape, "places": shape}}

    def row(self, client: PCLClient, rounds: int, uploads: Uploads) -> Row:
        logits = {n: (u["logits"]["values"], u["logits"]["places"]) for n, u in uploads.items()}
        own = logits[client.context.name]
        distances = {name: sparse_distance(own, other) for name, other in logits.items()}
        total, released = sum(distances.values()), self.form == "released"
        if released and total:
            distances = {name: 10 * distance / total for name, distance in distances.items()}
        scores = {name: -distance for name, distance in distances.items()}
        return self.trusted.row(client.context.name, scores)


class PCLUniform(PCL):
    """Equal trust in all clients: federated averaging that begins after `warmup` rounds."""

    name: ClassVar[str] = "pcl-uniform"
    scores_weights: ClassVar[bool] = False
    summary: ClassVar[str] = "adapters sent to all clients; equal trust in all"

    def row(self, client: PCLClient, rounds: int, uploads: Uploads) -> Row:
        return dict.fromkeys(uploads, 1 / len(uploads))


class PCLTheoretical(PCL):
    """Trust weights w_ij proportional to the dot product of the topic shares of clients i and j."""

    name: ClassVar[str] = "pcl-theoretical"
    scores_weights: ClassVar[bool] = False
    summary: ClassVar[str] = "adapters sent to all clients; trust from known topic mixtures"

    mixtures: Mixtures = Field(default={})
    """topic shares of each client, which sum to 1"""

    @field_validator("mixtures")
    @classmethod
    def _shares(cls, mixtures: Mixtures) -> Mixtures:
        for client, shares in mixtures.items():
            if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
                raise ValueError(
                    f"the topic shares of {client!r} sum to {sum(shares.values()):g}; shares must "
                    "not be negative and must sum to 1"
                )
        return mixtures

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if missing := [name for name in run.clients if name not in self.mixtures]:
            raise CoterieError(
                f"The method {self.name!r} needs the topic mixture of every client; add "
                f"{', '.join(missing)} to its setting `mixtures`."
            )

    def row(self, client: PCLClient, rounds: int, uploads: Uploads) -> Row:
        own = self.mixtures[client.context.name]
        products = {
            name: sum(share * self.mixtures[name].get(topic, 0) for topic, share in own.items())
            for name in uploads
        }
        return {name: product / sum(products.values()) for name, product in products.items()}
