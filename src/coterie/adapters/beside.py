"""Low-rank experts in parallel to a linear layer, or to a block that is no MLP of a known shape.

    y = block(x) + g sum_i w_i B_i A_i x

The expert i has the factors A_i and B_i and the router's weight w_i; g is a scaling factor. The
block may be a linear layer, or any module that maps hidden states to hidden states, such as a
mixture of experts or a state-space block. The router is the same as for experts inside an MLP.
"""

from typing import Any

import torch
from torch import Tensor, nn

from coterie.adapters.layout import Layout
from coterie.adapters.routed import Routed
from coterie.bases.sites import Linear, sizes, working_dtype

BLOCK = "block"


class Beside(Routed):
    """A block of the base that runs in parallel with low-rank experts.

    The block and the experts have the same input, and their outputs are added.

    Args:
        base: The block.
        path: Path of the block in the base.
        dim: Width of hidden states; not used for linear layers, which have widths of their own.
        layout: The layout, which sets the numbers of experts, the ranks and the routing.
    """

    def __init__(self, base: nn.Module, path: str, dim: int, layout: Layout) -> None:
        shape = sizes(base) if isinstance(base, Linear) else (dim, dim)
        places = {BLOCK: (path, shape, next(base.parameters()))}
        super().__init__(base, path, layout, places)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block and add the experts' output to the block's output.

        If the block returns a tuple, the experts' output is added to the tuple's first element.

        Args:
            hidden_states: The input of the block and of the experts, (..., in).
            *args: Further arguments of the block.
            **kwargs: Further arguments of the block.
        """
        out = self.base(hidden_states, *args, **kwargs)
        y, *more = out if isinstance(out, tuple) else (out,)
        tokens = hidden_states.flatten(0, -2)
        weights, choice = self._route(tokens)
        tokens = tokens.to(working_dtype(hidden_states))
        As, Bs = self._factors(BLOCK)
        A = torch.cat(As).to(tokens.dtype)
        low = self._low(tokens, A).unflatten(1, (len(self.roles), -1))
        # (tokens, n, 1): the weight of each expert for each token, 0 for unchosen experts.
        shares = weights.transpose(0, 1) if choice is None else (weights * choice).sum(0)[..., None]
        B = torch.cat(Bs, dim=1).to(low.dtype)
        low = (low * shares.to(low.dtype)).flatten(1)
        y = y + (self.gain * (low @ B.t())).view(y.shape)
        return (y, *more) if isinstance(out, tuple) else y
