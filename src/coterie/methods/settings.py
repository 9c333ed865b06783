"""What methods' settings are composed of: typed parts, of which a method has those that act in it.

A part means the same in every method, so it can be carried from one to another as a whole.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie.adapters import Layout
from coterie.errors import CoterieError
from coterie.training.context import ClientId

PerClient = int | dict[ClientId, int]
"""One number for all clients, or a number by client name, `others` standing for the rest."""


class Settings(BaseModel):
    """A part of a method's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Mlp(Settings):
    """Low-rank pairs on every linear layer of every MLP, in sets."""

    rank: PerClient = Field(default=8, description="rank of the MLPs' pairs (r)")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """A client's generalists and specialists: sets that are averaged, and that stay."""
        raise NotImplementedError


class SharedSets(Mlp):
    """Low-rank pairs on every linear layer of every MLP, in sets that are averaged over clients."""

    sets: PerClient = Field(default=2, description="LoRA sets, whose outputs are averaged")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """See `Mlp`."""
        return for_client(self.sets, client, "number of LoRA sets"), 0


class OwnSets(Mlp):
    """Low-rank pairs on every linear layer of every MLP, in sets that nobody else sees."""

    sets: PerClient = Field(default=2, description="LoRA sets, whose outputs are averaged")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """See `Mlp`."""
        return 0, for_client(self.sets, client, "number of LoRA sets")


class Generalists(Mlp):
    """Low-rank experts on every MLP, which a router weighs, all of them averaged over clients."""

    generalists: PerClient = Field(default=2, description="experts averaged over clients")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """See `Mlp`."""
        return for_client(self.generalists, client, "number of generalists"), 0


class Specialists(Mlp):
    """Low-rank experts on every MLP, which a router weighs, all of them personal."""

    specialists: PerClient = Field(default=2, description="experts that stay with their client")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """See `Mlp`."""
        return 0, for_client(self.specialists, client, "number of specialists")


class Experts(Mlp):
    """Low-rank experts on every MLP, which a router weighs, averaged ones and personal ones."""

    generalists: PerClient = Field(default=1, description="experts averaged over clients")
    specialists: PerClient = Field(default=1, description="experts that stay with their client")

    def counts(self, client: ClientId) -> tuple[int, int]:
        """See `Mlp`."""
        return (
            for_client(self.generalists, client, "number of generalists"),
            for_client(self.specialists, client, "number of specialists"),
        )


class Attention(Settings):
    """One low-rank pair on each of some linear layers."""

    rank: int = Field(default=8, ge=1, description="rank of the pairs (r)")
    targets: str | None = Field(
        default=None,
        description="regular expression for the names of the layers; null: all of attention's",
    )


class LoraAlpha(Settings):
    """The scale of low-rank products where it is alpha / r."""

    alpha: float = Field(default=16.0, gt=0, description="LoRA's alpha")


class Lora(LoraAlpha):
    """The scale of low-rank products."""

    scale: Literal["sqrt", "rank"] = Field(
        default="sqrt", description="scale of a product: alpha / sqrt(r), or alpha / r"
    )


class Router(Settings):
    """How experts are weighed; the router is trained with them."""

    top_k: int | None = Field(
        default=None, ge=1, description="experts per token (k); default min(2, experts)"
    )
    load_balance: Literal["none", "uniform", "generalist"] = Field(
        default="generalist",
        description="load-balance loss; generalist: half of the load to expert 0",
    )
    load_balance_weight: float = Field(
        default=0.01, ge=0, description="weight of that loss (lambda)"
    )


class PhasedRouter(Router):
    """How experts are weighed; the router is trained in phases of its own."""

    every: int = Field(default=30, ge=1, description="steps between two router phases (tau)")
    steps: int = Field(default=10, ge=1, description="updates of the router in a phase (s)")
    learning_rate: float = Field(default=2e-3, gt=0, description="of these updates, constant")


class Privacy(Settings):
    """Differential privacy of the mean embeddings of a client's samples.

    It says nothing of the trained adapters, which travel too.
    """

    epsilon: float = Field(gt=0, description="over all rounds, for one sample of the embedding set")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="the chance that epsilon fails")
    clip: float = Field(
        default=1.0, gt=0, description="largest l2 norm of one sample's embeddings, all layers'"
    )


class Embeddings(Settings):
    """What experts choose clients by: mean embeddings of a few training samples."""

    share: float = Field(default=0.05, gt=0, le=1, description="share of the training samples used")
    samples: int = Field(default=200, ge=1, description="most samples used")
    privacy: Privacy | None = Field(default=None, description="noise on the mean embeddings")


class AmoleRouter(Settings):
    """How the domain experts that a client holds are weighed per token."""

    kind: Literal["token", "vanilla"] = Field(
        default="token",
        description="by the experts' own embeddings; or a gate with a row for each of all experts",
    )
    top_k: int = Field(default=2, ge=1, description="domain experts per token (k)")
    score_scale: Literal["rank", "dim"] = Field(
        default="rank",
        description="a token router's scores are divided by sqrt(r); in the paper by sqrt(dim)",
    )
    renormalise: bool = Field(
        default=True, description="a token's weights sum to 1; not so in the paper"
    )
    load_balance_weight: float = Field(
        default=1e-3, ge=0, description="weight of the load-balance loss (beta)"
    )

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.kind == "vanilla":
            refuse_unused(self, "kind: vanilla", "score_scale")
        return self


def refuse_unused(settings: BaseModel, beside: str, *keys: str) -> None:
    """Raise ValueError for a key that was changed although it does nothing beside another."""
    for key in keys:
        if getattr(settings, key) != type(settings).model_fields[key].get_default():
            raise ValueError(f"{key} does nothing with `{beside}`; leave it out")


def layout_of(
    client: ClientId,
    mlp: Mlp | None,
    attention: Attention | None,
    lora: Lora,
    router: Router | None = None,
) -> Layout:
    """What some parts attach to the base for a client; raises CoterieError if they cannot."""
    generalists, specialists = (0, 0) if mlp is None else mlp.counts(client)
    return Layout(
        generalists=generalists,
        specialists=specialists,
        rank=1 if mlp is None else for_client(mlp.rank, client, "rank"),
        attention_rank=0 if attention is None else attention.rank,
        targets=None if attention is None else attention.targets,
        alpha=lora.alpha,
        scale=lora.scale,
        routed=router is not None,
        top_k=None if router is None else router.top_k,
    )


def for_client(counts: PerClient, client: ClientId, what: str) -> int:
    """The number that is meant for a client; CoterieError, which says what it is, without one."""
    count = counts if isinstance(counts, int) else counts.get(client, counts.get("others"))
    if count is None:
        raise CoterieError(
            f"The method gives no {what} for the client {client!r}; add its name or `others`."
        )
    if count < 0:
        raise CoterieError(f"The client {client!r} cannot have a {what} of {count}.")
    return count


def check_names(part: Settings | None, where: str, clients: tuple[ClientId, ...]) -> None:
    """Raise CoterieError if a number by client names somebody who takes no part."""
    for key in () if part is None else type(part).model_fields:
        counts = getattr(part, key)
        for name in set(counts) - {*clients, "others"} if isinstance(counts, dict) else ():
            raise CoterieError(
                f"The method's setting {where}.{key} names {name!r}, which is not a client "
                f"(clients: {', '.join(clients)})."
            )
