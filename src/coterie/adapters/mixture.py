"""CoMiGS' mixture of generalist and specialist experts on an MLP (arXiv 2409.13931, section 3).

The published code runs one full MLP per expert. Here each frozen product is computed once,
whatever the number of experts, and the result is the same:

    z_i = act(W1 x + b1 + g B1_i A1_i x)                    (gated: times Wu x + g Bu_i Au_i x)
    y   = W2 (sum_i w_i z_i) + b2 + g sum_i w_i B2_i A2_i z_i
"""

from collections.abc import Iterator
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.activations import native
from coterie.adapters.dropout import dropout, drops, mask_like
from coterie.adapters.fused import WideExperts
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraPair
from coterie.adapters.padding import only_real
from coterie.adapters.part import Part
from coterie.bases.sites import MlpShape, StandIn, working_dtype
from coterie.errors import CoterieError

Balance = Literal["uniform", "generalist"]


class Mixture(StandIn):
    """An MLP with low-rank experts, weighed per token by a router.

    Of every token, only the k chosen experts are computed: k *slots* per token. With dropout, the A
    of every pair reads its input times a mask of its own.
    """

    def __init__(self, base: nn.Module, shape: MlpShape, layout: Layout) -> None:
        super().__init__(base)
        self.shape = shape
        self.roles = layout.roles
        self.slots = layout.slots
        self.gain = layout.gain(layout.rank)
        self.dropout = layout.dropout
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {n: LoraPair(getattr(base, n), layout.rank, layout.freeze_A) for n in shape.linears}
            )
            for _ in self.roles
        )
        self.router: nn.Parameter | None = None
        if layout.routed and layout.experts > 1:
            A = self._pairs(shape.up[0])[0].A
            self.router = nn.Parameter(A.new_zeros(layout.experts, A.shape[1]))
        self._logits: Tensor | None = None

    def _pairs(self, linear: str) -> list[LoraPair]:
        return [expert[linear] for expert in self.experts]  # pyright: ignore

    def _factors(self, linear: str) -> tuple[list[Tensor], list[Tensor]]:
        """A: (r, in) and B: (out, r) of every expert, with residuals; r is the largest rank."""
        pairs = self._pairs(linear)
        rank = max(pair.rank for pair in pairs)
        factors = [pair.factors(rank) for pair in pairs]
        return [A for A, _ in factors], [B for _, B in factors]

    def pairs(self, path: str) -> Iterator[tuple[LoraPair, tuple[Part, Part]]]:
        """Every expert's pairs, each with its A and B as parts, for the MLP at this path."""
        for linear in self.shape.linears:
            count = dict.fromkeys(self.roles, 0)
            for role, pair in zip(self.roles, self._pairs(linear), strict=True):
                number, where = count[role], f"{path}.{linear}"
                A, B = pair.parts(f"{role}.{number}/{where}", role, where, number)
                yield pair, (A, B)
                count[role] += 1

    def parts(self, path: str) -> Iterator[Part]:
        """Declare the trained parameters of the MLP at this path of the base."""
        for _, parts in self.pairs(path):
            yield from parts
        if self.router is not None:
            yield Part(f"router/{path}.weight", "router", self.router, "normal", path)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) to (..., dim)."""
        tokens = x.flatten(0, -2)
        weights, choice = self._route(tokens)
        dtype = working_dtype(x)
        tokens, weights = tokens.to(dtype), weights.to(dtype)
        if choice is not None:
            choice = choice.to(dtype)
        up: list[Tensor] = []
        for linear in self.shape.up:
            As, Bs = self._factors(linear)
            low = self._low(tokens, As)
            B = self._per_slot(Bs, dim=1)
            up += [getattr(self.base, linear)(tokens), self._to_slots(low, choice), B.to(dtype)]
        As, Bs = self._factors(self.shape.down)
        A = self._per_slot(As, dim=0).to(dtype)
        act = native(getattr(self.base, self.shape.act))
        masks = None
        if drops(self.dropout):
            masks = mask_like(up[0].new_empty(self.slots, *up[0].shape), self.dropout)
        wide = WideExperts.apply(act, self.gain, weights, A, masks, *up)
        total, low = cast(tuple[Tensor, Tensor], wide)
        y = self._down(total, weights)
        B = torch.cat(Bs, dim=1).to(dtype)
        y = torch.addmm(y, self._from_slots(low, choice), B.t(), alpha=self.gain).view(x.shape)
        own = getattr(self.base, "dropout", None)  # GPT-2's MLPs end with one
        return own(y) if isinstance(own, nn.Dropout) else y

    def _low(self, tokens: Tensor, As: list[Tensor]) -> Tensor:
        """What every expert's A makes of tokens (tokens, in), side by side: (tokens, n*r)."""
        if not drops(self.dropout):
            return tokens @ torch.cat(As).to(tokens.dtype).t()
        lows = [dropout(tokens, self.dropout) @ A.to(tokens.dtype).t() for A in As]
        return torch.cat(lows, dim=1)

    def _down(self, total: Tensor, weights: Tensor) -> Tensor:
        """The base's way down, of (tokens, hidden); its bias is weighed as the experts are."""
        down = getattr(self.base, self.shape.down)
        y = down(total)
        if self.slots == 1 and self.balances and down.bias is not None:
            y = y + (weights[0] - 1) * down.bias.to(y.dtype)  # weights of several sum to 1
        return y

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights (k, tokens, 1) and, if k < n, each slot's choice as 0 and 1, (k, tokens, n)."""
        n = len(self.roles)
        if self.router is None:
            return tokens.new_full((), 1 / n).expand(n, len(tokens), 1), None
        with torch.autocast(tokens.device.type, enabled=False):
            logits = tokens.to(self.router.dtype) @ self.router.t()
        # A graph is kept alive only where a load-balance loss has a gradient.
        self._logits = only_real(logits if self.balances else logits.detach())
        if not self.balances:
            return logits.softmax(-1).t().unsqueeze(-1), None
        weights, chosen = self._weights(logits)
        return weights.t().unsqueeze(-1), F.one_hot(chosen.t(), n)

    def _weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the k best experts of each token, and which these are: (tokens, k).

        A softmax over the k best scores. Over one score it would be 1 and have no gradient: a
        single expert counts its probability among all, as in the released code.
        """
        best, chosen = logits.topk(self.slots, dim=-1)
        if self.slots == 1:
            return logits.softmax(-1).gather(-1, chosen), chosen
        return best.softmax(-1), chosen

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

    @property
    def balances(self) -> bool:
        """Whether a load-balance loss has a gradient: some experts are left out of each token."""
        return self.slots < len(self.roles)

    def routing(self) -> Tensor:
        """Mean routing weight of each expert in the last forward pass: (experts,)."""
        logits = self._last_logits().detach()
        weights, chosen = self._weights(logits)
        return torch.zeros_like(logits).scatter(1, chosen, weights).mean(0)

    def first_experts(self) -> Tensor:
        """The expert with the highest score of each token in the last forward pass: (tokens,)."""
        return self._last_logits().argmax(-1)

    def load_balance(self, form: Balance) -> Tensor:
        """The load-balance loss of the last forward pass; 1 where the load is as wanted.

        f_j: share of assignments to expert j (sums to 1, no gradient); P_j: mean softmax score.
        uniform: `n sum_j f_j P_j`; generalist (CoMiGS, eq. 5, on the released code's scale):
        `2 f_0 P_0 + 2 (n-1) sum_{j>0} f_j P_j`, where half of the load is the first expert's.
        """
        logits, n = self._last_logits(), len(self.roles)
        chosen = logits.topk(self.slots, dim=-1).indices
        f = chosen.flatten().bincount(minlength=n).to(logits.dtype) / chosen.numel()
        fP = f * logits.softmax(-1).mean(0)
        if form == "uniform":
            return n * fP.sum()
        return 2 * fP[0] + 2 * (n - 1) * fP[1:].sum()

    def _last_logits(self) -> Tensor:
        if self._logits is None:
            raise CoterieError("No routing is available before the first forward pass.")
        return self._logits
