"""A client's local work, and how models are scored, as a run file describes them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.training.optimiser import OptimiserSpec


class TrainingSpec(BaseModel):
    """Section `training` of a run file; defaults are CoMiGS's (arXiv 2409.13931, appendix)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=10, ge=1, description="local optimiser steps in a round")
    batch: int = Field(
        default=64, ge=1, description="samples in a step, each of data.window tokens"
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="at the first step of the run")
    final_learning_rate: float = Field(
        default=2e-4, ge=0, description="at its last step; a cosine leads from one to the other"
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="by client, or `server`: a learning rate in place of learning_rate, with which"
        " the final one scales",
    )
    learning_rate_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="in place of the cosine: the rate's factor from round to round",
    )
    reset_optimiser: bool = Field(
        default=False, description="the optimiser forgets its moments at the start of every round"
    )
    optimiser: OptimiserSpec = Field(
        default=OptimiserSpec(),
        description="a class of torch.optim, by its name in any case, or a mapping of `name` and"
        " that class's own settings; adamw, also if unnamed, has these where none are given",
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="largest norm of a step's gradient; a longer one is scaled"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="bf16: autocast, with weights and optimiser in fp32"
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
        default=None, ge=1, description="rounds between evaluations; the last always"
    )
    batch: int = Field(default=16, ge=1, description="windows at once; does not change the result")
    split: Literal["test", "validation"] = Field(
        default="test", description="the held-out text that models are scored on"
    )
    generate: int | None = Field(
        default=None,
        ge=1,
        description="of instructions: models write answers too, of so many tokens at most",
    )
    metric: Literal["perplexity", "accuracy", "exact_match", "rouge_l"] | None = Field(
        default=None,
        description="what tables and plots show; default: accuracy where answers are chosen from a"
        " list, else rouge_l where they are written, else perplexity",
    )
