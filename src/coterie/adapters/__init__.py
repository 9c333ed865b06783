"""What is attached to a frozen base and trained: low-rank experts, their router, dense LoRA."""

from coterie.adapters.adapter import Adapter, Trainable, detach, first_experts
from coterie.adapters.amole import AmoleAdapter, AmoleLayout
from coterie.adapters.layout import Layout, Role
from coterie.adapters.lora import LoraLinear
from coterie.adapters.merging import merge, mergeable
from coterie.adapters.mixture import Mixture
from coterie.adapters.part import Part, pairs_of

__all__ = [
    "Adapter",
    "AmoleAdapter",
    "AmoleLayout",
    "Layout",
    "LoraLinear",
    "Mixture",
    "Part",
    "Role",
    "Trainable",
    "detach",
    "first_experts",
    "merge",
    "mergeable",
    "pairs_of",
]
