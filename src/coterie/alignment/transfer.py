"""A teacher's predictions in its student's tokens, sparse all the way.

A prediction is the k likeliest tokens, their log-probabilities, and the log of what they sum to.
Tokens that the student lacks go to what is nearest in its vocabulary; where two go to the same, the
likelier one is kept. What a student learns from are probabilities that sum to one; how much of the
teacher's probability is in them is known (`SoftTargets.mass`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftTargets:
    """What to learn at each of p positions: tokens, and probabilities of them that sum to one.

    tokens: (p, k) int64, of the student's vocabulary; probs: (p, k) float32, 0 where there are
    fewer than k. mass: (p,) float32, the teacher's probability of what is in them.
    """

    tokens: Tensor
    probs: Tensor
    mass: Tensor

    @classmethod
    def of(cls, targets: Tensor, k: int) -> "SoftTargets":
        """All of it on one token, (p,), in a form that has room for k: a label, nobody's mass."""
        probs = torch.zeros(len(targets), k)
        probs[:, 0] = 1
        return cls(targets.long()[:, None].repeat(1, k), probs, torch.zeros(len(targets)))

    def __getitem__(self, positions: Tensor) -> "SoftTargets":
        """Those at some positions."""
        return SoftTargets(self.tokens[positions], self.probs[positions], self.mass[positions])

    def __setitem__(self, positions: Tensor, others: "SoftTargets") -> None:
        """Replace those at some positions."""
        self.tokens[positions] = others.tokens
        self.probs[positions] = others.probs
        self.mass[positions] = others.mass

    def or_else(self, others: "SoftTargets") -> "SoftTargets":
        """The same, with others' at positions where nothing is known."""
        known = (self.probs > 0).any(-1)
        return SoftTargets(
            torch.where(known[:, None], self.tokens, others.tokens),
            torch.where(known[:, None], self.probs, others.probs),
            torch.where(known, self.mass, others.mass),
        )


def translated(
    tokens: Tensor,
    logprobs: Tensor,
    lognorm: Tensor,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    vocabulary: int | None = None,
) -> SoftTargets:
    """Predictions moved into a student's vocabulary.

    tokens: (p, k), the likeliest first, and -1 for none; logprobs: (p, k); lognorm: (p,), the log
    of the k probabilities' sum; ids: (teacher's vocabulary,), the student's token for each of the
    teacher's, or -1 (`VocabularyMap.ids`); None: tokens are the student's already; vocabulary: how
    many its model knows, where its tokenizer may have more: others count as none. Of tokens that
    become the same one, the first is kept. Probabilities are softmax(logprobs / temperature) over
    what is kept; where nothing is left they are 0.
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
    return SoftTargets(
        tokens.long().clamp(min=0), scores.softmax(-1) * kept, part * lognorm.float().exp()
    )


def first(tokens: Tensor) -> Tensor:
    """Where a token stands in its row for the first time: (p, k) bool."""
    ordered, places = tokens.sort(dim=-1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(new).scatter_(-1, places, new)


def mixed(a: SoftTargets, b: SoftTargets, weight: Tensor) -> SoftTargets:
    """weight * a + (1 - weight) * b, side by side: (p, k_a + k_b). weight: (p,)."""
    w = weight.expand(len(a.mass))
    probs = torch.cat([a.probs * w[:, None], b.probs * (1 - w[:, None])], -1)
    return SoftTargets(torch.cat([a.tokens, b.tokens], -1), probs, a.mass * w + b.mass * (1 - w))
