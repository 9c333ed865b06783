"""The overlap of the clients' texts: the Jaccard index of their tokens."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from coterie.analysis.tables import Summary, Table
from coterie.federation.participants import Participant
from coterie.training.context import ClientId

Shares = dict[ClientId, dict[ClientId, float]]
Ranges = dict[str, tuple[float, float]]
"""The lowest and highest index of clients with the `most` and the `least` topics in common."""


def jaccard(participants: Sequence[Participant]) -> Shares:
    """Return |Di & Dj| / (|Di| + |Dj|), from 0 to 0.5, for every two clients i and j.

    Di is the multiset of tokens of client i's training text. PCL (arXiv 2404.09753), table 3.
    """
    longest = 1 + max(int(p.data.train.ids.max()) for p in participants)
    counts = {p.name: torch.bincount(p.data.train.ids, minlength=longest) for p in participants}
    return {
        i: {j: (a.minimum(b).sum() / (a.sum() + b.sum())).item() for j, b in counts.items()}
        for i, a in counts.items()
    }


def ranges(shares: Shares, mixtures: Mapping[ClientId, Mapping[str, float]]) -> Ranges:
    """Return the ranges of the index that the paper's table 3 has, for known mixtures of topics.

    The topics that two clients have in common are the dot product of their shares, as in PCL's
    theoretical trust.
    """
    alike: dict[float, list[float]] = {}
    for i, j in combinations(mixtures, 2):
        common = sum(v * mixtures[j].get(topic, 0) for topic, v in mixtures[i].items())
        alike.setdefault(round(common, 9), []).append(shares[i][j])
    ends = {"most": max(alike, default=0.0), "least": min(alike, default=0.0)}
    return {key: (min(alike[end]), max(alike[end])) for key, end in ends.items() if alike}


def overlap_tables(summary: Summary) -> list[Table]:
    """Show the ranges, then the index of every two clients for each column."""
    ours = {name: own for name, own in summary.get("ranges", {}).items() if own}
    matrices = [
        Table(
            f"{summary['table']}: {name}",
            ("client", *shares),
            [(client, *(f"{v:.2f}" for v in row.values())) for client, row in shares.items()],
            "Jaccard index of the multisets of tokens in training texts; 0.5 means identical ones.",
        )
        for name, shares in summary["columns"].items()
    ]
    return [_ranges(summary, ours), *matrices] if ours else matrices


def _ranges(summary: Summary, ours: Mapping[str, Ranges]) -> Table:
    rows = []
    for name, own in ours.items():
        paper, row = summary["paper"].get(name, {}), [name]
        for key, (low, high) in own.items():
            row += [f"{low:.2f} to {high:.2f}", paper.get(key, "")]
        rows.append(row)
    return Table(
        summary["table"],
        ("clients with", "most in common", "paper", "least in common", "paper"),
        rows,
        "Range of the Jaccard index over the pairs of clients whose mixtures of topics are most "
        "alike, and least. Columns `paper`: the paper's figures.",
        2,
    )
