"""The transforms that keys of the section `aggregation` name: bounds, weights, optimiser."""

from collections.abc import Sequence

from coterie.aggregation.bounds import Bounds
from coterie.aggregation.optimiser import ServerOptimiser
from coterie.aggregation.spec import AggregationSpec, BoundsSpec
from coterie.aggregation.transform import TRAIN, Reduction, Transform
from coterie.aggregation.weights import TokenWeights
from coterie.errors import CoterieError
from coterie.messages import Schema

KEYS = {
    Bounds.name: "largest_change, largest_norm and largest_weight",
    TokenWeights.name: "weights",
    ServerOptimiser.name: "optimiser",
}
"""The keys that name a transform, too."""


def with_defaults(
    spec: AggregationSpec, listed: Sequence[Transform], schema: Schema
) -> tuple[Transform, ...]:
    """Return all transforms of a run: the listed ones, then those that other keys name.

    Args:
        spec: the section `aggregation` of the run file.
        listed: its `transforms`.
        schema: what the method declares.
    """
    bounds = Bounds(**{key: getattr(spec, key) for key in BoundsSpec.model_fields})
    found = list(listed)
    if bounds != Bounds() or Bounds.name not in {transform.name for transform in listed}:
        found.append(bounds)
    if spec.weights == "tokens" and schema.reduced("mean"):
        found.append(TokenWeights())
    if spec.optimiser is not None:
        found.append(ServerOptimiser(optimiser=spec.optimiser))
    return tuple(found)


def check_once(listed: Sequence[Transform], every: Sequence[Transform]) -> None:
    """Raise CoterieError if a run has a transform or a phase twice, or replaces the mean twice.

    Args:
        listed: the transforms in `aggregation.transforms`.
        every: all transforms of the run.
    """
    reductions = [t.name for t in listed if isinstance(t, Reduction)]
    if len(set(reductions)) > 1:
        raise CoterieError(
            "aggregation.transforms has several transforms that replace the mean "
            f"({', '.join(reductions)}); keep one of them."
        )
    phases = [TRAIN, *(phase for transform in every for phase in transform.before)]
    if twice := [phase for number, phase in enumerate(phases) if phase in phases[:number]]:
        raise CoterieError(
            f"The phase {twice[0]!r} of a round is of two transforms, or of a transform and of "
            "training; rename it."
        )
    names = [transform.name for transform in every]
    for number, transform in enumerate(every):
        if transform.name in names[:number]:
            raise CoterieError(
                f"aggregation.transforms has {transform.name!r} twice; keep one of them."
                if number < len(listed)
                else f"aggregation.transforms has {transform.name!r}, which the keys "
                f"{KEYS[transform.name]} of aggregation name, too; keep one of both."
            )
