"""How much a client trusts the others: a row of weights, from how alike or how useful they are.

The three measures of personalised collaborative fine-tuning (PCL, arXiv 2404.09753, section 3).
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)
ALWAYS = 2
"""Clients that a threshold always leaves: the released code keeps the two best."""


def trust_row(
    own: str, scores: Mapping[str, float], top: int | None = None, threshold: float | None = None
) -> dict[str, float]:
    """The softmax of a client's scores: weights by client, which sum to 1 (PCL, equation 2).

    `top` keeps that many best scores; `threshold` keeps those above it, and always the best two.
    A score that is not finite counts nothing; without any that is, the client trusts itself alone.
    """
    row = torch.tensor(list(scores.values()), dtype=torch.float64)
    row[~row.isfinite()] = -torch.inf
    best_first = row.argsort(descending=True, stable=True)
    if top is not None:
        row[best_first[top:]] = -torch.inf
    if threshold is not None:
        others = best_first[ALWAYS:]
        row[others[row[others] <= threshold]] = -torch.inf
    if not row.isfinite().any():
        log.warning(
            "No client's model could be scored by %r, which keeps its own model in this exchange.",
            own,
        )
        return {name: float(name == own) for name in scores}
    return dict(zip(scores, row.softmax(0).tolist(), strict=True))


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], by_columns: bool = False) -> float:
    """Cosine similarity of two adapters as one vector each, or the mean of their columns' cosines.

    Of A: (r, in) and B: (out, r), whose columns are the rows of PCL's released code.
    """
    if by_columns:
        columns = [F.cosine_similarity(a[name], b[name], dim=0) for name in a]
        return torch.cat(columns).mean().item()
    x, y = (torch.cat([t[name].flatten() for name in a]).double() for t in (a, b))
    return F.cosine_similarity(x, y, dim=0).item()


def sparse_distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Mean over tokens of the l1 distance of sparse logits; what is left out counts as 0.

    Each is values: (tokens, k) and their places in the vocabulary: (tokens, k), ascending.
    """
    (x, at), (y, there) = ((values.float(), places.long()) for values, places in (a, b))
    place = torch.searchsorted(there, at).clamp(max=there.shape[-1] - 1)
    common = there.gather(-1, place) == at
    z = y.gather(-1, place)
    # Apart, x and z would count |x| + |z|; at a common place they count |x - z|.
    saved = ((x.abs() + z.abs() - (x - z).abs()) * common).sum(-1)
    return (x.abs().sum(-1) + y.abs().sum(-1) - saved).mean().item()
