"""A run's transforms at work: at a client, and at the server.

Both sides know what a client last received. Transforms act on the difference from it, and it is
added again when a payload is decoded. What a side remembers of an exchange becomes final when the
client's upload counts: a client that undoes the exchange forgets it with its state, the server when
the next exchange begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.aggregation.transform import (
    Context,
    Memory,
    Reduction,
    Transform,
)
from coterie.errors import CoterieError
from coterie.messages import Field, Groups, Json, MessageError, Schema, Tensors
from coterie.messages.message import is_finite
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets

Memories = dict[str, Memory]
"""What one side remembers of one client, by transform and way."""


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

    def call(self, hook: str, *args: Any, error: type[CoterieError] = CoterieError) -> Any:
        """Return what a hook returns; whatever it raises becomes one sentence."""
        try:
            return getattr(self.transform, hook)(*args)
        except CoterieError:
            raise
        except Exception as cause:
            kind = type(cause).__name__
            raise error(f"{self}: {hook} raised {kind}: {cause}") from cause

    def __str__(self) -> str:
        """The transform in an error message."""
        return f"The transform {self.transform.name!r} failed"


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
            plain = frozenset(transform.covered(schema))
            after = _with_values(transform, transform.schema(schema))
            added = _groups_of(after) - _groups_of(schema)
            self.stages.append(Stage(f"{i}-{transform.name}", transform, plain, plain | added))
            schema = after
        self.schema = schema
        """What may be on the wire."""
        self.reduction = next((s for s in self.stages if isinstance(s.transform, Reduction)), None)
        self.down = any(stage.transform.downloads for stage in self.stages)
        """Whether downloads are encoded."""

    def acting(self, way: Way) -> list[Stage]:
        """Return the stages that encode payloads of a way."""
        return [s for s in self.stages if way == "up" or s.transform.downloads]

    def stage_of(self, phase: str) -> Stage:
        """Return the stage whose transform has a phase of its own."""
        return next(s for s in self.stages if phase in (*s.transform.before, *s.transform.after))

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


def _with_values(transform: Transform, schema: Schema) -> Schema:
    """Return a schema with the values that a transform tells and answers."""
    value, kind = Field(transform.name, transform.summary, "json"), type(transform)
    if kind.tell is not Transform.tell:
        schema = replace(schema, down=(*schema.down, value))
    if kind.answer is not Transform.answer:
        schema = replace(schema, up=(*schema.up, value))
    return schema


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


def check_finite(stage: Stage, hook: str, groups: Groups) -> None:
    """Raise CoterieError unless a hook returned groups of finite tensors."""
    try:
        finite = all(is_finite(t) for tensors in groups.values() for t in tensors.values())
    except (AttributeError, TypeError):
        raise CoterieError(
            f"{stage}: {hook} returned {type(groups).__name__}, not tensors by group and name."
        ) from None
    if not finite:
        raise CoterieError(f"{stage}: {hook} returned values that are not finite.")
