"""What methods' settings are composed of: typed parts, of which a method has those that act in it.

A part means the same in every method, so it can be carried from one to another as a whole.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie.aggregation.trust import trust_row
from coterie.errors import CoterieError
from coterie.training.context import ClientId

PerClient = int | dict[ClientId, int]
"""One number for all clients, or a number by client name, `others` standing for the rest."""

NOUNS = {"sets": "LoRA sets"}
"""What error messages call a number, where it is not the setting's name."""


class Settings(BaseModel):
    """A part of a method's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Mlp(Settings):
    """Sets of LoRA pairs on all linear layers of all MLPs."""

    rank: PerClient = 8
    """LoRA rank on MLP layers (r)"""
    placement: Literal["auto", "inside", "beside"] = "auto"
    """inside: on the linear layers of MLPs; beside: next to each feed-forward block (one pair from
    hidden states to hidden states); auto: inside where the base has MLPs of a known form, else
    beside"""

    counted: ClassVar[tuple[str, str]] = ("generalists", "specialists")
    """The settings that hold the numbers of averaged and of personal sets; empty without any."""

    def counts(self, client: ClientId) -> tuple[int, int]:
        """Return a client's numbers of averaged and personal sets; 0 without the setting."""
        averaged, personal = (
            for_client(getattr(self, key, 0), client, f"number of {NOUNS.get(key, key)}")
            for key in self.counted
        )
        return averaged, personal


class SharedSets(Mlp):
    """Sets of LoRA pairs on all linear layers of all MLPs, averaged over clients."""

    counted: ClassVar[tuple[str, str]] = ("sets", "")

    sets: PerClient = 2
    """number of LoRA sets, whose outputs are averaged"""


class OwnSets(Mlp):
    """Sets of LoRA pairs on all linear layers of all MLPs, kept by their client."""

    counted: ClassVar[tuple[str, str]] = ("", "sets")

    sets: PerClient = 2
    """number of LoRA sets, whose outputs are averaged"""


class Generalists(Mlp):
    """Routed experts on every MLP, all averaged over clients."""

    generalists: PerClient = 2
    """number of generalists (experts averaged over clients)"""


class Specialists(Mlp):
    """Routed experts on every MLP, all personal."""

    specialists: PerClient = 2
    """number of specialists (experts that stay on the client)"""


class Experts(Mlp):
    """Routed experts on every MLP, averaged (generalists) and personal (specialists)."""

    generalists: PerClient = 1
    """number of generalists (experts averaged over clients)"""
    specialists: PerClient = 1
    """number of specialists (experts that stay on the client)"""


class Attention(Settings):
    """One LoRA pair on each targeted linear layer."""

    rank: int = Field(default=8, ge=1)
    """LoRA rank (r)"""
    targets: str | None = None
    """regular expression for names of linear layers, such as q_proj, or for what they do, such as
    attention.q; null: all linear layers of attention"""


class LoraAlpha(Settings):
    """Scale of LoRA pairs by alpha / r, and their dropout."""

    alpha: float = Field(default=16.0, gt=0)
    """LoRA alpha"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout rate of each LoRA pair's input, in training"""


class Lora(LoraAlpha):
    """Scale and dropout of LoRA pairs."""

    scale: Literal["sqrt", "rank"] = "sqrt"
    """scale of a LoRA pair: alpha / sqrt(r), or alpha / r"""


class Router(Settings):
    """Routing of tokens to experts; the router is trained with the experts."""

    top_k: int | None = Field(default=None, ge=1)
    """experts per token (k); null: min(2, number of experts)"""
    load_balance: Literal["none", "uniform", "generalist"] = "generalist"
    """load-balancing loss; generalist: half of the load on expert 0"""
    load_balance_weight: float = Field(default=0.01, ge=0)
    """weight of the load-balancing loss (lambda)"""


class PhasedRouter(Router):
    """Routing of tokens to experts; the router is trained in separate phases."""

    every: int = Field(default=30, ge=1)
    """steps between router phases (tau)"""
    steps: int = Field(default=10, ge=1)
    """router updates per phase (s)"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate of router updates (constant)"""
    leftover_gradients: bool = False
    """true: a phase also leaves gradients on the experts, which their next step adds to its own,
    and steps of the experts leave some on the routers, as in the released code; experts then learn
    from validation text, too"""


class Trusted(Settings):
    """Whom a client trusts at all, of those it has scored."""

    top: int | None = Field(default=None, ge=1)
    """number of best-scored clients to trust; null: no limit"""
    threshold: float | None = None
    """score above which clients are trusted (the best two always are); null: no limit"""

    @model_validator(mode="after")
    def _one_choice(self) -> "Trusted":
        if self.top is not None and self.threshold is not None:
            raise ValueError("`top` and `threshold` are mutually exclusive; give one of them")
        return self

    def row(self, own: str, scores: Mapping[str, float]) -> dict[str, float]:
        """The softmax of the scores that are left."""
        return trust_row(own, scores, self.top, self.threshold)


def refuse_unused(settings: BaseModel, beside: str, *keys: str) -> None:
    """Raise ValueError for a key that was changed although it does nothing beside another."""
    for key in keys:
        if getattr(settings, key) != type(settings).model_fields[key].get_default():
            raise ValueError(f"{key} has no effect with `{beside}`; remove it")


def for_client(counts: PerClient, client: ClientId, what: str) -> int:
    """The number that is meant for a client; CoterieError, which says what it is, without one."""
    count = counts if isinstance(counts, int) else counts.get(client, counts.get("others"))
    if count is None:
        raise CoterieError(
            f"The method has no {what} for the client {client!r}; add its name or `others`."
        )
    if count < 0:
        raise CoterieError(f"The {what} of the client {client!r} cannot be {count}.")
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
