"""The pipeline of a run's transforms, which encodes and decodes payloads.

Client and server both store the *reference*: the parameters that the client last received.
Transforms encode the difference from the reference. When a payload is decoded, the reference is
added again. The state of an exchange becomes permanent when the client's upload is accepted.
Otherwise, the client restores its previous state, and the server discards the new state when the
next exchange starts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages import (
    Field,
    Groups,
    Json,
    MessageError,
    Schema,
    Shapes,
    Tensors,
    check_shapes,
)
from coterie.messages.host import are_finite
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets
from coterie.transforms.contract import (
    Context,
    Memory,
    Reduction,
    Transform,
)
from coterie.transforms.hooks import encoded_schema, failure, run_hook

T = TypeVar("T")
Memories = dict[str, Memory]
"""A mapping from transform and direction to the state of the transform for one client. The client
and the server each have their own mapping.
"""
ON_CLIENT = ("encode", "decode", "answer")
"""The hooks that run on a client and can use the transform's memory on the client."""
ON_SERVER = ("encode", "decode", "tell", "collect", "refuse", "reduce", "on_mean")
"""The hooks that run on the server and can use the transform's memory on the server."""


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
        return any(
            getattr(kind, hook, None) is not getattr(Transform, hook, None) for hook in hooks
        )

    def call(self, hook: str, *args: Any, error: type[CoterieError] = CoterieError) -> Any:
        """Call a hook of the transform through `run_hook`, and return the hook's result."""
        return run_hook(self.transform, hook, *args, error=error)

    def call_for(self, kind: type[T], hook: str, *args: Any) -> T:
        """Call a hook, check that the result is an instance of `kind`, and return the result."""
        result = self.call(hook, *args, error=MessageError)
        if not isinstance(result, kind):
            raise self.failure(hook, f"returned {type(result).__name__}, not a {kind.__name__}.")
        return result

    def failure(self, hook: str, problem: str) -> CoterieError:
        """Return an exception that reports a faulty hook."""
        return CoterieError(failure(self.transform, hook, problem))


class Pipeline:
    """The transforms of a run, in encoding order.

    Args:
        transforms: The transforms, in encoding order.
        schema: The fields that the method may send.
        exchanges: The number of exchanges in which clients train.
    """

    def __init__(self, transforms: Sequence[Transform], schema: Schema, exchanges: int) -> None:
        self.exchanges = exchanges
        self.stages: list[Stage] = []
        for i, transform in enumerate(transforms):
            plain = frozenset(run_hook(transform, "covered", schema))
            after = encoded_schema(transform, schema)
            added = _groups_of(after) - _groups_of(schema)
            stage = Stage(f"{i}-{transform.name}", transform, plain, plain | added)
            self.stages.append(stage)
            schema = _with_values(stage, after)
        self.schema = schema
        """The fields that may be sent, after encoding."""
        self.reduction = next((s for s in self.stages if isinstance(s.transform, Reduction)), None)
        self.down = any(stage.transform.downloads for stage in self.stages)
        """Whether downloads are encoded."""
        self.active = any(stage.plain or stage.has("tell") for stage in self.stages)
        """Whether transforms change messages, apart from adding declared values."""

    def stages_with(self, *hooks: str) -> list[Stage]:
        """Return the stages whose transforms override at least one of these hooks."""
        return [stage for stage in self.stages if stage.has(*hooks)]

    def stages_encoding(self, way: Way) -> list[Stage]:
        """Return the stages that encode payloads in the direction `up` or `down`."""
        return [s for s in self.stages if s.plain and (way == "up" or s.transform.downloads)]

    def stage_of(self, phase: str) -> Stage:
        """Return the stage whose transform declares a phase."""
        return next(s for s in self.stages if phase in s.transform.before)

    def encode(self, groups: Groups, reference: Groups, contexts: "Contexts") -> Groups:
        """Encode the tensors of a message.

        Args:
            groups: The tensors, keyed by group and name.
            reference: The tensors that the client last received, keyed by group and name.
            contexts: The contexts of the hooks.
        """
        stages = self.stages_encoding(contexts.way)
        groups = _shifted(groups, self._relative(stages), reference, -1)
        for stage in stages:
            if stage.transform.sealed:  # a sum of differences from different references is useless
                groups = _shifted(groups, self._relative(stages) & stage.plain, reference, 1)
            plain = _only(groups, stage.plain)
            encoded = stage.call("encode", plain, contexts.of(stage))
            check_finite(stage, "encode", encoded)
            groups = {g: t for g, t in groups.items() if g not in plain} | dict(encoded)
        return groups

    def decode(self, groups: Groups, reference: Groups, contexts: "Contexts") -> Groups:
        """Decode the tensors of a message.

        If a sealed transform encoded a group, the group stays encoded (see `Transform.sealed`).

        Args:
            groups: The received tensors, keyed by group and name.
            reference: The tensors that the client last received, keyed by group and name.
            contexts: The contexts of the hooks.

        Raises:
            MessageError: If a transform cannot decode the tensors.
        """
        stages = self.stages_encoding(contexts.way)
        decoded = self._relative(stages)
        for stage in reversed(stages):
            if stage.transform.sealed:
                decoded = decoded - stage.plain
                continue
            encoded = _only(groups, stage.encoded)
            plain = stage.call("decode", encoded, contexts.of(stage), error=MessageError)
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


@dataclass(frozen=True)
class Contexts:
    """The contexts of all hooks for one payload."""

    client: str
    exchange: int
    exchanges: int
    way: Way
    memories: Memories
    server_values: Mapping[str, Json] = field(default_factory=dict)
    secrets: Secrets | None = None
    ledger: Ledger | None = None

    def of(self, stage: Stage) -> Context:
        """Return the context of one transform's hooks."""
        return Context(
            stage.transform.name,
            self.client,
            self.exchange,
            self.exchanges,
            self.way,
            self.memories.setdefault(f"{stage.key}.{self.way}", Memory()),
            self.server_values.get(stage.transform.name),
            self.secrets,
            self.ledger,
        )


def _with_values(stage: Stage, schema: Schema) -> Schema:
    """Extend a schema with the JSON values that a transform adds to messages."""
    transform = stage.transform
    value = Field(transform.name, transform.summary, "json")
    forwarded = replace(value, description=transform.forwards, peers=True)

    def added(fields: Sequence[Field], value: Field, *hooks: str) -> tuple[Field, ...]:
        if not stage.has(*hooks):
            return tuple(fields)
        # Some methods declare this value, too.
        others = (f for f in fields if (f.name, f.dtype) != (value.name, "json"))
        return (*others, value)

    return Schema(
        added(schema.hello, value, "declare"),
        added(schema.up, value, "declare", "answer"),
        added(schema.down, forwarded if transform.forwards else value, "tell"),
    )


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
