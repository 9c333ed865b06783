"""FedIT (arXiv 2305.05644): federated instruction tuning is the mean of everybody's LoRA.

One low-rank pair stands on each query and value projection; GPT-2 has both in one layer, with the
keys. The server averages A and B.
"""

from typing import ClassVar, Literal

from pydantic import Field

from coterie.adapters import Role
from coterie.methods.lora import LoraMethod, PerClient


class FedIT(LoraMethod):
    """Federated averaging of attention's pairs; the averaged model is the result."""

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "arXiv 2305.05644"
    summary: ClassVar[str] = "one LoRA pair on queries and values, averaged; one model for all"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shares: ClassVar[tuple[Role, ...]] = ("dense",)

    generalists: PerClient = Field(default=0, description="experts on MLPs; the paper has none")
    attention_rank: int = Field(default=8, ge=1, description="r of the pairs")
    targets: str | None = Field(
        default="q_proj|v_proj|c_attn", description="which linear layers have a pair"
    )
    scale: Literal["sqrt", "rank"] = "rank"


class FedITFT(FedIT):
    """FedIT, then fine-tuning: the result is the model after local training."""

    name: ClassVar[str] = "fedit-ft"
    summary: ClassVar[str] = "as fedit; the result is each client's model after local training"
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"
