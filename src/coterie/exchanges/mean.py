"""Weighted means of uploads, independent of the method.

Contributions are read in the order of client names, one at a time. The required memory therefore
does not grow with the number of clients.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from coterie.errors import enough_memory
from coterie.messages import Groups
from coterie.transforms.context import Rows
from coterie.transforms.contract import Contribution

SMALLER = ("`base` to a smaller one", "the LoRA rank to a smaller number")
"""Changes that reduce the memory of every task."""


def memory_for_aggregation() -> AbstractContextManager[None]:
    """Raise CoterieError if the server runs out of memory in the body of the `with` statement."""
    return enough_memory("the aggregation", lambda: SMALLER)


def weighted_mean(contributions: Iterable[Contribution]) -> Groups:
    """Compute the weighted mean `sum_k w_k x_k / sum_k w_k` of each tensor x.

    The sums are over the clients k whose uploads contain the tensor. The weight of client k is w_k.

    This is federated averaging (McMahan et al., arXiv 1602.05629). Sums are in float64, and the
    result is in float32.
    """
    mean = WeightedMean()
    for contribution in contributions:
        mean.add(contribution.groups, contribution.weight)
    return mean.result()


class WeightedMean:
    """The weighted mean of tensors that are added one client at a time; see `weighted_mean`."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {}
        self.weights: dict[tuple[str, str], float] = {}

    def add(self, groups: Groups, weight: float) -> None:
        """Add a client's tensors, keyed by group and name, with the client's weight."""
        for group, tensors in groups.items():
            total = self.sums.setdefault(group, {})
            for name, tensor in tensors.items():
                if name in total:
                    total[name].add_(tensor, alpha=weight)
                else:
                    total[name] = tensor.to(torch.float64, copy=True).mul_(weight)
                self.weights[group, name] = self.weights.get((group, name), 0.0) + weight

    def result(self) -> Groups:
        """Return the means of all tensors that were added, keyed by group and name."""
        return {
            group: {n: (t / self.weights[group, n]).to(torch.float32) for n, t in total.items()}
            for group, total in self.sums.items()
        }


def means_of(
    contributions: Callable[[Collection[str]], Iterable[Contribution]],
    clients: Collection[str],
    rows: Rows,
    least_others: int = 1,
) -> Iterator[tuple[list[str], Groups]]:
    """Compute the weighted mean `sum_k r_k w_k x_k / sum_k r_k w_k` for each row r.

    Means are computed one at a time, so the memory does not grow with the number of rows. Rows with
    equal weights share one mean.

    Args:
        contributions: A function that returns the uploads of some clients, with the weight w_k of
            each client k.
        clients: The clients that have uploaded.
        rows: The weights r_k of the clients, by the name of each mean. A mean with the name of a
            client is received by this client, and any other mean by the clients in its row.
        least_others: The smallest number of other clients whose tensors a client may receive in a
            mean. A tensor of fewer other clients is missing from the mean.

    Yields:
        The names of equal means, and their tensors. Means without contributions are left out.
    """
    by_row: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for name, row in rows.items():
        weights = sorted((c, w) for c, w in row.items() if w and c in clients)
        by_row.setdefault(tuple(weights), []).append(name)
    for weights, names in by_row.items():
        row, mean, holders = dict(weights), WeightedMean(), defaultdict[Any, set[str]](set)
        for contribution in contributions(row):
            mean.add(contribution.groups, row[contribution.client] * contribution.weight)
            for group, tensors in contribution.groups.items():
                for name in tensors:
                    holders[group, name].add(contribution.client)
        if not mean.sums:
            continue
        result = mean.result()
        if least_others == 1:
            yield names, result
            continue
        receivers: dict[frozenset[Any], list[str]] = {}
        for name in names:
            permitted = frozenset(
                at
                for at, senders in holders.items()
                if len(senders - {name}) - (name not in clients) >= least_others
                or senders == {name}
            )
            receivers.setdefault(permitted, []).append(name)
        for permitted, equal in receivers.items():
            yield equal, selected(result, lambda *at: at in permitted)  # noqa: B023


def selected(groups: Groups, selects: Callable[[str, str], bool]) -> Groups:
    """Return the tensors for which a function of group and name returns true."""
    return {g: {n: t for n, t in tensors.items() if selects(g, n)} for g, tensors in groups.items()}
