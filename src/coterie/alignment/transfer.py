"""Translation of a teacher's sparse predictions into the student's vocabulary.

A prediction consists of the k most probable tokens, their log-probabilities, and the log of the sum
of these probabilities. Each token is replaced by the nearest token in the student's
vocabulary. If several tokens are replaced by the same token, only the most probable of them is
used. The student's targets are probabilities that sum to one. `SoftTargets.mass` is the share of
the teacher's probability that these targets represent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftTargets:
    """Target distributions at p token positions, each over k tokens of the student's vocabulary."""

    tokens: Tensor
    """(p, k) int64: ids in the student's vocabulary."""
    probs: Tensor
    """(p, k) float32: probabilities that sum to one, or all 0 if the target is unknown."""
    mass: Tensor
    """(p,) float32: the total probability that the teacher assigns to the k tokens."""

    @classmethod
    def of(cls, targets: Tensor, k: int) -> "SoftTargets":
        """Create one-hot distributions.

        The attribute `mass`, which is the probability that a teacher assigns to the tokens, is 0,
        because no teacher is involved.

        Args:
            targets: (p,) token ids.
            k: Number of columns. All probabilities are 1 in the first column, and 0 in the
                remaining columns.
        """
        probs = torch.zeros(len(targets), k)
        probs[:, 0] = 1
        return cls(targets.long()[:, None].repeat(1, k), probs, torch.zeros(len(targets)))

    def __getitem__(self, positions: Tensor) -> "SoftTargets":
        """Return the targets at selected positions."""
        return SoftTargets(self.tokens[positions], self.probs[positions], self.mass[positions])

    def __setitem__(self, positions: Tensor, others: "SoftTargets") -> None:
        """Replace the targets at selected positions, in place."""
        self.tokens[positions] = others.tokens
        self.probs[positions] = others.probs
        self.mass[positions] = others.mass

    def or_else(self, others: "SoftTargets") -> "SoftTargets":
        """Return a copy with targets from `others` at those positions that have no target."""
        has_target = (self.probs > 0).any(-1)
        return SoftTargets(
            torch.where(has_target[:, None], self.tokens, others.tokens),
            torch.where(has_target[:, None], self.probs, others.probs),
            torch.where(has_target, self.mass, others.mass),
        )


def translated(
    tokens: Tensor,
    logprobs: Tensor,
    lognorm: Tensor,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    vocabulary: int | None = None,
) -> SoftTargets:
    """Translate predictions into the student's vocabulary.

    A teacher's token is left out if the student's vocabulary has no corresponding token. It is also
    left out if a more probable token at the same position has the same translation. Probabilities
    are `softmax(logprobs / temperature)` over the remaining tokens. If no token remains at a
    position, all probabilities are 0.

    Args:
        tokens: (p, k), the teacher's tokens in descending order of probability; -1 in unused
            entries.
        logprobs: (p, k), the log-probabilities of `tokens`.
        lognorm: (p,), the log of the sum of the k probabilities.
        ids: A tensor with one entry per token of the teacher's vocabulary. The entry is the id of
            the corresponding token in the student's vocabulary, or -1 if the student's vocabulary
            has no corresponding token; see `VocabularyMap.ids`. If `ids` is None, `tokens` must
            already be ids of the student's vocabulary.
        temperature: Softmax temperature.
        vocabulary: Number of rows of the student's embedding. A tokenizer can have more tokens than
            its model has embeddings, so tokens whose ids are not less than this number are left
            out. If None, no tokens are left out for this reason.
    """
    if ids is not None:
        tokens = torch.where(tokens < 0, -1, ids[tokens.long().clamp(min=0)])
    if vocabulary is not None:
        tokens = tokens.masked_fill(tokens >= vocabulary, -1)
    kept = (tokens >= 0) & first(tokens)
    logprobs = logprobs.float()
    is_empty = ~kept.any(-1, keepdim=True)
    scores = (logprobs / temperature).masked_fill(~kept, -torch.inf).masked_fill(is_empty, 0)
    share = logprobs.softmax(-1).masked_fill(~kept, 0).sum(-1)
    return SoftTargets(
        tokens.long().clamp(min=0), scores.softmax(-1) * kept, share * lognorm.float().exp()
    )


def first(tokens: Tensor) -> Tensor:
    """Return a mask, (p, k) bool, that is True where a token has not occurred earlier in its row.

    Args:
        tokens: (p, k), token ids, which may be repeated within a row.
    """
    ordered, indices = tokens.sort(dim=-1, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(is_first).scatter_(-1, indices, is_first)


def mixed(a: SoftTargets, b: SoftTargets, weight: Tensor) -> SoftTargets:
    """Compute the mixture `weight * a + (1 - weight) * b` of two sets of targets.

    Args:
        a: Targets with k_a columns.
        b: Targets with k_b columns.
        weight: (p,) or a scalar, the weight of `a`.

    Returns:
        Targets with k_a + k_b columns. A token that is in both `a` and `b` occurs twice.
    """
    w = weight.expand(len(a.mass))
    probs = torch.cat([a.probs * w[:, None], b.probs * (1 - w[:, None])], -1)
    return SoftTargets(torch.cat([a.tokens, b.tokens], -1), probs, a.mass * w + b.mass * (1 - w))
