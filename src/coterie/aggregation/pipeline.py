"""A run's transforms at work: at a client, and at the server.

Both sides know what a client last received. Transforms act on the difference from it, and it is
added again when a payload is decoded. What a side remembers of an exchange becomes final when the
client's upload counts: a client that undoes the exchange forgets it with its state, the server when
the next exchange begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from coterie.aggregation.transform import (
    Context,
    Memory,
    Reduction,
    Transform,
    encoded_schema,
    failure,
    run_hook,
)
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
from coterie.messages.message import is_finite
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets

T = TypeVar("T")
Memories = dict[str, Memory]
"""What one side remembers of one client, by transform and way."""
ON_CLIENT = ("encode", "decode", "answer")
ON_SERVER = ("encode", "decode", "tell", "collect", "reduce", "on_mean")
"""The hooks that can remember something, by where they work."""


@dataclass(frozen=True)
class Stage:
    """One transform of a run, at its place among the others."""

    key: str
    """Its name in states."""
    transform: Transform
    plain: frozenset[str]
    """The groups that it encodes."""
    encoded: frozenset[str]
    """The groups that these become on the wire."""

    def has(self, *hooks: str) -> bool:
        """Return whether the transform has one of these hooks of its own."""
        kind = type(self.transform)
        return any(
            getattr(kind, hook, None) is not getattr(Transform, hook, None) for hook in hooks
        )

    def call(self, hook: str, *args: Any, error: type[CoterieError] = CoterieError) -> Any:
        """Return what a hook returns; whatever it raises becomes one sentence."""
        return run_hook(self.transform, hook, *args, error=error)

    def call_for(self, kind: type[T], hook: str, *args: Any) -> T:
        """Return what a hook returns, which must be of this kind."""
        found = self.call(hook, *args, error=MessageError)
        if not isinstance(found, kind):
            raise self.failure(hook, f"returned {type(found).__name__}, not a {kind.__name__}.")
        return found

    def failure(self, hook: str, what: str) -> CoterieError:
        """Return an error that says what a hook has done wrong."""
        return CoterieError(failure(self.transform, hook, what))


class Pipeline:
    """The transforms of a run, in order.

    Args:
        transforms: the transforms, in the order in which they encode.
        schema: what the method may send.
        exchanges: the number of exchanges in which clients train.
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
        """What may be on the wire."""
        self.reduction = next((s for s in self.stages if isinstance(s.transform, Reduction)), None)
        self.down = any(stage.transform.downloads for stage in self.stages)
        """Whether downloads are encoded."""
        self.active = any(stage.plain or stage.has("tell") for stage in self.stages)
        """Whether messages are sent otherwise than the method makes them, declared values apart."""

    def having(self, *hooks: str) -> list[Stage]:
        """Return the stages whose transforms have one of these hooks."""
        return [stage for stage in self.stages if stage.has(*hooks)]

    def acting(self, way: Way) -> list[Stage]:
        """Return the stages that encode payloads of a way."""
        return [s for s in self.stages if s.plain and (way == "up" or s.transform.downloads)]

    def stage_of(self, phase: str) -> Stage:
        """Return the stage whose transform has a phase of its own."""
        return next(s for s in self.stages if phase in s.transform.before)

    def encode(self, groups: Groups, reference: Groups, about: "About") -> Groups:
        """Return what is sent in place of a message's groups.

        Args:
            groups: the tensors, by group and name.
            reference: what the client last received, by group and name.
            about: what transforms know.
        """
        stages = self.acting(about.way)
        groups = _moved(groups, self._relative(stages), reference, -1)
        for stage in stages:
            if stage.transform.sealed:  # it acts on values, as no reference is in their sum
                groups = _moved(groups, self._relative(stages) & stage.plain, reference, 1)
            plain = _only(groups, stage.plain)
            encoded = stage.call("encode", plain, about.of(stage))
            check_finite(stage, "encode", encoded)
            groups = {g: t for g, t in groups.items() if g not in plain} | dict(encoded)
        return groups

    def decode(self, groups: Groups, reference: Groups, about: "About") -> Groups:
        """Return the groups that `encode` was given; what is sealed keeps its code.

        Raises:
            MessageError: if a transform cannot decode what arrived.
        """
        stages = self.acting(about.way)
        opened = self._relative(stages)
        for stage in reversed(stages):
            if stage.transform.sealed:
                opened = opened - stage.plain
                continue
            encoded = _only(groups, stage.encoded)
            plain = stage.call("decode", encoded, about.of(stage), error=MessageError)
            check_finite(stage, "decode", plain)
            groups = {g: t for g, t in groups.items() if g not in encoded} | dict(plain)
        return _moved(groups, opened, reference, 1)

    @staticmethod
    def _relative(stages: Iterable[Stage]) -> frozenset[str]:
        """Return the groups of which stages are given differences."""
        plain = (stage.plain for stage in stages if not stage.transform.sealed)
        return frozenset[str]().union(*plain)


@dataclass(frozen=True)
class About:
    """What every transform knows beside its payload."""

    client: str
    exchange: int
    exchanges: int
    way: Way
    memories: Memories
    told: Mapping[str, Json] = field(default_factory=dict)
    secrets: Secrets | None = None
    ledger: Ledger | None = None

    def of(self, stage: Stage) -> Context:
        """Return what one transform knows."""
        memory = self.memories.setdefault(f"{stage.key}.{self.way}", Memory())
        told = self.told.get(stage.transform.name)
        rest = (self.exchange, self.exchanges, self.way, memory, told, self.secrets, self.ledger)
        return Context(self.client, *rest)


def _with_values(stage: Stage, schema: Schema) -> Schema:
    """Return a schema with the values that a transform declares, tells and answers."""
    value = Field(stage.transform.name, stage.transform.summary, "json")

    def added(fields: Sequence[Field], *hooks: str) -> tuple[Field, ...]:
        if not stage.has(*hooks):
            return tuple(fields)
        others = (f for f in fields if (f.name, f.dtype) != (value.name, "json"))
        return (*others, value)  # some methods have the value, too

    return Schema(
        added(schema.hello, "declare"),
        added(schema.up, "declare", "answer"),
        added(schema.down, "tell"),
    )


def _groups_of(schema: Schema) -> set[str]:
    return {f.name for f in (*schema.up, *schema.down) if f.dtype != "json"}


def _only(groups: Groups, names: frozenset[str]) -> dict[str, Tensors]:
    return {group: tensors for group, tensors in groups.items() if group in names}


def _moved(groups: Groups, names: frozenset[str], reference: Groups, sign: int) -> Groups:
    """Return groups, some of them moved by the reference of equal name and shape."""
    moved = dict(groups)
    for group in names & groups.keys():
        before = reference.get(group, {})
        moved[group] = {
            name: tensor + sign * before[name].detach().to(tensor.device)
            if name in before and before[name].shape == tensor.shape
            else tensor
            for name, tensor in groups[group].items()
        }
    return moved


def check_groups(stage: Stage, hook: str, groups: Groups) -> None:
    """Raise CoterieError unless a hook returned tensors by group and name."""
    if not (
        isinstance(groups, Mapping)
        and all(
            isinstance(tensors, Mapping) and all(isinstance(t, Tensor) for t in tensors.values())
            for tensors in groups.values()
        )
    ):
        what = f"returned {type(groups).__name__}, not tensors by group and name."
        raise stage.failure(hook, what)


def check_finite(stage: Stage, hook: str, groups: Groups) -> None:
    """Raise CoterieError unless a hook returned groups of finite tensors."""
    check_groups(stage, hook, groups)
    if not all(is_finite(t) for tensors in groups.values() for t in tensors.values()):
        raise stage.failure(hook, "returned values that are not finite.")


def check_alike(failing: str, groups: Groups, expected: Mapping[str, Shapes]) -> None:
    """Raise CoterieError unless groups have tensors of the expected names and shapes.

    Args:
        failing: the start of the sentence, up to what was returned.
        groups: tensors, by group and name.
        expected: shapes, by group and name.
    """
    for group in sorted(groups.keys() | expected.keys()):
        try:
            check_shapes(groups.get(group, {}), expected.get(group, {}))
        except MessageError as error:
            raise CoterieError(f"{failing} other tensors in {group!r}: {error}") from error


def shapes_of(groups: Groups) -> dict[str, Shapes]:
    """Return the shape of each tensor, by group and name."""
    return {
        group: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }
