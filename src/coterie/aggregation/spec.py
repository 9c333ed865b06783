"""How uploads become one, as a run file describes it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AggregationSpec(BaseModel):
    """Section `aggregation` of a run file: how uploads become one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Literal["uniform", "tokens"] = Field(
        default="uniform", description="weights of clients in means: equal, or by training tokens"
    )
