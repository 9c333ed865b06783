"""What is attached to a frozen base and trained: low-rank experts, their router, dense LoRA."""

from coterie.adapters.adapter import Adapter, detach, first_experts
from coterie.adapters.layout import Layout, Role
from coterie.adapters.lora import LoraLinear, LoraPair, Part, initialise
from coterie.adapters.mixture import Balance, Mixture

__all__ = [
    "Adapter",
    "Balance",
    "Layout",
    "LoraLinear",
    "LoraPair",
    "Mixture",
    "Part",
    "Role",
    "detach",
    "first_experts",
    "initialise",
]
