"""The published mixture of experts: a full MLP per expert, weighted by the router."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from coterie.adapters import Layout
from coterie.bases.sites import mlp_shape

LAYOUTS = {
    "one": Layout(1, 0, rank=3),
    "two": Layout(1, 1, rank=3),
    "four, top 2": Layout(2, 2, rank=3),
    "four, top 1": Layout(1, 3, rank=3, top_k=1),
    "four, top 4": Layout(1, 3, rank=3, top_k=4, scale="rank"),
    "two, averaged": Layout(0, 2, rank=3, routed=False),
    "four, averaged": Layout(3, 1, rank=3, routed=False),
}


class WithPair(nn.Module):
    """W x + b + g B A (m x) with the matrices given; m is a dropout mask, 1 by default."""

    def __init__(
        self, linear: nn.Module, A: Tensor, B: Tensor, gain: float, mask: Tensor | None = None
    ) -> None:
        super().__init__()
        self.linear, self.A, self.B, self.gain, self.mask = linear, A, B, gain, mask

    def forward(self, x: Tensor) -> Tensor:
        masked = x if self.mask is None else x * self.mask
        return self.linear(x) + self.gain * masked @ self.A.T @ self.B.T


def naive_mixture(
    mlp: nn.Module,
    layout: Layout,
    path: str,
    p: Mapping[str, Tensor],
    x: Tensor,
    masks: Sequence[Tensor] = (),
    also: Sequence[Tensor] = (),
) -> Tensor:
    """Compute a mixture's output by one MLP for each expert, on every token.

    Args:
        mlp: The base's MLP.
        layout: The layout of the adapter.
        path: The path of the MLP.
        p: The adapter's parameters by name.
        x: The input, (..., dim), or (tokens, dim) if there are masks.
        masks: Dropout masks; for each up-projection, one per expert, and at the end one for the
            down-projection, (slots, tokens, wide).
        also: Other arguments of the MLP, such as a residual.
    """
    shape = mlp_shape(mlp)
    assert shape is not None
    gain = layout.alpha / (layout.rank**0.5 if layout.scale == "sqrt" else layout.rank)
    experts = [f"generalist.{i}" for i in range(layout.generalists)]
    experts += [f"specialist.{i}" for i in range(layout.specialists)]
    n = len(experts)
    weights, chosen = torch.full((*x.shape[:-1], n), 1 / n, dtype=x.dtype), torch.arange(n)
    if layout.routed and n > 1:
        scores = x @ p[f"router/{path}.weight"].T
        top = scores.topk(layout.slots).indices
        left_out = torch.ones_like(scores).scatter(-1, top, 0).bool()
        if layout.slots == 1:  # the probability among all experts
            weights = scores.softmax(-1).masked_fill(left_out, 0)
        else:
            weights = scores.masked_fill(left_out, -torch.inf).softmax(-1)
        if layout.slots < n:  # otherwise, slot s is expert s
            chosen = top
    total = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        own = copy.deepcopy(mlp)
        for j, name in enumerate(shape.linears):
            A, B = (p[f"{expert}/{path}.{name}.{factor}"] for factor in "AB")
            mask = masks[j * n + i] if masks and name != shape.down else None
            if masks and name == shape.down:
                slots = enumerate(masks[-1])
                mask = torch.stack([(chosen[..., s, None] == i) * m for s, m in slots]).sum(0)
            setattr(own, name, WithPair(getattr(own, name), A, B, gain, mask))
        total = total + weights[..., [i]] * own(x, *also)
    return total
