"""A client's local work as a run file describes it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
    decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="in place of the cosine: the rate's factor from round to round",
    )
    fresh_optimiser: bool = Field(
        default=False, description="AdamW forgets its moments at the start of every round"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's moments")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's, decoupled")
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="bf16: autocast, with weights and optimiser in fp32"
    )
