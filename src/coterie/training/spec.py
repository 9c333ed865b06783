"""A client's local work, and how models are scored, as a run file describes them."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]

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


class Section(BaseModel):
    """A part of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DPOSpec(Section):
    """Section `training.dpo` of a run file (DPO, arXiv 2305.18290)."""

    beta: PositiveFloat = 0.1
    """strength of the pull towards the reference (beta): reward per nat that an answer is
    likelier than under it"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """assumed share of pairs whose answers are the wrong way round (epsilon of conservative
    DPO)"""
    reference: Annotated[str, Field(min_length=1)] = "base"
    """reference model: base, the base without an adapter; or the folder of an earlier run, for
    each client's model of that run (not in a deployment)"""


class TrainingSpec(Section):
    """Section `training` of a run file; defaults are CoMiGS's (arXiv 2409.13931, appendix)."""

    steps: Count = 10
    """local optimiser steps per round"""
    batch: Count = 64
    """samples per step"""
    micro_batch: Count | None = None
    """samples held in memory at once: a step adds up the gradients of its batch in pieces of
    this size; default: the whole batch"""
    checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a quarter more time"""
    sampling: Literal["replacement", "epochs"] = "replacement"
    """draw each step's samples with replacement, or every sample once per epoch"""
    learning_rate: PositiveFloat = 2e-3
    """highest learning rate: at the first step of the run, or after the warm-up"""
    final_learning_rate: NotNegative = 2e-4
    """learning rate at the last step of a cosine or one-cycle schedule"""
    learning_rates: dict[str, PositiveFloat] = {}
    """learning rates by client name (or `server`), in place of learning_rate;
    initial_learning_rate and final_learning_rate scale with them"""
    schedule: Literal["cosine", "one-cycle", "constant"] | None = None
    """course of the learning rate after the warm-up; one-cycle as in torch's OneCycleLR;
    default: cosine, or constant with learning_rate_decay"""
    warmup: Rate = 0.0
    """fraction of the schedule's steps in which the learning rate rises: linearly, or on a
    cosine with one-cycle"""
    initial_learning_rate: NotNegative | None = None
    """learning rate at the start of the warm-up; default: 0, or learning_rate / 25 with
    one-cycle"""
    restart: bool = False
    """restart the schedule in every round, instead of one for the whole run"""
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """factor by which the learning rate changes every round"""
    reset_optimiser: bool = False
    """reset the optimiser's state at the start of every round"""
    optimiser: OptimiserSpec = OptimiserSpec()
    """name of a torch.optim class, in any case, or a mapping of `name` and its arguments; adamw
    uses the defaults shown for arguments not given"""
    max_grad_norm: PositiveFloat | None = None
    """maximum gradient norm per step, by clipping; default: no clipping"""
    base_dropout: Rate = 0.0
    """rate of all of the base's own dropout layers in training"""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: autocast; adapters and optimiser state stay in fp32, and the base is in the format
    of base.weights"""
    dpo: DPOSpec | None = None
    """how preferences are learnt (data.preferences only); default: with the defaults shown"""

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


class EvaluationSpec(Section):
    """Section `evaluation` of a run file."""

    every: Count | None = None
    """rounds between evaluations, besides the last round; default: last round only"""
    batch: Count = 16
    """windows per evaluation batch; does not affect scores"""
    keep: Literal["best", "last"] = "best"
    """model that each client ends with: that of the round that does best on its validation
    text, round 0 being the base as it came (best), or that of the last round"""
    validation_samples: Count = 128
    """validation samples that choose the best round, evenly spaced, the same in every round"""
    patience: Count | None = None
    """rounds without a gain on its validation text after which a client stops training (with
    keep: best); default: clients train in every round"""
    split: Literal["test", "validation"] = "test"
    """held-out split that models are scored on"""
    generate: Count | None = None
    """maximum tokens per generated answer (instructions and messages only); default: no answers
    are generated"""
    metric: str | None = None
    """metric in tables and plots: perplexity, accuracy, exact_match, rouge_l, reward_accuracy, or
    one from a plugin; default: accuracy if answers are chosen from a list, else rouge_l if they are
    generated, reward_accuracy of preferences, else perplexity"""

    @model_validator(mode="after")
    def _settles(self) -> Self:
        if self.patience is not None and self.keep == "last":
            raise ValueError(
                "`patience` stops clients whose best model is found; it needs keep: best"
            )
        return self
