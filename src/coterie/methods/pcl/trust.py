"""Trust weights of personalised collaborative fine-tuning (PCL, arXiv 2404.09753, section 3)."""

import logging
from collections.abc import Mapping

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from coterie.methods.settings import Settings

log = logging.getLogger(__name__)
ALWAYS = 2
"""The number of best clients that a threshold never excludes, as in PCL's released code."""


class Trusted(Settings):
    """Settings that determine which clients a client trusts.

    Each client computes a score for every client. It trusts clients with high scores, as specified
    by `top` or `threshold`.
    """

    top: int | None = Field(default=None, ge=1)
    """number of best-scored clients to trust; null: no limit"""
    threshold: float | None = None
    """score above which clients are trusted (the best two are always trusted); null: no limit"""

    @model_validator(mode="after")
    def _one_choice(self) -> "Trusted":
        if self.top is not None and self.threshold is not None:
            raise ValueError("`top` and `threshold` are mutually exclusive; give one of them")
        return self

    def row(self, own: str, scores: Mapping[str, float]) -> dict[str, float]:
        """Return one client's trust weights.

        The weights are a softmax over the scores of the clients selected by `top` or `threshold`.
        All other clients have the weight 0.

        Args:
            own: The client's own name.
            scores: For each client that uploaded, the client's score.

        Returns:
            The weight of every client in `scores`. The weights sum to 1.
        """
        return trust_row(own, scores, self.top, self.threshold)


def trust_row(
    own: str, scores: Mapping[str, float], top: int | None = None, threshold: float | None = None
) -> dict[str, float]:
    """Compute a client's trust weights, which are a softmax of scores.

    The weights are defined in equation 2 of the paper on personalised collaborative fine-tuning
    (PCL, arXiv 2404.09753).

    Args:
        own: The name of the client whose trust weights are computed.
        scores: A mapping from the names of all clients, including `own`, to the scores that the
            client `own` gives to them. Clients whose score is not finite get weight 0.
        top: The number of best scores to keep. None keeps all scores.
        threshold: The value that a score must exceed to be kept. This condition does not apply to
            the two best scores. With None, there is no threshold.

    Returns:
        A mapping from clients to weights. The weights sum to 1. If no score is finite, `own` gets
        weight 1.
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
            "Client %r keeps its own model in this exchange, because none of its trust scores is "
            "finite. The scores determine the weights of the clients' models.",
            own,
        )
        return {name: float(name == own) for name in scores}
    return dict(zip(scores, row.softmax(0).tolist(), strict=True))


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], by_columns: bool = False) -> float:
    """Compute the cosine similarity of two adapters.

    Args:
        a: A mapping from names to the tensors of one adapter. The tensors are the factors A (r, in)
            and B (out, r).
        b: The same mapping for the other adapter.
        by_columns: Whether to average the cosine similarities of corresponding columns. If false,
            all tensors of an adapter are concatenated into one vector. The average over columns
            corresponds to the released code of personalised collaborative fine-tuning (PCL, arXiv
            2404.09753), which averages over the rows of the transposes of A and B.
    """
    if by_columns:
        columns = [F.cosine_similarity(a[name], b[name], dim=0) for name in a]
        return torch.cat(columns).mean().item()
    x, y = (torch.cat([t[name].flatten() for name in a]).double() for t in (a, b))
    return F.cosine_similarity(x, y, dim=0).item()


def sparse_distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Compute the L1 distance between sparse logits, averaged over token positions.

    Logits that are missing from a sparse vector are taken as 0.

    Args:
        a: A pair of tensors of shape (tokens, k): the logits of k vocabulary entries at each
            position, and the token ids of these entries. The entries of a position are sorted by
            token id.
        b: The pair of tensors to compare with. It may have another number k of entries per
            position.
    """
    (x, x_ids), (y, y_ids) = ((values.float(), ids.long()) for values, ids in (a, b))
    matches = torch.searchsorted(y_ids, x_ids).clamp(max=y_ids.shape[-1] - 1)
    common = y_ids.gather(-1, matches) == x_ids
    z = y.gather(-1, matches)
    # The total adds |x| + |z| for common ids, where the distance is |x - z|: subtract the excess.
    excess = ((x.abs() + z.abs() - (x - z).abs()) * common).sum(-1)
    return (x.abs().sum(-1) + y.abs().sum(-1) - excess).mean().item()
