"""FedIT (arXiv 2305.05644): federated instruction tuning is the mean of everybody's LoRA.

One low-rank pair stands on each query and value projection. The server averages A and B.
"""

from typing import ClassVar, Literal

from coterie.adapters import Role
from coterie.bases.sites import QUERY_VALUE
from coterie.methods.adapter import AdapterMethod, fine_tuned
from coterie.methods.settings import Attention, Lora


class FedIT(AdapterMethod):
    """Federated averaging of attention's pairs; the averaged model is the result."""

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "arXiv 2305.05644"
    summary: ClassVar[str] = "one LoRA pair on queries and values averaged; one model for all"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shared_roles: ClassVar[tuple[Role, ...]] = ("dense",)

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: Lora = Lora(scale="rank")


PRESETS = fine_tuned("fedit")
