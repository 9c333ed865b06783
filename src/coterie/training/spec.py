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


class DPOSpec(BaseModel):
    """Section `training.dpo` of a run file (DPO, arXiv 2305.18290)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    beta: float = Field(
        default=0.1,
        gt=0,
        description="strength of the pull towards the reference (beta): reward per nat that an "
        "answer is likelier than under it",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs whose answers are the wrong way round (epsilon of "
        "conservative DPO)",
    )
    reference: str = Field(
        default="base",
        min_length=1,
        description="reference model: base, the base without an adapter; or the folder of an "
        "earlier run, for each client's model of that run (not in a deployment)",
    )


class TrainingSpec(BaseModel):
    """Section `training` of a run file; defaults are CoMiGS's (arXiv 2409.13931, appendix)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=10, ge=1, description="local optimiser steps per round")
    batch: int = Field(default=64, ge=1, description="samples per step")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples held in memory at once: a step adds up the gradients of its batch "
        "in pieces of this size; default: the whole batch",
    )
    checkpointing: bool = Field(
        default=False,
        description="recompute activations in the backward pass: less memory, about a "
        "quarter more time",
    )
    sampling: Literal["replacement", "epochs"] = Field(
        default="replacement",
        description="draw each step's samples with replacement, or every sample once per epoch",
    )
    learning_rate: float = Field(
        default=2e-3,
        gt=0,
        description="highest learning rate: at the first step of the run, or after the warm-up; "
        "a cosine of a single step has final_learning_rate",
    )
    final_learning_rate: float = Field(
        default=2e-4,
        ge=0,
        description="learning rate at the last step of a cosine or one-cycle schedule",
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="learning rates by client name (or `server`), in place of learning_rate; "
        "initial_learning_rate and final_learning_rate scale with them",
    )
    schedule: Literal["cosine", "one-cycle", "constant"] | None = Field(
        default=None,
        description="course of the learning rate after the warm-up; one-cycle as in torch's "
        "OneCycleLR; default: cosine, or constant with learning_rate_decay",
    )
    warmup: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="fraction of the schedule's steps in which the learning rate rises: linearly, "
        "or on a cosine with one-cycle",
    )
    initial_learning_rate: float | None = Field(
        default=None,
        ge=0,
        description="learning rate at the start of the warm-up; default: 0, or "
        "learning_rate / 25 with one-cycle",
    )
    restart: bool = Field(
        default=False,
        description="restart the schedule in every round, instead of one for the whole run",
    )
    learning_rate_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="factor by which the learning rate changes every round",
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
    base_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="rate of all of the base's own dropout layers in training",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16",
        description="bf16: autocast; adapters and optimiser state stay in fp32, and the base is in "
        "the format of base.weights",
    )

    dpo: DPOSpec | None = Field(
        default=None,
        description="how preferences are learnt (data.preferences only); default: with the "
        "defaults shown",
    )

    @model_validator(mode="after")
    def _schedule_is_one(self) -> Self:
        """Refuse schedules that contradict each other, and keys that would do nothing."""
        course = self.course
        if self.learning_rate_decay is not None and course != "constant":
            raise ValueError(
                f"learning_rate_decay and `schedule: {course}` are mutually exclusive; remove one"
            )
        if course == "one-cycle" and not self.warmup:
            raise ValueError("`schedule: one-cycle` needs a warm-up; set warmup, such as 0.3")
        if self.initial_learning_rate is not None and not self.warmup:
            raise ValueError("initial_learning_rate has no effect without warmup; set warmup")
        if self.restart and course == "constant" and not self.warmup:
            raise ValueError("restart has no effect on a constant learning rate; remove it")
        return self

    @property
    def course(self) -> Literal["cosine", "one-cycle", "constant"]:
        """The schedule, whether given or not."""
        return self.schedule or ("cosine" if self.learning_rate_decay is None else "constant")

    @property
    def at_once(self) -> int:
        """Samples that a forward pass reads at most."""
        return min(self.batch, self.micro_batch or self.batch)

    def of(self, name: str) -> "TrainingSpec":
        """A client's, or the server's: with a learning rate of its own and without
        `learning_rates`."""
        own, initial = self.learning_rates.get(name, self.learning_rate), self.initial_learning_rate
        scale = own / self.learning_rate
        return self.model_copy(
            update={
                "learning_rate": own,
                "initial_learning_rate": None if initial is None else initial * scale,
                "final_learning_rate": self.final_learning_rate * scale,
                "learning_rates": {},
            }
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
        description="model that each client ends with: that of the round that does best on its "
        "validation text, round 0 being the base as it came (best), or that of the last round",
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
        description="rounds without a gain on its validation text after which a client stops "
        "training (with keep: best); default: clients train in every round",
    )
    split: Literal["test", "validation"] = Field(
        default="test", description="held-out split that models are scored on"
    )
    generate: int | None = Field(
        default=None,
        ge=1,
        description="maximum tokens per generated answer (instructions and messages only); "
        "default: no answers are generated",
    )
    metric: (
        Literal["perplexity", "accuracy", "exact_match", "rouge_l", "reward_accuracy"] | None
    ) = Field(
        default=None,
        description="metric in tables and plots; default: accuracy if answers are chosen from "
        "a list, else rouge_l if they are generated, reward_accuracy of preferences, else "
        "perplexity",
    )

    @model_validator(mode="after")
    def _settles(self) -> Self:
        if self.patience is not None and self.keep == "last":
            raise ValueError(
                "`patience` stops clients whose best model is found; it needs keep: best"
            )
        return self
