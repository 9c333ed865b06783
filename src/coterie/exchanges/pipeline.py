"""The pipeline of a run's transforms, which encodes and decodes payloads.

Client and server both store the *reference*: the parameters that the client last received.
Transforms encode the difference from the reference. When a payload is decoded, the reference is
added again. The state of an exchange becomes permanent when the client's upload is accepted.
Otherwise, the client restores its previous state, and the server discards the new state when the
next exchange starts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.errors import CoterieError
from coterie.exchanges.weights import TOKENS
from coterie.messages import Field, Groups, MessageError, Schema, Shapes, Tensors, check_shapes
from coterie.messages.host import are_finite
from coterie.messages.schema import Way
from coterie.transforms.contract import Context, Memory, Reduction, Transform
from coterie.transforms.hooks import encoded_schema, failure, run_hook

Memories = dict[str, Memory]
"""A mapping from transform and direction to the state of the transform for one client. The client
and the server each have their own mapping.
"""


@dataclass(frozen=True)
class Stage:
    """A transform in a pipeline."""

    key: str
    """The key of the transform's state in checkpoints."""
    transform: Transform
    plain: frozenset[str]
    """The groups that the transform encodes."""
    encoded: frozenset[str]
    """The groups that contain the tensors after encoding."""

    def has(self, *hooks: str) -> bool:
        """Return whether the transform overrides at least one of these hooks."""
        kind = type(self.transform)
        return any(getattr(kind, hook) is not getattr(Transform, hook) for hook in hooks)

    def call(self, hook: str, *args: Any, error: type[CoterieError] = CoterieError) -> Any:
        """Call a hook of the transform through `run_hook`, and return the hook's result."""
        return run_hook(self.transform, hook, *args, error=error)

    def failure(self, hook: str, problem: str) -> CoterieError:
        """Return an exception that reports a faulty hook."""
        return CoterieError(failure(self.transform, hook, problem))


Contexts = Callable[[Stage], Context]
"""A function that returns the context of a transform's hooks for one payload."""


class Pipeline:
    """The transforms of a run, in encoding order.

    Args:
        transforms: The transforms, in encoding order.
        schema: The fields that the method may send.
        exchanges: The number of exchanges in which clients train.
        weighted: Whether clients declare their numbers of training tokens as their weights.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        schema: Schema,
        exchanges: int,
        *,
        weighted: bool = False,
    ) -> None:
        self.exchanges, self.weighted = exchanges, weighted
        self.stages: list[Stage] = []
        for i, transform in enumerate(transforms):
            plain = frozenset(run_hook(transform, "covered", schema))
            after = encoded_schema(transform, schema)
            added = _groups_of(after) - _groups_of(schema)
            stage = Stage(f"{i}-{transform.name}", transform, plain, plain | added)
            self.stages.append(stage)
            schema = _with_values(stage, after)
        if weighted:
            hello, up = _added(schema.hello, TOKENS), _added(schema.up, TOKENS)
            schema = replace(schema, hello=hello, up=up)
        self.schema = schema
        """The fields that may be sent, after encoding."""
        self.reduction = next((s for s in self.stages if isinstance(s.transform, Reduction)), None)
        self.down = any(stage.transform.downloads for stage in self.stages)
        """Whether downloads are encoded."""
        self.active = any(stage.plain or stage.has("tell") for stage in self.stages)
        """Whether transforms change messages."""

    def stages_encoding(self, way: Way) -> list[Stage]:
        """Return the stages that encode payloads in the direction `up` or `down`."""
        return [s for s in self.stages if s.plain and (way == "up" or s.transform.downloads)]

    def stage_of(self, phase: str) -> Stage:
        """Return the stage whose transform declares a phase."""
        phases = ((s, (*s.transform.before, *s.transform.after)) for s in self.stages)
        return next(stage for stage, names in phases if phase in names)

    def encode(self, groups: Groups, reference: Groups, way: Way, contexts: Contexts) -> Groups:
        """Encode the tensors of a message.

        Args:
            groups: The tensors, keyed by group and name.
            reference: The tensors that the client last received, keyed by group and name.
            way: The direction of the message.
            contexts: A function that returns the context of a stage's hooks.
        """
        stages = self.stages_encoding(way)
        groups = _shifted(groups, self._relative(stages), reference, -1)
        for stage in stages:
            if stage.transform.sealed:  # a sum of differences from different references is useless
                groups = _shifted(groups, self._relative(stages) & stage.plain, reference, 1)
            plain = _only(groups, stage.plain)
            encoded = stage.call("encode", plain, contexts(stage))
            check_finite(stage, "encode", encoded)
            groups = {g: t for g, t in groups.items() if g not in plain} | dict(encoded)
        return groups

    def decode(self, groups: Groups, reference: Groups, way: Way, contexts: Contexts) -> Groups:
        """Decode the tensors of a message.

        If a sealed transform encoded a group, the group stays encoded (see `Transform.sealed`).

        Args:
            groups: The received tensors, keyed by group and name.
            reference: The tensors that the client last received, keyed by group and name.
            way: The direction of the message.
            contexts: A function that returns the context of a stage's hooks.

        Raises:
            MessageError: If a transform cannot decode the tensors.
        """
        stages = self.stages_encoding(way)
        decoded = self._relative(stages)
        for stage in reversed(stages):
            if stage.transform.sealed:
                decoded = decoded - stage.plain
                continue
            encoded = _only(groups, stage.encoded)
            plain = stage.call("decode", encoded, contexts(stage), error=MessageError)
            check_finite(stage, "decode", plain)
            groups = {g: t for g, t in groups.items() if g not in encoded} | dict(plain)
        return _shifted(groups, decoded, reference, 1)

    @staticmethod
    def _relative(stages: Iterable[Stage]) -> frozenset[str]:
        """Return the names of the groups that are encoded as differences from a reference.

        The reference consists of the tensors that the client last received. A group is left out if
        all transforms that encode it are sealed, because sealed transforms encode tensors rather
        than differences.
        """
        plain = (stage.plain for stage in stages if not stage.transform.sealed)
        return frozenset[str]().union(*plain)


def _with_values(stage: Stage, schema: Schema) -> Schema:
    """Extend a schema with the JSON values that a transform adds to messages."""
    transform = stage.transform
    value = Field(transform.name, transform.summary, "json")
    if stage.has("answer"):
        schema = replace(schema, up=_added(schema.up, value))
    if stage.has("tell"):
        if transform.forwards:
            value = replace(value, description=transform.forwards, peers=True)
        schema = replace(schema, down=_added(schema.down, value))
    return schema


def _added(fields: Iterable[Field], value: Field) -> tuple[Field, ...]:
    """Add a JSON value, which replaces a value of the same name that the method declares."""
    return (*(f for f in fields if (f.name, f.dtype) != (value.name, "json")), value)


def _groups_of(schema: Schema) -> set[str]:
    return {f.name for f in (*schema.up, *schema.down) if f.dtype != "json"}


def _only(groups: Groups, names: frozenset[str]) -> dict[str, Tensors]:
    return {group: tensors for group, tensors in groups.items() if group in names}


def _shifted(groups: Groups, names: frozenset[str], reference: Groups, sign: int) -> Groups:
    """Add `sign` times the reference to the tensors of some groups.

    A tensor is returned unchanged if the reference has no tensor of the same name and shape.

    Args:
        groups: The tensors, keyed by group and name.
        names: The names of the groups to change.
        reference: The tensors to add, keyed by group and name.
        sign: 1 to add the reference, -1 to subtract it.
    """
    shifted = dict(groups)
    for group in names & groups.keys():
        before = reference.get(group, {})
        shifted[group] = {
            name: tensor + sign * before[name].detach()
            if name in before and before[name].shape == tensor.shape
            else tensor
            for name, tensor in groups[group].items()
        }
    return shifted


def check_groups(stage: Stage, hook: str, groups: Groups) -> None:
    """Raise CoterieError unless a hook returned a mapping from group and name to tensors."""
    if not (
        isinstance(groups, Mapping)
        and all(
            isinstance(tensors, Mapping) and all(isinstance(t, Tensor) for t in tensors.values())
            for tensors in groups.values()
        )
    ):
        problem = f"returned {type(groups).__name__}, not a mapping from group and name to tensors."
        raise stage.failure(hook, problem)


def check_finite(stage: Stage, hook: str, groups: Groups) -> None:
    """Raise CoterieError unless a hook returned a mapping from group and name to finite tensors."""
    check_groups(stage, hook, groups)
    if not are_finite(t for tensors in groups.values() for t in tensors.values()):
        raise stage.failure(hook, "returned values that are not finite.")


def check_same_shapes(prefix: str, groups: Groups, expected: Mapping[str, Shapes]) -> None:
    """Check that tensors have the expected groups, names and shapes.

    Args:
        prefix: The start of the error message.
        groups: The tensors, keyed by group and name.
        expected: The shapes, keyed by group and name.

    Raises:
        CoterieError: If the groups, names or shapes differ from `expected`.
    """
    for group in sorted(groups.keys() | expected.keys()):
        try:
            check_shapes(groups.get(group, {}), expected.get(group, {}))
        except MessageError as error:
            raise CoterieError(f"{prefix} wrong tensors in the group {group!r}: {error}") from error


def shapes_of(groups: Groups) -> dict[str, Shapes]:
    """Return the shape of each tensor, keyed by group and name."""
    return {
        group: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }
