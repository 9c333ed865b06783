"""Sections `training` and `evaluation` of a run file."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from coterie.data.general import GeneralText
from coterie.registry import NamedSpec, Section

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
"""Default arguments of adamw; other optimisers have torch's defaults."""


class OptimiserSpec(NamedSpec):
    """Key `training.optimiser` of a run file.

    The value is the name of a class of `torch.optim` (case-insensitive), or a mapping of `name`
    and keyword arguments of the class. The learning rate is not an argument, because it follows the
    schedule. `optimiser.check` checks the arguments.
    """

    name: str = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        """Expand a name to a mapping.

        The name is converted to lower case, and arguments given as text are converted to numbers
        where possible.
        """
        values = {"name": values} if isinstance(values, str) else values
        if not isinstance(values, Mapping):
            raise ValueError(
                "give a name, such as sgd, or a mapping with the key `name` and one key for each "
                "further setting"
            )
        name = str(values.get("name", "adamw")).lower()
        arguments = {str(key): _converted(v) for key, v in values.items() if key != "name"}
        return {"name": name, **(ADAMW if name == "adamw" else {}), **arguments}


def _converted(value: Any) -> Any:
    """Convert text to numbers where possible (YAML reads 1e-8 as text), and lists to tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_converted, value))
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


class DPOSpec(Section):
    """Section `training.dpo` of a run file (DPO, arXiv 2305.18290)."""

    beta: PositiveFloat = 0.1
    """strength of the regularisation towards the reference model (beta): reward per nat of
    log-probability gained over the reference model"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """assumed fraction of pairs whose answers are swapped (epsilon of conservative DPO)"""
    reference: Annotated[str, Field(min_length=1)] = "base"
    """reference model: base, for the base without an adapter; or the folder of an earlier run, for
    each client's model from that run (not in a deployment)"""


class ReplaySpec(Section):
    """Section `training.replay` of a run file."""

    samples: Count = 4
    """number of general samples per optimiser step, beside the batch"""
    weight: PositiveFloat = 1.0
    """weight of the general samples' divergence from the base, in nats per token, against the
    training loss"""
    max_grad_ratio: PositiveFloat = 0.5
    """maximum norm of the gradient from general samples, as a fraction of the norm of the batch's
    gradient, enforced by shortening"""
    start: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """fraction of the run's steps after which replay begins"""
    text: Literal["list", "sampled"] | tuple[GeneralText, ...] = "list"
    """general samples: list, for the requests and texts that ship with Coterie, with the base's own
    answers; sampled, for texts that the base writes (with plain text, always); or a .jsonl file
    with a field `request` or `text` in each record"""
    digest: str | None = Field(default=None, exclude_if=lambda digest: digest is None)
    """hash of Coterie's list, set by Coterie, so that all machines use the same list"""

    @field_validator("text")
    @classmethod
    def _is_not_empty(cls, text: Any) -> Any:
        if not text:
            raise ValueError("name at least one request or text")
        return text


class TrainingSpec(Section):
    """Section `training` of a run file.

    The defaults are the values in the CoMiGS paper (arXiv 2409.13931, appendix).
    """

    steps: Count = 10
    """number of local optimiser steps per round"""
    batch: Count = 64
    """number of training samples per step"""
    micro_batch: Count | None = None
    """maximum number of samples per forward pass; a step accumulates the gradients of its batch;
    default: the whole batch"""
    checkpointing: bool = False
    """whether to recompute activations in the backward pass, which saves memory and takes about a
    quarter more time"""
    store_activations: bool = False
    """whether the MLPs' experts store their activations for the backward pass instead of
    recomputing them, which takes less time and more memory (not with checkpointing)"""
    sampling: Literal["replacement", "epochs"] = "replacement"
    """sampling of training data: with replacement, or every sample once per epoch"""
    learning_rate: PositiveFloat = 2e-3
    """peak learning rate, reached at the end of the warm-up (without warm-up: at the first step)"""
    final_learning_rate: NotNegative = 2e-4
    """learning rate at the last step of the schedule (cosine and one-cycle only)"""
    learning_rates: dict[str, PositiveFloat] = Field(default={})
    """learning rates that replace learning_rate, by client name (or `server`);
    initial_learning_rate and final_learning_rate are scaled in proportion"""
    schedule: Literal["cosine", "one-cycle", "constant"] | None = None
    """learning rate schedule after the warm-up: half a cosine, PyTorch's OneCycleLR, or constant;
    default: cosine, or constant if learning_rate_decay is set"""
    warmup: Rate = 0.0
    """length of the warm-up as a fraction of the schedule's steps; the learning rate rises linearly
    (with one-cycle: along a cosine)"""
    initial_learning_rate: NotNegative | None = None
    """learning rate at the start of the warm-up; default: 0 (with one-cycle: learning_rate / 25)"""
    restart: bool = False
    """whether to restart the schedule in every round; otherwise, it spans the whole run"""
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """factor that multiplies the learning rate after every round (constant schedule only);
    default: no decay"""
    reset_optimiser: bool = False
    """whether to reset the optimiser's state at the start of every round"""
    optimiser: OptimiserSpec = OptimiserSpec()
    """optimiser: the name of a torch.optim class (case-insensitive), or a mapping of `name` and the
    class's arguments; adamw uses the defaults shown for arguments that are not given"""
    max_grad_norm: PositiveFloat | None = None
    """maximum gradient norm of a step, enforced by clipping; default: no clipping"""
    base_dropout: Rate = 0.0
    """rate of the base's own dropout layers during training"""
    precision: Literal["fp32", "bf16"] | None = None
    """precision of computations: bf16 uses autocast; adapters and optimiser state are always fp32,
    and base.weights sets the format of the base; default: bf16 if the machine that begins the run
    is fast in it, and fp32 otherwise"""
    dpo: DPOSpec | None = None
    """settings of preference optimisation (data.preferences only); default: the defaults shown"""
    gate: bool = True
    """whether requests unlike a client's own are answered by the base, so that nothing is
    forgotten (instructions and messages only, and only with bases that have a chat template of
    their own)"""
    replay: ReplaySpec | Literal[False] = False
    """general samples that keep a model close to its base, so that it forgets less, even where
    there is no gate, as in exports: `true` or settings"""

    @field_validator("replay", mode="before")
    @classmethod
    def _is_on(cls, given: Any) -> Any:
        """Replace `true` by the default settings."""
        return {} if given is True else given

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        """Raise ValueError if keys contradict each other or have no effect."""
        course = self.course
        if self.learning_rate_decay is not None and course != "constant":
            raise ValueError(
                f"learning_rate_decay and `schedule: {course}` are mutually exclusive; remove one"
            )
        if course == "one-cycle" and not self.warmup:
            raise ValueError("`schedule: one-cycle` needs a warm-up; set warmup, for example 0.3")
        if self.initial_learning_rate is not None and not self.warmup:
            raise ValueError("initial_learning_rate has no effect without warmup; set warmup")
        if self.restart and course == "constant" and not self.warmup:
            raise ValueError("restart has no effect on a constant learning rate; remove it")
        if self.checkpointing and self.store_activations:
            raise ValueError(
                "checkpointing and store_activations are mutually exclusive; remove one"
            )
        return self

    @property
    def course(self) -> Literal["cosine", "one-cycle", "constant"]:
        """The name of the schedule, or of the default schedule if the run file sets no schedule."""
        return self.schedule or ("cosine" if self.learning_rate_decay is None else "constant")

    @property
    def at_once(self) -> int:
        """The maximum number of samples in one forward pass."""
        return min(self.batch, self.micro_batch or self.batch)

    def of(self, name: str) -> "TrainingSpec":
        """Return the settings of one client, or of the server.

        If `learning_rates` contains a learning rate for this participant, the result has this rate.
        The initial and final learning rates are then multiplied by the ratio of this rate to the
        run's `learning_rate`. In the result, `learning_rates` is empty.

        Args:
            name: The client's name, or `server`.
        """
        rate = self.learning_rates.get(name, self.learning_rate)
        scale, initial = rate / self.learning_rate, self.initial_learning_rate
        return self.model_copy(
            update={
                "learning_rate": rate,
                "initial_learning_rate": None if initial is None else initial * scale,
                "final_learning_rate": self.final_learning_rate * scale,
                "learning_rates": {},
            }
        )


class EvaluationSpec(Section):
    """Section `evaluation` of a run file."""

    every: Count | None = None
    """number of rounds between evaluations; the last round is always evaluated; default: the last
    round only"""
    batch: Count = 16
    """number of windows per evaluation batch; does not affect scores"""
    keep: Literal["best", "last"] = "best"
    """model that each client ends with. best: the model of the round with the client's best
    validation score (round 0: the untrained base). last: the model of the last round"""
    validation_samples: Count = 128
    """number of validation samples that determine the best round: evenly spaced, and the same in
    every round"""
    patience: Count | None = None
    """number of rounds without a better validation score after which a client stops training
    (`keep: best` only); default: clients train in every round"""
    split: Literal["test", "validation"] = "test"
    """held-out split that models are scored on"""
    generate: Count | None = None
    """maximum length of a generated answer in tokens (instructions and messages only); default: no
    answers are generated"""
    questions: str | None = Field(default=None, exclude_if=lambda file: file is None)
    """.jsonl file with questions (field `question`) that every model of the run answers at the end
    of `coterie run`; if a record has the field `shown`, only the questions with `shown: true`
    (instructions and messages only); does not affect scores; deployments and `coterie compare`
    ignore this key"""
    general: bool = True
    """whether to measure how far models move from their bases on general requests (drift), and, at
    the end of `coterie run`, to ask them general questions (instructions and messages only, and
    only with bases that have a chat template of their own); does not affect scores"""
    metric: str | None = None
    """metric in tables and plots: perplexity, accuracy, exact_match, rouge_l, reward_accuracy, or
    a metric from a plugin; default: accuracy if answers are chosen from a list, else rouge_l if
    answers are generated, reward_accuracy with preferences, else perplexity"""

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.patience is not None and self.keep == "last":
            raise ValueError(
                "patience has no effect with `keep: last`; set `keep: best` or remove patience"
            )
        return self
