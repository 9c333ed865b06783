"""CoMiGS' mixture of generalist and specialist experts on an MLP (arXiv 2409.13931, section 3).

The published code runs one full MLP per expert. Here, each product with a frozen weight is computed
only once, whatever the number of experts, with the same result. For experts i with the router's
weights w_i and a scaling factor g:

    z_i = act(W1 x + b1 + g B1_i A1_i x)
    y   = W2 (sum_i w_i z_i) + b2 + g sum_i w_i B2_i A2_i z_i

In a gated MLP, z_i is multiplied by the output of a second layer: Wu x + g Bu_i Au_i x.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.activations import native
from coterie.adapters.dropout import drops, mask_like
from coterie.adapters.fused import WideExperts, stores_activations
from coterie.adapters.layout import Layout
from coterie.adapters.routed import Place, Routed
from coterie.bases.sites import Linear, MlpShape, StandIn, children_of, sizes, working_dtype


class Mixture(Routed):
    """An MLP with low-rank experts on all of its linear layers.

    Args:
        base: The module that contains the MLP's layers.
        path: Path of the module `base` in the pretrained model.
        shape: Structure of the MLP, which includes the names of the MLP's layers.
        layout: The layout, which sets the numbers of experts, the ranks and the routing.
        ahead: A mapping from the names of the MLP's modules to stand-ins. If the MLP is a module of
            its own, the mapping is empty. If the MLP's layers belong directly to a decoder layer
            (as in OPT), the mapping contains a stand-in for each module of the MLP except the last
            layer. The mixture then replaces only the last layer.
    """

    def __init__(
        self,
        base: nn.Module,
        path: str,
        shape: MlpShape,
        layout: Layout,
        ahead: "Mapping[str, Passed]",
    ) -> None:
        places: dict[str, Place] = {}
        for name in shape.linears:
            linear = cast(Linear, children_of(base)[name])
            places[name] = f"{path}.{name}", sizes(linear), linear.weight
        super().__init__(base, path, layout, places)
        self.shape, self._ahead = shape, ahead
        self.fixed: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] | None = None
        """The results of `_joined`, by its arguments; None while the factors may change."""
        # Falcon-H1 multiplies the gate and the output of its MLPs by constants.
        self._gate, self._out = (
            getattr(base, name, 1.0) for name in ("gate_multiplier", "down_multiplier")
        )

    def _base_module(self, name: str) -> Any:
        """Return the frozen MLP's module with the given name."""
        if not self._ahead:
            return getattr(self.base, name)
        return self._ahead[name].base if name in self._ahead else self.base

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map (..., dim) to (..., dim).

        Args:
            x: (..., dim), the input.
            residual: (..., dim), a tensor that is added to the output. It is None unless the model
                passes a residual to its MLPs.
        """
        tokens = x.flatten(0, -2)
        weights, choice = self._route(tokens)
        dtype = working_dtype(x)
        tokens, weights = tokens.to(dtype), weights.to(dtype)
        if choice is not None:
            choice = choice.to(dtype)
        up = [t for name in self.shape.up for t in self._upward(name, tokens, choice)]
        A, B = self._joined(self.shape.down, dtype)
        act = native(self._base_module(self.shape.act))
        masks = None
        if drops(self.dropout):
            masks = mask_like(up[0].new_empty(self.slots, *up[0].shape), self.dropout)
        stores = stores_activations.get()
        wide = WideExperts.apply(act, self.gain, stores, weights, A, masks, *up)
        total, low = cast(tuple[Tensor, Tensor], wide)
        y = self._down(total, weights)
        y = torch.addmm(y, self._from_slots(low, choice), B.t(), alpha=self.gain).view(x.shape)
        y = self._final_dropout(y if self._out == 1 else y * self._out)
        return y if residual is None else residual + y

    def _upward(self, name: str, tokens: Tensor, choice: Tensor | None) -> Iterator[Tensor]:
        """Yield the tensors u, h and B of an up-projection, which are arguments of `WideExperts`.

        For a fused up-projection, three tensors are yielded for the gate, followed by three tensors
        for the values that the gate multiplies.
        """
        A, B = self._joined(name, tokens.dtype)
        u, h = self._base_module(name)(tokens), self._to_slots(self._low(tokens, A), choice)
        if name == self.shape.up[0] and self._gate != 1:
            u, h = u * self._gate, h * self._gate
        pieces = 2 if self.shape.fused else 1
        for wide, factor in zip(u.chunk(pieces, dim=1), B.chunk(pieces, dim=1), strict=True):
            yield from (wide, h, factor)

    def _joined(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of a layer's pairs, joined over experts or stacked over slots.

        Returns:
            For an up-projection, A shaped (n*r, in) and one B per slot; see `_per_slot`. For the
            down-projection, one A per slot and B shaped (out, n*r).
        """
        if self.fixed is not None and (name, dtype) in self.fixed:
            return self.fixed[name, dtype]
        As, Bs = self._factors(name)
        if name == self.shape.down:
            A, B = self._per_slot(As, dim=0), torch.cat(Bs, dim=1)
        else:
            A, B = torch.cat(As), self._per_slot(Bs, dim=1)
        joined = A.to(dtype), B.to(dtype)
        if self.fixed is not None:
            self.fixed[name, dtype] = joined
        return joined

    def _final_dropout(self, y: Tensor) -> Tensor:
        """Apply the MLP's final dropout, if the MLP has a final dropout.

        The MLP may store its final dropout as a module or as a rate.
        """
        for name in self.shape.dropouts:
            module_or_rate = getattr(self.base, name, None)
            if isinstance(module_or_rate, nn.Dropout):
                y = module_or_rate(y)
            elif module_or_rate is not None:
                y = F.dropout(y, module_or_rate, self.base.training)
        return y

    def _down(self, total: Tensor, weights: Tensor) -> Tensor:
        """Apply the frozen down-projection to the weighted sum of the slots' activations.

        The bias is multiplied by the sum of a token's routing weights. This sum is 1, unless each
        token uses only one of several experts.

        Args:
            total: The weighted sum, shaped (tokens, wide).
            weights: The routing weights of the slots, shaped (k, tokens, 1).
        """
        down = self._base_module(self.shape.down)
        y = down(total)
        if self.slots == 1 and self.balances and down.bias is not None:
            y = y + (weights[0] - 1) * down.bias.to(y.dtype)  # with k > 1, weights sum to 1
        return y

    # If every token uses all experts, slot s is expert s with its own pair. Otherwise, a slot has
    # the pairs of all experts side by side, and the factors of unchosen experts are zero: dense
    # products of n*r columns are cheaper than gathering the tokens of each expert.

    def _per_slot(self, matrices: list[Tensor], dim: int) -> Tensor:
        """Convert a list of matrices, one per expert, to a tensor that stacks one matrix per slot.

        A token has one slot for each expert that processes it. If every token uses all experts,
        the matrix of slot s is that of expert s. Otherwise, all slots have the same matrix, the
        concatenation of all experts' matrices. The slots are dimension 0 of the tensor.

        Args:
            matrices: The A or the B of each expert.
            dim: Index of the dimension whose size is the rank: 0 for A, 1 for B.
        """
        if not self.balances:
            return torch.stack(matrices)
        joined = torch.cat(matrices, dim)
        return joined.expand(self.slots, *joined.shape)

    def _to_slots(self, low: Tensor, choice: Tensor | None) -> Tensor:
        """Convert the products of all n experts, shaped (tokens, n*r), to one product per slot.

        Args:
            low: The products of the tokens with each expert's A, concatenated.
            choice: The one-hot choices of experts, shaped (k, tokens, n). None if the number k of
                slots equals n.

        Returns:
            A tensor shaped (k, tokens, r) if k = n. Otherwise, the tensor is shaped
            (k, tokens, n*r) and contains zeros for the experts that a slot does not use.
        """
        per_expert = low.unflatten(1, (len(self.roles), -1))
        if choice is None:
            return per_expert.transpose(0, 1)
        return (per_expert * choice.unsqueeze(-1)).flatten(2)

    def _from_slots(self, low: Tensor, choice: Tensor | None) -> Tensor:
        """Convert one product per slot back to the products of all n experts.

        Args:
            low: The products of the slots, with the shape that `_to_slots` returns.
            choice: The argument `choice` of `_to_slots`.

        Returns:
            A tensor shaped (tokens, n*r).
        """
        if choice is None:
            return low.transpose(0, 1).flatten(1)
        return (low.unflatten(2, (len(self.roles), -1)) * choice.unsqueeze(-1)).sum(0).flatten(1)


class Passed(StandIn):
    """A stand-in that returns its input.

    In some models (such as OPT), the MLP's layers belong directly to a decoder layer. A mixture
    replaces the last of these layers and computes the whole MLP. Instances of this class replace
    the other modules of the MLP, so that the mixture receives the MLP's input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x
