"""A teacher's predictions in its student's tokens, sparse all the way.

A prediction is the k likeliest tokens, their log-probabilities, and the log of what they sum to.
Tokens that the student lacks go to what is nearest in its vocabulary; where two go to the same, the
likelier one is kept. What a student learns from are shares that sum to one; how much of the
teacher's probability is in them is known (`Shares.mass`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shares:
    """What to learn at each of p positions: tokens, and shares of them that sum to one.

    tokens: (p, k) int64, of the student's vocabulary; shares: (p, k) float32, 0 where there are
    fewer than k. mass: (p,) float32, the teacher's probability of what is in them.
    """

    tokens: Tensor
    shares: Tensor
    mass: Tensor

    @classmethod
    def of(cls, targets: Tensor, k: int) -> "Shares":
        """All of it on one token, (p,), in a form that has room for k: a label, nobody's mass."""
        shares = torch.zeros(len(targets), k)
        shares[:, 0] = 1
        return cls(targets.long()[:, None].repeat(1, k), shares, torch.zeros(len(targets)))

    def __getitem__(self, positions: Tensor) -> "Shares":
        """Those at some positions."""
        return Shares(self.tokens[positions], self.shares[positions], self.mass[positions])

    def __setitem__(self, positions: Tensor, others: "Shares") -> None:
        """Replace those at some positions."""
        self.tokens[positions] = others.tokens
        self.shares[positions] = others.shares
        self.mass[positions] = others.mass

    def or_else(self, others: "Shares") -> "Shares":
        """The same, with others' at positions where nothing is known."""
        known = (self.shares > 0).any(-1)
        return Shares(
            torch.where(known[:, None], self.tokens, others.tokens),
            torch.where(known[:, None], self.shares, others.shares),
            torch.where(known, self.mass, others.mass),
        )


def translated(
    tokens: Tensor,
    logprobs: Tensor,
    lognorm: Tensor,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    vocabulary: int | None = None,
) -> Shares:
    """Predictions moved into a student's vocabulary.

    tokens: (p, k), the likeliest first, and -1 for none; logprobs: (p, k); lognorm: (p,), the log
    of the k probabilities' sum; ids: (teacher's vocabulary,), the student's token for each of the
    teacher's, or -1 (`VocabularyMap.ids`); None: tokens are the student's already; vocabulary: how
    many its model knows, where its tokenizer may have more: others count as none. Of tokens that
    become the same one, the first is kept. Shares are softmax(logprobs / temperature) over what is
    kept; a position of which nothing is left has shares 0.
    """
    if ids is not None:
        tokens = torch.where(tokens < 0, -1, ids[tokens.long().clamp(min=0)])
    if vocabulary is not None:
        tokens = tokens.masked_fill(tokens >= vocabulary, -1)
    kept = (tokens >= 0) & first(tokens)
    logprobs = logprobs.float()
    nothing = ~kept.any(-1, keepdim=True)
    scores = (logprobs / temperature).masked_fill(~kept, -torch.inf).masked_fill(nothing, 0)
    part = logprobs.softmax(-1).masked_fill(~kept, 0).sum(-1)
    return Shares(
        tokens.long().clamp(min=0), scores.softmax(-1) * kept, part * lognorm.float().exp()
    )


def first(tokens: Tensor) -> Tensor:
    """Where a token stands in its row for the first time: (p, k) bool."""
    ordered, places = tokens.sort(dim=-1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(new).scatter_(-1, places, new)


def mixed(a: Shares, b: Shares, weight: Tensor) -> Shares:
    """weight * a + (1 - weight) * b, side by side: (p, k_a + k_b). weight: (p,)."""
    w = weight.expand(len(a.mass))
    shares = torch.cat([a.shares * w[:, None], b.shares * (1 - w[:, None])], -1)
    return Shares(torch.cat([a.tokens, b.tokens], -1), shares, a.mass * w + b.mass * (1 - w))
