"""The mean over clients: how a run's uploads become one message, whatever the method.

The only place where means are made. Everything that makes one (a rule, weights) sees a stream of
contributions in the order of names, so memory need not grow with the number of clients.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.aggregation.bounds import Bound, Measure, bounds_of, measured, scaled
from coterie.aggregation.ends import ServerTransforms
from coterie.aggregation.optimiser import ServerOptimiser
from coterie.aggregation.pipeline import Pipeline
from coterie.aggregation.spec import AggregationSpec
from coterie.aggregation.transform import Contribution, Transform
from coterie.messages import Field as Travels
from coterie.messages import Groups, Message, MessageError, Schema, Shapes, check_shapes

TOKENS = Travels("tokens", "number of training tokens, the client's weight in the mean", "json")
HELD = "held"
"""The value of a mean that says, by group and tensor, how many clients held it."""


Rule = Callable[[Iterable[Contribution]], Groups]
"""Makes one of many. A client that does not hold a tensor is left out of that tensor's."""


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
        spec: the section `aggregation` of the run file.
        schema: what the method declares.
        rule: what makes one of many.
        transforms: the run's transforms, in the order in which they encode.
        exchanges: the number of exchanges in which clients train.
    """

    def __init__(
        self,
        spec: AggregationSpec,
        schema: Schema,
        rule: Rule = weighted_mean,
        transforms: Sequence[Transform] = (),
        exchanges: int = 1,
    ) -> None:
        self._means, self._each = schema.reduced("mean"), schema.reduced("each")
        self._weighted = spec.weights == "tokens" and bool(self._means)
        self.schema = schema
        """What may travel: what the method declares, and what the mean needs beside it."""
        if self._weighted:
            hello = (field for field in schema.hello if field.name != TOKENS.name)
            self.schema = Schema((*hello, TOKENS), (*schema.up, TOKENS), schema.down)
        self.pipeline = Pipeline(transforms, self.schema, exchanges)
        self.schema = self.pipeline.schema
        self.transforms = ServerTransforms(self.pipeline)
        """On the server: its state is part of a checkpoint."""
        self.rule = rule if self.pipeline.reduction is None else self.transforms.reduce
        self.spec = spec
        self._most: dict[str, int] = {}
        """By client, the training tokens that its hello told of."""
        self._bounds: dict[str, Bound] = {}
        """By client, the bounds of the round in progress; without those who need none."""
        self.optimiser = None if spec.optimiser is None else ServerOptimiser(spec.optimiser)
        """On the server: its state is part of a checkpoint."""

    def sent(self, message: Message, tokens: int) -> Message:
        """On a client: its hello or upload, with what the mean needs."""
        if not self._weighted:
            return message
        return Message(message.round, message.groups, {**message.values, TOKENS.name: tokens})

    def join(self, client: str, hello: Message) -> None:
        """On the server: note a client's weight. Raises MessageError if it tells none."""
        if self._weighted or TOKENS.name in hello.values:  # some methods weigh for themselves
            self._most[client] = _tokens(client, hello)

    def measure(self, client: str, upload: Message, reference: Groups) -> Measure:
        """Return the sizes of an upload, which are compared with those of other uploads.

        Args:
            client: who sent it.
            upload: what was sent.
            reference: by group, the parameters that the client started the round from.
        """
        self.transforms.measure(client, upload)
        return measured(upload, reference, self._most.get(client, 1))

    def left_out(self, measures: Mapping[str, Measure]) -> dict[str, str]:
        """Set the bounds of a round; return the clients whose uploads are excluded, and why."""
        self._bounds = bounds_of(measures, self.spec)
        bounds = {name: bound.excluded for name, bound in self._bounds.items() if bound.excluded}
        return self.transforms.refuse(measures.keys()) | bounds

    def bounded(self, client: str, upload: Message, reference: Callable[[str], Groups]) -> Message:
        """Return an upload within the round's bounds: itself, unless it is one of a larger half.

        Args:
            client: who sent it.
            upload: what was sent.
            reference: returns the parameters that a client started the round from, by group.
        """
        bound = self._bounds.get(client, Bound())
        groups, values = upload.groups, upload.values
        if self._weighted and _tokens(client, upload) > bound.weight:
            values = {**values, TOKENS.name: int(bound.weight)}
        if bound.scales:
            groups = scaled(upload, reference(client), bound.scales)
        return replace(upload, groups=groups, values=values)

    def contribution(
        self, client: str, upload: Message, expected: Mapping[str, Shapes]
    ) -> Contribution:
        """What an upload adds to the mean; `expected`: by group, the shapes that it must have.

        Raises MessageError for other shapes, or for more weight than the client's hello told of.
        """
        for group in sorted(self._means):
            check_shapes(upload[group], expected.get(group, {}))
        weight = _tokens(client, upload) if self._weighted else 1
        if weight > self._most.get(client, weight):
            raise MessageError(
                f"{client} claims {weight:,} training tokens, but declared "
                f"{self._most[client]:,} when it joined."
            )
        return Contribution(client, upload.only(self._means).groups, float(weight))

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

        return Message(round, self.rule(counted()), {HELD: held})

    def stepped(self, mean: Message, before: Groups) -> Message:
        """Return what takes the place of parameters at the end of a round.

        It is their mean, after the transforms and the server optimiser of the run. Call it once for
        a round that counts.
        """
        groups = self.transforms.on_mean(mean.groups, before)
        if self.optimiser is not None:
            groups = self.optimiser.stepped(groups, before)
        return mean if groups is mean.groups else replace(mean, groups=groups)


def _tokens(client: str, message: Message) -> int:
    tokens = message.values.get(TOKENS.name)
    if type(tokens) is not int or tokens < 1:
        raise MessageError(f"{client} did not send its number of training tokens.")
    return tokens
