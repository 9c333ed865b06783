"""How much the clients' texts have in common: the Jaccard index of their tokens."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from coterie.analysis.tables import Summary, Table
from coterie.federation.participants import Participant
from coterie.training.context import ClientId

Shares = dict[ClientId, dict[ClientId, float]]
Ranges = dict[str, tuple[float, float]]
"""Of the clients with the `most` topics in common, and the `least`: the lowest and the highest."""


def jaccard(participants: Sequence[Participant]) -> Shares:
    """|Di & Dj| / (|Di| + |Dj|) for every two clients, D the multiset of a training text's tokens.

    0 to 0.5. PCL (arXiv 2404.09753), table 3.
    """
    longest = 1 + max(int(p.data.train.ids.max()) for p in participants)
    counts = {p.name: torch.bincount(p.data.train.ids, minlength=longest) for p in participants}
    return {
        one: {two: (a.minimum(b).sum() / (a.sum() + b.sum())).item() for two, b in counts.items()}
        for one, a in counts.items()
    }


def ranges(shares: Shares, mixtures: Mapping[ClientId, Mapping[str, float]]) -> Ranges:
    """The ranges of the index that the paper's table 3 has, where clients' mixtures are known.

    What two clients have in common is the product of their shares of topics, as in PCL's
    theoretical trust.
    """
    alike: dict[float, list[float]] = {}
    for one, two in combinations(mixtures, 2):
        common = sum(v * mixtures[two].get(topic, 0) for topic, v in mixtures[one].items())
        alike.setdefault(round(common, 9), []).append(shares[one][two])
    ends = {"most": max(alike, default=0.0), "least": min(alike, default=0.0)}
    return {what: (min(alike[end]), max(alike[end])) for what, end in ends.items() if alike}


def overlap_tables(summary: Summary) -> list[Table]:
    """Show the ranges, then the index of every two clients for each column."""
    ours = {name: found for name, found in summary.get("ranges", {}).items() if found}
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
    for name, found in ours.items():
        paper, row = summary["paper"].get(name, {}), [name]
        for what, (low, high) in found.items():
            row += [f"{low:.2f} to {high:.2f}", paper.get(what, "")]
        rows.append(row)
    return Table(
        summary["table"],
        ("clients with", "most in common", "paper", "least in common", "paper"),
        rows,
        "Range of the Jaccard index over the pairs of clients whose mixtures of topics are most "
        "alike, and least. Columns `paper`: the paper's figures.",
        2,
    )
