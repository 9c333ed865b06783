"""The mean over clients: how a run's uploads become one message, whatever the method.

The only place where means are made. Everything that makes one (the mean, a transform that takes its
place) sees a stream of contributions in the order of names, so memory need not grow with the number
of clients.
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
"""The value of a mean that says, by group and tensor, how many clients held it."""


def weighted_mean(contributions: Iterable[Contribution]) -> Groups:
    """Federated averaging (McMahan et al., arXiv 1602.05629): `sum_k w_k x_k / sum_k w_k`.

    Summed in float64, one client at a time, and returned in float32.
    """
    sums: dict[str, dict[str, Tensor]] = {}
    weights: dict[tuple[str, str], float] = {}
    for one in contributions:
        for group, tensors in one.groups.items():
            total = sums.setdefault(group, {})
            for name, tensor in tensors.items():
                if name in total:
                    total[name].add_(tensor, alpha=one.weight)
                else:
                    total[name] = tensor.to(torch.float64, copy=True).mul_(one.weight)
                weights[group, name] = weights.get((group, name), 0.0) + one.weight
    return {
        group: {n: (t / weights[group, n]).to(torch.float32) for n, t in total.items()}
        for group, total in sums.items()
    }


class Aggregation:
    """A run's way from uploads to a mean, on both sides; one for all engines and methods.

    Args:
        schema: what the method declares.
        transforms: the run's transforms, in the order in which they encode.
        exchanges: the number of exchanges in which clients train.
    """

    def __init__(
        self, schema: Schema, transforms: Sequence[Transform] = (), exchanges: int = 1
    ) -> None:
        self._means, self._each = schema.reduced("mean"), schema.reduced("each")
        self.pipeline = Pipeline(transforms, schema, exchanges)
        self.schema = self.pipeline.schema
        """What may travel: what the method declares, and what transforms need beside it."""
        self.transforms = ServerTransforms(self.pipeline)
        """On the server: its state is part of a checkpoint."""
        self._reduce = self.transforms.reduce if self.pipeline.reduction else weighted_mean

    def contribution(
        self, client: str, upload: Message, expected: Mapping[str, Shapes]
    ) -> Contribution:
        """What an upload adds to the mean; `expected`: by group, the shapes that it must have.

        Raises MessageError for other shapes, or if a transform refuses its weight.
        """
        for group in sorted(self._means):
            check_shapes(upload[group], expected.get(group, {}))
        weight = self.transforms.weight(client, upload)
        return Contribution(client, upload.only(self._means).groups, weight)

    def each(self, upload: Message) -> Message:
        """The part of an upload that the method's server side gets as it is."""
        return upload.only(self._each)

    def mean(self, round: int, contributions: Iterable[Contribution]) -> Message:
        """The mean of a round's contributions, with how many clients held each tensor."""
        held: dict[str, Counter[str]] = defaultdict(Counter)

        def counted() -> Iterable[Contribution]:
            for one in contributions:
                for group, tensors in one.groups.items():
                    held[group].update(tensors.keys())
                yield one

        return Message(round, self._reduce(counted()), {HELD: held})
