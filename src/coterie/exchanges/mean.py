"""Aggregation of a round's uploads, independent of the method.

The weighted mean, or the reduction that replaces it, iterates over contributions in the order of
client names. The required memory therefore need not grow with the number of clients.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.exchanges.ends import ServerTransforms
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Groups, Message, Schema, Shapes, check_shapes
from coterie.transforms.context import Rows
from coterie.transforms.contract import Contribution, Transform

HELD = "held"
"""Key in the values of an aggregate. The value is the number of clients that uploaded each tensor.
"""


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
        name: _selected(results[key], lambda *at: may_receive(name, holders[key, *at]))  # noqa: B023
        for name, key in received.items()
    }


class Aggregation:
    """The aggregation of uploads according to a run's schema, transforms and reduction.

    All engines and all methods use this class.

    Args:
        schema: The fields that the method may send.
        transforms: The run's transforms, in encoding order.
        exchanges: The number of exchanges in which clients train.
        least_others: The smallest number of other clients whose tensors a client may receive in a
            mean. Tensors of fewer clients are not averaged; 1 permits all means.
    """

    def __init__(
        self,
        schema: Schema,
        transforms: Sequence[Transform] = (),
        exchanges: int = 1,
        least_others: int = 1,
    ) -> None:
        self.least_others = least_others
        self._means, self._each = schema.reduced("mean"), schema.reduced("each")
        self._rows, self._averaged = schema.reduced("rows"), schema.averaged
        self.pipeline = Pipeline(transforms, schema, exchanges)
        self.schema = self.pipeline.schema
        """The fields that may be sent: the method's encoded fields, and the transforms' fields."""
        self.transforms = ServerTransforms(self.pipeline)
        """The transforms of the run on the server, with their states."""
        self._reduce = self.transforms.reduce if self.pipeline.reduction else weighted_mean

    def contribution(
        self, client: str, upload: Message, expected: Mapping[str, Shapes]
    ) -> Contribution:
        """Validate an upload and return the client's contribution to the means.

        Args:
            client: The client's name.
            upload: The decoded upload.
            expected: The shapes that the upload must have, keyed by group and name.

        Raises:
            MessageError: If the shapes differ from `expected`, or a transform rejects the upload.
        """
        for group in sorted(self._averaged):
            check_shapes(upload[group], expected.get(group, {}))
        weight = self.transforms.weight(client, upload)
        return Contribution(client, upload.only(self._averaged).groups, weight)

    def each(self, upload: Message) -> Message:
        """Return the part of an upload that the method's server-side object receives.

        From each client, this object receives the fields whose reduction is `each`. The remaining
        fields are averaged over clients.
        """
        return upload.only(self._each)

    def mean(self, round: int, contributions: Iterable[Contribution]) -> Message:
        """Compute the mean of a round's contributions, or the reduction that replaces the mean.

        Returns:
            A message with the aggregated tensors. The message's value `HELD` maps the group and
            name of each tensor to the number of clients that uploaded the tensor.
        """
        held: dict[str, Counter[str]] = defaultdict(Counter)

        def counted() -> Iterable[Contribution]:
            for contribution in contributions:
                groups = _without(contribution.groups, self._rows - self._means)
                for group, tensors in groups.items():
                    held[group].update(tensors.keys())
                yield replace(contribution, groups=groups) if self._rows else contribution

        groups = self._reduce(counted())
        if self.least_others > 1:
            groups = _selected(groups, lambda group, name: held[group][name] > self.least_others)
            held = {g: Counter({n: held[g][n] for n in tensors}) for g, tensors in groups.items()}
        return Message(round, groups, {HELD: held})

    def with_rows(
        self, mean: Message, contributions: Iterable[Contribution], rows: Rows
    ) -> Message:
        """Add the means that `ServerSide.rows` requests to the mean of a round.

        Args:
            mean: The result of `mean`.
            contributions: The same contributions as for `mean`.
            rows: The clients' weights in each of these means.

        Returns:
            The message, with these means in its attribute `peers`.
        """
        means = self._means - self._rows
        chosen = (replace(c, groups=_without(c.groups, means)) for c in contributions)
        return replace(mean, peers=means_of(chosen, rows, self.least_others))


def _selected(groups: Groups, selects: Callable[[str, str], bool]) -> Groups:
    """Return the tensors for which a function of group and name returns true."""
    return {g: {n: t for n, t in tensors.items() if selects(g, n)} for g, tensors in groups.items()}


def _without(groups: Groups, names: set[str]) -> Groups:
    return {group: tensors for group, tensors in groups.items() if group not in names}
