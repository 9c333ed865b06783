"""Low-rank experts beside a block, for blocks that are no MLP of a known shape.

    y = block(x) + g sum_i w_i B_i A_i x

The block may be any module that maps hidden states to hidden states, such as a mixture of experts
or a state-space block. The router is the same as for experts inside an MLP.
"""

from typing import Any

import torch
from torch import Tensor, nn

from coterie.adapters.layout import Layout
from coterie.adapters.routed import Routed
from coterie.bases.sites import working_dtype

BLOCK = "block"


class Beside(Routed):
    """A block with low-rank experts beside it.

    Args:
        base: The block.
        path: Path of the block in the base.
        dim: Width of hidden states.
        layout: Numbers of experts, ranks and routing.
    """

    def __init__(self, base: nn.Module, path: str, dim: int, layout: Layout) -> None:
        places = {BLOCK: (path, (dim, dim), next(base.parameters()))}
        super().__init__(base, path, layout, places)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block and add the experts' output to its (first) output.

        Args:
            hidden_states: (..., dim).
            *args: Further arguments of the block.
            **kwargs: Further arguments of the block.
        """
        out = self.base(hidden_states, *args, **kwargs)
        y, *more = out if isinstance(out, tuple) else (out,)
        tokens = hidden_states.flatten(0, -2)
        weights, choice = self._route(tokens)
        tokens = tokens.to(working_dtype(hidden_states))
        As, Bs = self._factors(BLOCK)
        low = self._low(tokens, As).unflatten(1, (len(self.roles), -1))
        # (tokens, n, 1): each expert's weight, 0 where it is not chosen.
        shares = weights.transpose(0, 1) if choice is None else (weights * choice).sum(0)[..., None]
        B = torch.cat(Bs, dim=1).to(low.dtype)
        low = (low * shares.to(low.dtype)).flatten(1)
        y = y + (self.gain * (low @ B.t())).view(y.shape)
        return (y, *more) if isinstance(out, tuple) else y
