"""What mixtures of experts have in common: low-rank experts, and a router that weighs them.

A linear map without bias scores the experts by the hidden state that enters the block; a softmax
over the best k scores weighs these (CoMiGS, arXiv 2409.13931, section 3).
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.dropout import dropout, drops
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraPair
from coterie.adapters.padding import kept, only_real
from coterie.adapters.part import Part
from coterie.bases.sites import StandIn
from coterie.errors import CoterieError

Balance = Literal["uniform", "generalist"]


class Routed(StandIn):
    """A block of the base with low-rank experts, weighed per token by a router.

    Of every token, only the k chosen experts are computed: k *slots* per token. With dropout, the A
    of every pair reads its input times a mask of its own.

    Args:
        base: the block.
        layout: which experts.
        pairs: each expert's pairs, by the linear layer of the block that they are for; "" for
            the block itself.
    """

    def __init__(self, base: nn.Module, layout: Layout, experts: list[dict[str, LoraPair]]) -> None:
        super().__init__(base)
        self.roles = layout.roles
        self.slots = layout.slots
        self.gain = layout.gain(layout.rank)
        self.dropout = layout.dropout
        self.experts = nn.ModuleList(nn.ModuleDict(pairs) for pairs in experts)
        self.router: nn.Parameter | None = None
        if layout.routed and layout.experts > 1:
            A = next(iter(experts[0].values())).A
            self.router = nn.Parameter(A.new_zeros(layout.experts, A.shape[1]))
        self._logits: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: not the last forward pass, whose graph cannot be copied."""
        return {**self.__dict__, "_logits": None}

    def _pairs(self, name: str) -> list[LoraPair]:
        return [expert[name] for expert in self.experts]  # pyright: ignore

    def _factors(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """A: (r, in) and B: (out, r) of every expert, with residuals; r is the largest rank."""
        pairs = self._pairs(name)
        rank = max(pair.rank for pair in pairs)
        factors = [pair.factors(rank) for pair in pairs]
        return [A for A, _ in factors], [B for _, B in factors]

    def pairs(self, path: str) -> Iterator[tuple[LoraPair, tuple[Part, Part]]]:
        """Every expert's pairs, each with its A and B as parts, for the block at this path."""
        for name, where in self.places(path).items():
            count = dict.fromkeys(self.roles, 0)
            for role, pair in zip(self.roles, self._pairs(name), strict=True):
                number = count[role]
                A, B = pair.parts(f"{role}.{number}/{where}", role, where, number)
                yield pair, (A, B)
                count[role] += 1

    def places(self, path: str) -> dict[str, str]:
        """Where the pairs of each name stand, as paths of the base, if this stands at a path."""
        raise NotImplementedError

    def home(self, path: str) -> str:
        """The path of the module whose experts these are, if this stands at a path."""
        return path

    def parts(self, path: str) -> Iterator[Part]:
        """Declare the trained parameters of the block at this path of the base."""
        for _, parts in self.pairs(path):
            yield from parts
        if self.router is not None:
            home = self.home(path)
            yield Part(f"router/{home}.weight", "router", self.router, "normal", home)

    def _low(self, tokens: Tensor, As: list[Tensor]) -> Tensor:
        """What every expert's A makes of tokens (tokens, in), side by side: (tokens, n*r)."""
        if not drops(self.dropout):
            return tokens @ torch.cat(As).to(tokens.dtype).t()
        lows = [dropout(tokens, self.dropout) @ A.to(tokens.dtype).t() for A in As]
        return torch.cat(lows, dim=1)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights (k, tokens, 1) and, if k < n, each slot's choice as 0 and 1, (k, tokens, n)."""
        n = len(self.roles)
        if self.router is None:
            return tokens.new_full((), 1 / n).expand(n, len(tokens), 1), None
        with torch.autocast(tokens.device.type, enabled=False):
            logits = tokens.to(self.router.dtype) @ self.router.t()
        # A graph is kept alive only where a load-balance loss has a gradient.
        seen = only_real(logits if self.balances else logits.detach())
        self._logits = kept(self._logits, seen)
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
        # A GPU counts these without waiting, as it would for bincount.
        f = F.one_hot(chosen, n).sum((0, 1)).to(logits.dtype) / chosen.numel()
        fP = f * logits.softmax(-1).mean(0)
        if form == "uniform":
            return n * fP.sum()
        return 2 * fP[0] + 2 * (n - 1) * fP[1:].sum()

    def _last_logits(self) -> Tensor:
        if self._logits is None:
            raise CoterieError("No routing is available before the first forward pass.")
        return self._logits
