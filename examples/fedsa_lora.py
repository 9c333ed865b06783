"""FedSA-LoRA (Guo et al., arXiv 2410.01463): every A is averaged, every B stays with its client."""

from typing import ClassVar

from coterie.adapters import Parameter
from coterie.methods.adapter import AdapterMethod
from coterie.methods.settings import Attention, Lora


class FedSALora(AdapterMethod):
    """A learns what clients have in common, and B what is a client's own."""

    name: ClassVar[str] = "fedsa-lora"
    paper: ClassVar[str] = "arXiv 2410.01463"
    summary: ClassVar[str] = "A of attention's pairs is averaged; B stays"

    attention: Attention = Attention(targets="q_proj|v_proj|c_attn")
    lora: Lora = Lora(scale="rank")

    def shared(self, parameter: Parameter) -> bool:
        """Return True for every A."""
        return parameter.factor == "A"
