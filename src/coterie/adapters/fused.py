"""A mixture's computation between its frozen linear layers, with a hand-written backward pass.

Automatic differentiation would store every intermediate tensor of every expert. Here, by default,
the only stored tensors of the MLP's inner width are the outputs of the frozen layers and the
dropout masks, if any. The backward pass recomputes all other tensors of this width with cheap
products of rank r. `storing_activations` stores the experts' activations instead, which takes less
time and more memory. Results are bit-identical.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.adapters.activations import Activation
from coterie.scoped import scoped

stores_activations: ContextVar[bool] = ContextVar("stores_activations", default=False)
"""Whether mixtures store the experts' activations for the backward pass."""


def storing_activations(stores: bool) -> AbstractContextManager[None]:
    """Set whether mixtures store the experts' activations, for forward passes in the block."""
    return scoped(stores_activations, stores)


class WideExperts(torch.autograd.Function):
    """The activations of an MLP's experts: their weighted sum, and their products with factors A.

    Each token is processed by k experts and has one slot for each of these experts. The MLP's
    up-projections map the MLP's input to activations of width `wide`, and the down-projection maps
    the activations to the MLP's output. A gated MLP has two up-projections, and any other MLP has
    one. For slot s, the output of up-projection i is `p_is = u_i + g h_is B_is^T`. In this formula,
    u_i is the output of the frozen up-projection i. The slot's expert has a low-rank pair (A, B)
    for each projection. For up-projection i, B_is is the pair's B, and h_is is the product of the
    MLP's input and the pair's A. For the down-projection, A_s is the pair's A. This class computes:

        z_s   = act(p_0s)                 (tokens, wide); if gated, act(p_0s) * p_1s
        total = sum_s w_s z_s             (tokens, wide)
        low_s = w_s (m_s z_s) A_s^T       (tokens, r)

    Args:
        act: The activation function.
        gain: The factor g by which low-rank products are scaled.
        stores: Whether to store p and z for the backward pass, instead of u.
        w: (k, tokens, 1), the routing weight of each slot.
        A: (k, r, wide), the factor A of each slot's expert for the down-projection.
        m: (k, tokens, wide), each slot's dropout mask; None without dropout.
        *up: For each up-projection, three tensors: u (tokens, wide), h (k, tokens, r) and
            B (k, wide, r).

    Returns:
        The tensors `total` and `low`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        act: Activation,
        gain: float,
        stores: bool,
        w: Tensor,
        A: Tensor,
        m: Tensor | None,
        *up: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute `total` and `low`; the class documents the arguments."""
        us, hs, Bs = up[::3], up[1::3], up[2::3]
        stored: list[Tensor] = []
        zs: list[Tensor] = []
        for s in range(len(w)):
            p, z = _slot(act, gain, us, hs, Bs, s)
            zs.append(z)
            stored += [*p, z] if stores else []
            del p  # its memory is needed for the next slot
        total = zs[0] * w[0]
        for z, weight in zip(zs[1:], w[1:], strict=True):
            total.addcmul_(z, weight)
        low = torch.stack([_masked(z, m, s) @ A[s].t() for s, z in enumerate(zs)]).mul_(w)
        ctx.act, ctx.gain, ctx.stores, ctx.layers = act, gain, stores, len(us)
        ctx.save_for_backward(w, A, m, *hs, *Bs, *(stored if stores else us))
        return total, low

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradient of every tensor argument.

        Args:
            ctx: Context with the tensors that `forward` saved.
            *grads: Gradients with respect to `total` (tokens, wide) and `low` (k, tokens, r).
        """
        dtotal, dlow = grads
        w, A, m, *saved = ctx.saved_tensors
        needs_w, needs_A, _, _, _, needs_B, *_ = ctx.needs_input_grad[3:]
        n = ctx.layers
        hs, Bs, us_or_stored = saved[:n], saved[n : 2 * n], saved[2 * n :]
        dw, dA = [], []
        du: list[Tensor] = []
        dh, dB = [[] for _ in hs], [[] for _ in hs]
        for s in range(len(w)):
            if ctx.stores:
                *p, z = us_or_stored[s * (n + 1) : (s + 1) * (n + 1)]
            else:
                p, z = _slot(ctx.act, ctx.gain, us_or_stored, hs, Bs, s)
            if m is None:
                dz = torch.addmm(dtotal, dlow[s], A[s])  # not yet multiplied by w_s
            else:
                dz = torch.addcmul(dtotal, dlow[s] @ A[s], m[s])
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
            del p, z, dz, dp  # their memory is needed for the next slot
        layers = zip(du, map(_stack, dh), map(_stack, dB), strict=True)
        dup = [grad for layer in layers for grad in layer]
        return None, None, None, _stack(dw), _stack(dA), None, *dup


def _slot(
    act: Activation,
    gain: float,
    us: Sequence[Tensor],
    hs: Sequence[Tensor],
    Bs: Sequence[Tensor],
    s: int,
) -> tuple[list[Tensor], Tensor]:
    """Compute the outputs of the up-projections in slot s, and the slot's activations.

    The tensors are p and z in the class's documentation, each shaped (tokens, wide).
    """
    layers = zip(us, hs, Bs, strict=True)
    p = [torch.addmm(u, h[s], B[s].t(), alpha=gain) for u, h, B in layers]
    z = act.value(p[0])
    return p, z * p[1] if len(p) == 2 else z


def _pre_activation_grads(act: Activation, p: list[Tensor], dz: Tensor) -> list[Tensor]:
    if len(p) == 1:
        return [act.slope(dz, p[0])]
    return [act.slope(dz * p[1], p[0]), act.value(p[0]).mul_(dz)]


def _masked(z: Tensor, m: Tensor | None, s: int) -> Tensor:
    """Multiply the activations of slot s by the slot's dropout mask.

    The activations have the shape (tokens, wide). Without dropout, they are returned unchanged.
    """
    return z if m is None else z * m[s]


def _stack(grads: list[Tensor]) -> Tensor | None:
    return torch.stack(grads) if grads else None
