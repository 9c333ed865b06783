"""What mixtures of experts have in common: low-rank experts, and a router that weighs them.

A linear map without bias scores the experts by the hidden state that enters the block; a softmax
over the best k scores weighs these (CoMiGS, arXiv 2409.13931, section 3).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.dropout import dropout, drops
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraPair, pairs_in
from coterie.bases.padding import kept, only_real
from coterie.bases.sites import StandIn
from coterie.errors import CoterieError

Balance = Literal["uniform", "generalist"]


Place = tuple[str, tuple[int, int], Tensor]
"""What a low-rank pair is for: its path in the base, (in, out), and a weight of it."""


class Router(StandIn):
    """What weighs experts per token, by scores that it keeps of the last forward pass.

    Args:
        base: what it stands for.
        experts: how many there are, n.
        loaded: of how many of them a token is the load.
    """

    def __init__(self, base: nn.Module, experts: int, loaded: int) -> None:
        super().__init__(base)
        self.balances = loaded < experts
        """Whether a load-balance loss has a gradient."""
        self._scores: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: not the last forward pass, whose graph cannot be copied."""
        return {**self.__dict__, "_scores": None}

    def routing(self) -> Tensor:
        """Mean weight of each expert over the last forward pass's real tokens: (n,)."""
        raise NotImplementedError

    def load_balance(self, form: Balance = "uniform") -> Tensor:
        """The load-balance loss of the last forward pass; 1 where the load is as wanted.

        f_j: share of the load on expert j (sums to 1, no gradient); P_j: mean softmax score.
        uniform: `n sum_j f_j P_j`; generalist (CoMiGS, eq. 5, on the released code's scale):
        `2 f_0 P_0 + 2 (n-1) sum_{j>0} f_j P_j`, where half of the load is the first expert's.
        """
        f, P = self._loads()
        n, fP = len(f), f * P
        if form == "uniform":
            return n * fP.sum()
        return 2 * fP[0] + 2 * (n - 1) * fP[1:].sum()

    def _loads(self) -> tuple[Tensor, Tensor]:
        """f and P, both (n,); see `load_balance`."""
        raise NotImplementedError

    def _keep(self, scores: Tensor) -> None:
        """Keep scores (tokens, n), with their graph where a load-balance loss has a gradient."""
        real = only_real(scores if self.balances else scores.detach())
        self._scores = kept(self._scores, real)

    def _last_scores(self) -> Tensor:
        if self._scores is None:
            raise CoterieError("No routing is available before the first forward pass.")
        return self._scores


class Routed(Router):
    """A block of the base with low-rank experts, weighed per token by a router.

    Of every token, only the k chosen experts are computed: k *slots* per token. With dropout, the A
    of every pair reads its input times a mask of its own.

    Args:
        base: the block.
        home: its path, by which the router is named.
        layout: which experts.
        places: what each expert has pairs for, by name.
    """

    def __init__(
        self, base: nn.Module, home: str, layout: Layout, places: Mapping[str, Place]
    ) -> None:
        super().__init__(base, layout.experts, layout.slots)
        self.home = home
        self.roles = layout.roles
        self.slots = layout.slots
        self.gain = layout.gain(layout.rank)
        self.dropout = layout.dropout
        self.experts = nn.ModuleList()
        numbers = (*range(layout.generalists), *range(layout.specialists))
        for role, number in zip(layout.roles, numbers, strict=True):
            pairs = {
                name: LoraPair(role, path, shape, layout.rank, near, number, layout.freeze_A)
                for name, (path, shape, near) in places.items()
            }
            self.experts.append(nn.ModuleDict(pairs))
        self.router: nn.Parameter | None = None
        if layout.routed and layout.experts > 1:
            A = pairs_in(self)[0].A
            self.router = nn.Parameter(A.new_zeros(layout.experts, A.shape[1]))

    def _factors(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """A: (r, in) and B: (out, r) of every expert, with residuals; r is the largest rank."""
        pairs = [cast(LoraPair, expert.get_submodule(name)) for expert in self.experts]
        rank = max(pair.rank for pair in pairs)
        factors = [pair.factors(rank) for pair in pairs]
        return [A for A, _ in factors], [B for _, B in factors]

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
        self._keep(logits)
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

    def routing(self) -> Tensor:
        """See `Router`."""
        logits = self._last_scores().detach()
        weights, chosen = self._weights(logits)
        return torch.zeros_like(logits).scatter(1, chosen, weights).mean(0)

    def first_experts(self) -> Tensor:
        """The expert with the highest score of each token in the last forward pass: (tokens,)."""
        return self._last_scores().argmax(-1)

    def _loads(self) -> tuple[Tensor, Tensor]:
        logits, n = self._last_scores(), len(self.roles)
        chosen = logits.topk(self.slots, dim=-1).indices
        # A GPU counts these without waiting, as it would for bincount.
        f = F.one_hot(chosen, n).sum((0, 1)).to(logits.dtype) / chosen.numel()
        return f, logits.softmax(-1).mean(0)
