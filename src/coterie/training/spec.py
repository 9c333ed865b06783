"""A client's local work, and how models are scored, as a run file describes them."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
"""What adamw has where a run file does not say otherwise; others have torch's defaults."""


class OptimiserSpec(BaseModel):
    """Key `training.optimiser` of a run file: the name of a class of `torch.optim`, in any case.

    Or a mapping of `name` and that class's own keyword arguments. The learning rate is not among
    them: it has a schedule. Whether the class takes them, `optimiser.check` says.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """A name alone is a mapping, too; names are in lower case and numbers are numbers."""
        values = {"name": values} if isinstance(values, str) else values
        if not isinstance(values, Mapping):
            raise ValueError("give a name, such as sgd, or a mapping of `name` and its settings")
        name = str(values.get("name", "adamw")).lower()
        given = {str(key): _read(value) for key, value in values.items() if key != "name"}
        return {"name": name, **(ADAMW if name == "adamw" else {}), **given}

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments, without the learning rate."""
        return dict(self.model_extra or {})


def _read(value: Any) -> Any:
    """A value of YAML, in which 1e-8 is text, as torch takes it."""
    if isinstance(value, list | tuple):
        return tuple(map(_read, value))
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


class TrainingSpec(BaseModel):
    """Section `training` of a run file; defaults are CoMiGS's (arXiv 2409.13931, appendix)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=10, ge=1, description="local optimiser steps per round")
    batch: int = Field(default=64, ge=1, description="samples per step")
    learning_rate: float = Field(
        default=2e-3, gt=0, description="learning rate at the first step of the run"
    )
    final_learning_rate: float = Field(
        default=2e-4,
        ge=0,
        description="learning rate at the last step, reached on a cosine schedule",
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="learning rates by client name (or `server`), in place of learning_rate; "
        "final_learning_rate scales with them",
    )
    learning_rate_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="factor by which the learning rate changes every round, in place of the "
        "cosine schedule",
    )
    reset_optimiser: bool = Field(
        default=False, description="reset the optimiser's state at the start of every round"
    )
    optimiser: OptimiserSpec = Field(
        default=OptimiserSpec(),
        description="name of a torch.optim class, in any case, or a mapping of `name` and its "
        "arguments; adamw uses the defaults shown for arguments not given",
    )
    max_grad_norm: float | None = Field(
        default=None,
        gt=0,
        description="maximum gradient norm per step, by clipping; default: no clipping",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="bf16: autocast, with fp32 weights and optimiser state"
    )

    def of(self, name: str) -> "TrainingSpec":
        """A client's, or the server's: with a learning rate of its own and without
        `learning_rates`."""
        own = self.learning_rates.get(name, self.learning_rate)
        final = self.final_learning_rate * (own / self.learning_rate)
        return self.model_copy(
            update={"learning_rate": own, "final_learning_rate": final, "learning_rates": {}}
        )


class EvaluationSpec(BaseModel):
    """Section `evaluation` of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int | None = Field(
        default=None,
        ge=1,
        description="rounds between evaluations, besides the last round; default: last round only",
    )
    batch: int = Field(
        default=16, ge=1, description="windows per evaluation batch; does not affect scores"
    )
    keep: Literal["best", "last"] = Field(
        default="best",
        description="model that each client ends with: that of the round with the lowest "
        "validation loss, round 0 being the base as it came (best), or that of the last round",
    )
    validation_samples: int = Field(
        default=128,
        ge=1,
        description="validation samples that choose the best round, evenly spaced, the same in "
        "every round",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="rounds without a lower validation loss after which a client stops training "
        "(with keep: best); default: clients train in every round",
    )
    split: Literal["test", "validation"] = Field(
        default="test", description="held-out split that models are scored on"
    )
    generate: int | None = Field(
        default=None,
        ge=1,
        description="maximum tokens per generated answer (instructions only); default: no "
        "answers are generated",
    )
    metric: Literal["perplexity", "accuracy", "exact_match", "rouge_l"] | None = Field(
        default=None,
        description="metric in tables and plots; default: accuracy if answers are chosen from "
        "a list, else rouge_l if they are generated, else perplexity",
    )

    @model_validator(mode="after")
    def _settles(self) -> Self:
        if self.patience is not None and self.keep == "last":
            raise ValueError(
                "`patience` stops clients whose best model is found; it needs keep: best"
            )
        return self
