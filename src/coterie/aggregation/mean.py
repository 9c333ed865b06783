"""Aggregation of a round's uploads, independent of the method.

The weighted mean, or the reduction that replaces it, iterates over contributions in the order of
client names. The required memory therefore need not grow with the number of clients.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coterie.aggregation.ends import ServerTransforms
from coterie.aggregation.pipeline import Pipeline
from coterie.aggregation.transform import Contribution, Transform
from coterie.messages import Groups, Message, Schema, Shapes, check_shapes

HELD = "held"
"""Key in the values of an aggregate. The value is the number of clients that uploaded each tensor.
"""


def weighted_mean(contributions: Iterable[Contribution]) -> Groups:
    """Compute the weighted mean `sum_k w_k x_k / sum_k w_k` of each tensor x.

    The sums are over the clients k whose uploads contain the tensor. The weight of client k is w_k.

    This is federated averaging (McMahan et al., arXiv 1602.05629). Sums are in float64, and the
    result is in float32.
    """
    sums: dict[str, dict[str, Tensor]] = {}
    weights: dict[tuple[str, str], float] = {}
    for contribution in contributions:
        for group, tensors in contribution.groups.items():
            total = sums.setdefault(group, {})
            for name, tensor in tensors.items():
                if name in total:
                    total[name].add_(tensor, alpha=contribution.weight)
                else:
                    total[name] = tensor.to(torch.float64, copy=True).mul_(contribution.weight)
                weights[group, name] = weights.get((group, name), 0.0) + contribution.weight
    return {
        group: {n: (t / weights[group, n]).to(torch.float32) for n, t in total.items()}
        for group, total in sums.items()
    }


class Aggregation:
    """The aggregation of uploads according to a run's schema, transforms and reduction.

    All engines and all methods use this class.

    Args:
        schema: The fields that the method may send.
        transforms: The run's transforms, in encoding order.
        exchanges: The number of exchanges in which clients train.
    """

    def __init__(
        self, schema: Schema, transforms: Sequence[Transform] = (), exchanges: int = 1
    ) -> None:
        self._means, self._each = schema.reduced("mean"), schema.reduced("each")
        self.pipeline = Pipeline(transforms, schema, exchanges)
        self.schema = self.pipeline.schema
        """The fields that may be sent: the method's encoded fields, and the transforms' fields."""
        self.transforms = ServerTransforms(self.pipeline)
        """The transforms of the run on the server, with their states."""
        self._reduce = self.transforms.reduce if self.pipeline.reduction else weighted_mean

    def contribution(
        self, client: str, upload: Message, expected: Mapping[str, Shapes]
    ) -> Contribution:
        """Validate an upload and return the client's contribution to the mean.

        Args:
            client: The client's name.
            upload: The decoded upload.
            expected: The shapes that the upload must have, keyed by group and name.

        Raises:
            MessageError: If the shapes differ from `expected`, or a transform rejects the upload.
        """
        for group in sorted(self._means):
            check_shapes(upload[group], expected.get(group, {}))
        weight = self.transforms.weight(client, upload)
        return Contribution(client, upload.only(self._means).groups, weight)

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
                for group, tensors in contribution.groups.items():
                    held[group].update(tensors.keys())
                yield contribution

        return Message(round, self._reduce(counted()), {HELD: held})
