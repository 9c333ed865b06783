"""What is attached to a frozen base and trained: low-rank experts, their router, dense LoRA."""

from coterie.adapters.adapter import Adapter, Trainable, attach, detach, first_experts
from coterie.adapters.amole import (
    AmoleAdapter,
    AmoleLayout,
    AmoleLinear,
    Recording,
)
from coterie.adapters.layout import Layout, Role
from coterie.adapters.lora import LoraLinear, LoraPair
from coterie.adapters.merging import merge, mergeable
from coterie.adapters.mixture import Mixture
from coterie.adapters.part import Part, initialise, pairs_of
from coterie.adapters.routed import Balance

__all__ = [
    "Adapter",
    "AmoleAdapter",
    "AmoleLayout",
    "AmoleLinear",
    "Balance",
    "Layout",
    "LoraLinear",
    "LoraPair",
    "Mixture",
    "Part",
    "Recording",
    "Role",
    "Trainable",
    "attach",
    "detach",
    "first_experts",
    "initialise",
    "merge",
    "mergeable",
    "pairs_of",
]
