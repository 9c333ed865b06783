"""The wide part of a mixture, between the MLP's frozen products, with its gradient by hand.

Automatic differentiation would keep every intermediate of every expert; here only the frozen
products and the experts' activations are kept, and the rest is recomputed by rank-r products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.adapters.activations import Activation


class WideExperts(torch.autograd.Function):
    """Activations of k slots, their weighted sum, and what their low-rank down-projections see.

    With `p_is = u_i + g h_is B_is^T` for the MLP's one or (gated) two upward layers i:

        z_s   = act(p_0s) [* p_1s]        (tokens, wide)
        total = sum_s w_s z_s             (tokens, wide)
        low_s = w_s z_s A_s^T             (tokens, r)

    Arguments: act; gain g; w: (k, tokens, 1); A: (k, r, wide); then for each upward layer
    u: (tokens, wide), h: (k, tokens, r), B: (k, wide, r). Returns total and low: (k, tokens, r).
    """

    @staticmethod
    def forward(
        ctx: Any, act: Activation, gain: float, w: Tensor, A: Tensor, *up: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        slots = range(len(w))
        zs = [_product(act, _up(up, gain, s)) for s in slots]
        total = zs[0] * w[0]
        for s in slots[1:]:
            total.addcmul_(zs[s], w[s])
        low = torch.stack([zs[s] @ A[s].t() for s in slots]).mul_(w)
        ctx.act, ctx.gain = act, gain
        ctx.save_for_backward(w, A, *up, *zs)
        return total, low

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """From d/d total: (tokens, wide) and d/d low: (k, tokens, r) to every tensor argument."""
        dtotal, dlow = grads
        w, A, *rest = ctx.saved_tensors
        up, zs = rest[: -len(w)], rest[-len(w) :]
        needs_w, needs_A, *needs_up = ctx.needs_input_grad[2:]
        dw = torch.empty_like(w) if needs_w else None
        dA = torch.empty_like(A) if needs_A else None
        dup = [
            torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
            for t, need in zip(up, needs_up, strict=True)
        ]
        for s, z in enumerate(zs):
            dz = torch.addmm(dtotal, dlow[s], A[s])
            if dw is not None:
                dw[s] = torch.linalg.vecdot(z, dz)[:, None]
            if dA is not None:
                torch.mm((dlow[s] * w[s]).t(), z, out=dA[s])
            ps = _up(up, ctx.gain, s)
            for i, dp in enumerate(_product_grads(ctx.act, ps, dz.mul_(w[s]))):
                _up_grads(up[3 * i :], dup[3 * i :], dp, ctx.gain, s)
        return None, None, dw, dA, *dup


def _up(up: tuple[Tensor, ...] | list[Tensor], gain: float, s: int) -> list[Tensor]:
    """What enters the activation (and, gated, the other factor) of slot s: (tokens, wide)."""
    layers = zip(up[::3], up[1::3], up[2::3], strict=True)
    return [torch.addmm(u, h[s], B[s].t(), alpha=gain) for u, h, B in layers]


def _product(act: Activation, ps: list[Tensor]) -> Tensor:
    z = act.value(ps[0])
    return z.mul_(ps[1]) if len(ps) == 2 else z


def _product_grads(act: Activation, ps: list[Tensor], dz: Tensor) -> list[Tensor]:
    if len(ps) == 1:
        return [act.slope(dz, ps[0])]
    return [act.slope(dz * ps[1], ps[0]), act.value(ps[0]).mul_(dz)]


def _up_grads(up: list[Tensor], dup: list[Tensor | None], dp: Tensor, gain: float, s: int) -> None:
    """Add the gradient dp of slot s to those of one upward layer's u, h and B."""
    (_, h, B), (du, dh, dB) = up[:3], dup[:3]
    if du is not None:
        du.copy_(dp) if s == 0 else du.add_(dp)
    if dh is not None:
        torch.mm(dp, B[s], out=dh[s]).mul_(gain)
    if dB is not None:
        # This order of factors is several times faster than dp^T h for a tall, thin h.
        dB[s] = torch.mm(h[s].t(), dp).mul_(gain).t()
