"""CoMiGS' mixture of generalist and specialist experts on an MLP (arXiv 2409.13931, section 3).

The published code runs one full MLP per expert. Here each frozen product is computed once,
whatever the number of experts, and the result is the same:

    z_i = act(W1 x + b1 + g B1_i A1_i x)                    (gated: times Wu x + g Bu_i Au_i x)
    y   = W2 (sum_i w_i z_i) + b2 + g sum_i w_i B2_i A2_i z_i
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.activations import native
from coterie.adapters.dropout import drops, mask_like
from coterie.adapters.fused import WideExperts
from coterie.adapters.layout import Layout
from coterie.adapters.routed import Place, Routed
from coterie.bases.sites import Linear, MlpShape, StandIn, children_of, sizes, working_dtype


class Mixture(Routed):
    """An MLP with low-rank experts on all of its linear layers.

    Args:
        base: the module that has the MLP's layers.
        home: its path.
        shape: which of its layers are the MLP's.
        layout: which experts.
        ahead: where the layers are a decoder layer's own, what stands in for all but the last, by
            name; the mixture itself stands in for that.
    """

    def __init__(
        self,
        base: nn.Module,
        home: str,
        shape: MlpShape,
        layout: Layout,
        ahead: "Mapping[str, Passed]",
    ) -> None:
        places: dict[str, Place] = {}
        for name in shape.linears:
            linear = cast(Linear, children_of(base)[name])
            places[name] = f"{home}.{name}", sizes(linear), linear.weight
        super().__init__(base, home, layout, places)
        self.shape, self._ahead = shape, ahead
        # Falcon-H1's MLPs multiply by constants.
        self._gate, self._out = (
            getattr(base, name, 1.0) for name in ("gate_multiplier", "down_multiplier")
        )

    def _of_base(self, name: str) -> Any:
        """A part of the frozen MLP."""
        if not self._ahead:
            return getattr(self.base, name)
        return self._ahead[name].base if name in self._ahead else self.base

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: (..., dim) to (..., dim); a residual, where the MLP is given one, is added."""
        tokens = x.flatten(0, -2)
        weights, choice = self._route(tokens)
        dtype = working_dtype(x)
        tokens, weights = tokens.to(dtype), weights.to(dtype)
        if choice is not None:
            choice = choice.to(dtype)
        up = [t for name in self.shape.up for t in self._upward(name, tokens, choice)]
        As, Bs = self._factors(self.shape.down)
        A = self._per_slot(As, dim=0).to(dtype)
        act = native(self._of_base(self.shape.act))
        masks = None
        if drops(self.dropout):
            masks = mask_like(up[0].new_empty(self.slots, *up[0].shape), self.dropout)
        wide = WideExperts.apply(act, self.gain, weights, A, masks, *up)
        total, low = cast(tuple[Tensor, Tensor], wide)
        y = self._down(total, weights)
        B = torch.cat(Bs, dim=1).to(dtype)
        y = torch.addmm(y, self._from_slots(low, choice), B.t(), alpha=self.gain).view(x.shape)
        y = self._own_dropout(y if self._out == 1 else y * self._out)
        return y if residual is None else residual + y

    def _upward(self, name: str, tokens: Tensor, choice: Tensor | None) -> Iterator[Tensor]:
        """Of an upward layer what `WideExperts` is given: u, h, B; of a fused one that twice."""
        As, Bs = self._factors(name)
        u, h = self._of_base(name)(tokens), self._to_slots(self._low(tokens, As), choice)
        if name == self.shape.up[0] and self._gate != 1:
            u, h = u * self._gate, h * self._gate
        B = self._per_slot(Bs, dim=1).to(h.dtype)
        pieces = 2 if self.shape.fused else 1
        for wide, factor in zip(u.chunk(pieces, dim=1), B.chunk(pieces, dim=1), strict=True):
            yield from (wide, h, factor)

    def _own_dropout(self, y: Tensor) -> Tensor:
        """The dropout that ends some MLPs: a module, or a rate."""
        for name in self.shape.dropouts:
            own = getattr(self.base, name, None)
            if isinstance(own, nn.Dropout):
                y = own(y)
            elif own is not None:
                y = F.dropout(y, own, self.base.training)
        return y

    def _down(self, total: Tensor, weights: Tensor) -> Tensor:
        """The base's way down, of (tokens, hidden); its bias is weighed as the experts are."""
        down = self._of_base(self.shape.down)
        y = down(total)
        if self.slots == 1 and self.balances and down.bias is not None:
            y = y + (weights[0] - 1) * down.bias.to(y.dtype)  # weights of several sum to 1
        return y

    # Where all experts work on every token, slot s is expert s with its own pair. Otherwise a
    # slot sees the pairs of all experts side by side, and those not chosen count zero: dense
    # products of n*r columns are cheaper than gathering each expert's tokens.

    def _per_slot(self, matrices: list[Tensor], dim: int) -> Tensor:
        """One matrix per slot from one per expert, joined along its rank."""
        if not self.balances:
            return torch.stack(matrices)
        joined = torch.cat(matrices, dim)
        return joined.expand(self.slots, *joined.shape)

    def _to_slots(self, low: Tensor, choice: Tensor | None) -> Tensor:
        """(tokens, n*r) to (k, tokens, r), or to (k, tokens, n*r) with zeros."""
        per_expert = low.unflatten(1, (len(self.roles), -1))
        if choice is None:
            return per_expert.transpose(0, 1)
        return (per_expert * choice.unsqueeze(-1)).flatten(2)

    def _from_slots(self, low: Tensor, choice: Tensor | None) -> Tensor:
        """The way back, summed over slots: to (tokens, n*r)."""
        if choice is None:
            return low.transpose(0, 1).flatten(1)
        return (low.unflatten(2, (len(self.roles), -1)) * choice.unsqueeze(-1)).sum(0).flatten(1)


class Passed(StandIn):
    """Stands where an MLP begins whose work a mixture does that stands where it ends."""

    def forward(self, x: Tensor) -> Tensor:
        """x, unchanged."""
        return x
