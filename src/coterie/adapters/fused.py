"""The computation between a mixture's frozen products, with a hand-written backward pass.

Automatic differentiation would store every intermediate tensor of every expert. Here, only the
frozen products are stored, whatever the number of experts; rank-r products recompute the rest.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.adapters.activations import Activation


class WideExperts(torch.autograd.Function):
    """Activations of k slots: their weighted sum, and their low-rank products with every A.

    With `p_is = u_i + g h_is B_is^T` for the MLP's one or (gated) two upward layers i:

        z_s   = act(p_0s) [* p_1s]        (tokens, wide)
        total = sum_s w_s z_s             (tokens, wide)
        low_s = w_s (m_s z_s) A_s^T       (tokens, r)

    Args:
        act: The activation function.
        gain: The scaling factor g of low-rank products.
        w: (k, tokens, 1), the slots' weights.
        A: (k, r, wide), the factors A of the downward layer.
        m: (k, tokens, wide), dropout masks; None for ones.
        *up: For each upward layer: u (tokens, wide), h (k, tokens, r) and B (k, wide, r).

    Returns:
        total and low.
    """

    @staticmethod
    def forward(
        ctx: Any,
        act: Activation,
        gain: float,
        w: Tensor,
        A: Tensor,
        m: Tensor | None,
        *up: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute total and low; see the class for the arguments."""
        zs = [_activations(act, _pre_activations(up, gain, s)) for s in range(len(w))]
        total = zs[0] * w[0]
        for z, weight in zip(zs[1:], w[1:], strict=True):
            total.addcmul_(z, weight)
        low = torch.stack([_masked(z, m, s) @ A[s].t() for s, z in enumerate(zs)]).mul_(w)
        ctx.act, ctx.gain = act, gain
        ctx.save_for_backward(w, A, m, *up)
        return total, low

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradient of every tensor argument.

        Args:
            ctx: Saved tensors.
            *grads: Gradients of total (tokens, wide) and low (k, tokens, r).
        """
        dtotal, dlow = grads
        w, A, m, *up = ctx.saved_tensors
        needs_w, needs_A, _, _, _, needs_B, *_ = ctx.needs_input_grad[2:]
        dw, dA = [], []
        us, hs, Bs = up[::3], up[1::3], up[2::3]
        du: list[Tensor] = []
        dh, dB = [[] for _ in us], [[] for _ in us]
        for s in range(len(w)):
            p = _pre_activations(up, ctx.gain, s)
            if m is None:
                dz = torch.addmm(dtotal, dlow[s], A[s])  # not yet multiplied by w_s
            else:
                dz = torch.addcmul(dtotal, dlow[s] @ A[s], m[s])
            z = _activations(ctx.act, p)
            if needs_w:
                dw.append(torch.linalg.vecdot(z, dz).unsqueeze(-1))
            if needs_A:
                dA.append((dlow[s] * w[s]).t() @ _masked(z, m, s))
            dp = _pre_activation_grads(ctx.act, p, dz.mul_(w[s]))
            for i, (h, B) in enumerate(zip(hs, Bs, strict=True)):
                dh[i].append((dp[i] @ B[s]).mul_(ctx.gain))
                if needs_B:
                    # For a tall, thin h, this order is several times faster than dp^T h.
                    dB[i].append((h[s].t() @ dp[i]).mul_(ctx.gain).t())
            du = [u.add_(grad) for u, grad in zip(du, dp, strict=True)] if du else dp
        slots = zip(du, map(_stack, dh), map(_stack, dB), strict=True)
        return None, None, _stack(dw), _stack(dA), None, *(grad for up in slots for grad in up)


def _pre_activations(up: Sequence[Tensor], gain: float, s: int) -> list[Tensor]:
    """Compute the outputs of the upward layers for slot s: each (tokens, wide)."""
    layers = zip(up[::3], up[1::3], up[2::3], strict=True)
    return [torch.addmm(u, h[s], B[s].t(), alpha=gain) for u, h, B in layers]


def _activations(act: Activation, p: list[Tensor]) -> Tensor:
    """Compute a slot's activations from its pre-activations: (tokens, wide)."""
    z = act.value(p[0])
    return z * p[1] if len(p) == 2 else z


def _pre_activation_grads(act: Activation, p: list[Tensor], dz: Tensor) -> list[Tensor]:
    if len(p) == 1:
        return [act.slope(dz, p[0])]
    return [act.slope(dz * p[1], p[0]), act.value(p[0]).mul_(dz)]


def _masked(z: Tensor, m: Tensor | None, s: int) -> Tensor:
    """Apply the dropout mask of slot s to its activations (tokens, wide)."""
    return z if m is None else z * m[s]


def _stack(grads: list[Tensor]) -> Tensor | None:
    return torch.stack(grads) if grads else None
