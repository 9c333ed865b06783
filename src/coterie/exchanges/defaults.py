"""Transforms that have keys of their own in the section `aggregation` of a run file."""

from collections.abc import Sequence

from coterie.errors import CoterieError
from coterie.exchanges.bounds import Bounds
from coterie.exchanges.optimiser import ServerOptimiser
from coterie.exchanges.spec import AggregationSpec, BoundsSpec
from coterie.exchanges.weights import TokenWeights
from coterie.messages import Schema
from coterie.transforms.contract import Reduction, Transform
from coterie.turn import TRAIN

KEYS = {
    Bounds.name: "largest_change, largest_norm and largest_weight",
    TokenWeights.name: "weights",
    ServerOptimiser.name: "optimiser",
}
"""The keys of the section `aggregation` that configure a transform, by the transform's name."""


def with_defaults(
    spec: AggregationSpec, listed: Sequence[Transform], schema: Schema
) -> tuple[Transform, ...]:
    """Return all transforms of a run.

    The listed transforms come first. The transforms configured by other keys of the section
    `aggregation` follow.

    Args:
        spec: The section `aggregation` of the run file.
        listed: The transforms in `aggregation.transforms`.
        schema: The fields that the method may send.
    """
    bounds = Bounds(**{key: getattr(spec, key) for key in BoundsSpec.model_fields})
    transforms = list(listed)
    if bounds != Bounds() or Bounds.name not in {transform.name for transform in listed}:
        transforms.append(bounds)
    if spec.weights == "tokens" and schema.averaged:
        transforms.append(TokenWeights())
    if spec.optimiser is not None:
        transforms.append(ServerOptimiser(optimiser=spec.optimiser))
    return tuple(transforms)


def check_once(listed: Sequence[Transform], every: Sequence[Transform]) -> None:
    """Check that no transform or phase occurs twice, and that at most one transform is a reduction.

    The phases are the training phase, and the phases that transforms add with the attribute
    `before`.

    Args:
        listed: The transforms in `aggregation.transforms`.
        every: All transforms of the run.

    Raises:
        CoterieError: If a transform or a phase occurs twice, or several transforms are reductions.
    """
    reductions = [t.name for t in listed if isinstance(t, Reduction)]
    if len(set(reductions)) > 1:
        raise CoterieError(
            "aggregation.transforms has several transforms that replace the mean "
            f"({', '.join(reductions)}); keep one of them."
        )
    phases = [TRAIN, *(phase for transform in every for phase in transform.before)]
    if repeated := [phase for number, phase in enumerate(phases) if phase in phases[:number]]:
        raise CoterieError(
            f"Two phases have the name {repeated[0]!r}. A phase in the attribute `before` of a "
            "transform needs a name that is not `train` (the training phase) and is not used "
            "again in any `before`; rename the phase in one transform."
        )
    names = [transform.name for transform in every]
    for number, transform in enumerate(every):
        if transform.name in names[:number]:
            raise CoterieError(
                f"aggregation.transforms has {transform.name!r} twice; keep one of them."
                if number < len(listed)
                else f"aggregation.transforms has {transform.name!r}, which is also configured "
                f"by {KEYS[transform.name]} in the section `aggregation`; keep one of the two."
            )
