"""Weighted means of uploads, independent of the method.

Contributions are read in the order of client names, one at a time. The required memory therefore
does not grow with the number of clients.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from coterie.messages import Groups
from coterie.transforms.context import Rows
from coterie.transforms.contract import Contribution


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
    contributions: Iterable[Contribution], rows: Rows, least_others: int = 1
) -> dict[str, Groups]:
    """Compute the weighted mean `sum_k r_k w_k x_k / sum_k r_k w_k` for each row r.

    Contributions are read only once. Rows with equal weights share one mean, so the memory grows
    with the number of different rows.

    Args:
        contributions: The uploads, with the weight w_k of each client k.
        rows: The weights r_k of the clients, by the name of each mean. A mean with the name of a
            client is received by this client, and any other mean by the clients in its row.
        least_others: The smallest number of other clients whose tensors a client may receive in a
            mean. A tensor of fewer other clients is missing from the mean.

    Returns:
        The tensors of each mean, by the name of the mean. A mean without contributions is missing.
    """
    keys = {name: tuple(sorted((c, w) for c, w in r.items() if w)) for name, r in rows.items()}
    means = {key: WeightedMean() for key in dict.fromkeys(keys.values())}
    weights = {key: dict(key) for key in means}
    holders: dict[tuple[Any, str, str], set[str]] = defaultdict(set)
    clients: set[str] = set()
    for contribution in contributions:
        clients.add(contribution.client)
        for key, mean in means.items():
            if weight := weights[key].get(contribution.client, 0.0) * contribution.weight:
                mean.add(contribution.groups, weight)
                for group, tensors in contribution.groups.items() if least_others > 1 else ():
                    for name in tensors:
                        holders[key, group, name].add(contribution.client)
    results = {key: mean.result() for key, mean in means.items() if mean.sums}
    received = {name: key for name, key in keys.items() if key in results}
    if least_others == 1:
        return {name: results[key] for name, key in received.items()}

    def may_receive(client: str, senders: set[str]) -> bool:
        others = len(senders - {client}) if client in clients else len(senders) - 1
        return others >= least_others or senders == {client}

    return {
        name: selected(results[key], lambda *at: may_receive(name, holders[key, *at]))  # noqa: B023
        for name, key in received.items()
    }


def selected(groups: Groups, selects: Callable[[str, str], bool]) -> Groups:
    """Return the tensors for which a function of group and name returns true."""
    return {g: {n: t for n, t in tensors.items() if selects(g, n)} for g, tensors in groups.items()}
