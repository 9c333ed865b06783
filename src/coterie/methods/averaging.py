"""Local fine-tuning and federated averaging, the two ends that every method is compared with.

Both train two sets of LoRA pairs on every MLP whose outputs are averaged, so that they have as many
trained values as a mixture of two experts (CoMiGS, arXiv 2409.13931, section 4.1).
"""

from typing import ClassVar, Literal

from pydantic import Field

from coterie.adapters import Role
from coterie.methods.lora import LoraMethod, PerClient


class Local(LoraMethod):
    """Every client fine-tunes alone."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "each client alone; nothing travels"
    shares: ClassVar[tuple[Role, ...]] = ()

    generalists: PerClient = 0
    specialists: PerClient = Field(default=2, description="LoRA sets whose outputs are averaged")


class FedAvg(LoraMethod):
    """The server averages everything that is trained; the averaged model is the result."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "arXiv 1602.05629"
    summary: ClassVar[str] = "everything trained is averaged; one model for all"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    generalists: PerClient = Field(default=2, description="LoRA sets whose outputs are averaged")
