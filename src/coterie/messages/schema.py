"""What a method lets travel, and the checks on everything that is sent or arrives.

A schema is declared once per method. A message with anything else in it is refused twice: by the
sender, before its bytes leave, and by the receiver, before they touch a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coterie.messages.message import Json, Message, MessageError, Tensors, is_finite

Way = Literal["hello", "up", "down"]
Reduce = Literal["mean", "each"]
Shapes = Mapping[str, tuple[int, ...]]
DEEPEST = 32
"""Levels of lists and mappings in a value: more than any needs, and no strain on recursion."""


@dataclass(frozen=True)
class Field:
    """A group of tensors, or a value, that may travel."""

    name: str
    description: str
    """What that is, in a few words for the reader of an audit."""
    dtype: str | Mapping[str, str] = "float32"
    """A torch dtype for the group's tensors; or the names that it may have, each with its dtype;
    or `json` for a value (numbers, names, lists and mappings)."""
    reduce: Reduce = "each"
    """Of an upload: whether the server's side gets the mean over clients, or each client's. A group
    of which it needs both has two fields."""
    peers: bool = False
    """Of a download: whether it holds the other clients', each under its name."""

    def allows(self, name: str, dtype: str) -> bool:
        """Whether a tensor of this name and dtype may be in the group."""
        wanted = self.dtype if isinstance(self.dtype, str) else self.dtype.get(name)
        return wanted == dtype


@dataclass(frozen=True)
class Schema:
    """Every field that a method may send, by direction."""

    hello: tuple[Field, ...] = ()
    up: tuple[Field, ...] = ()
    down: tuple[Field, ...] = ()

    def reduced(self, reduce: Reduce) -> set[str]:
        """The groups of an upload that reach the server's side as a mean, or one by one."""
        return {field.name for field in self.up if field.reduce == reduce}

    def check(self, way: Way, message: Message) -> None:
        """Raise MessageError unless every part of the message is declared for this direction."""
        fields: tuple[Field, ...] = getattr(self, way)
        for peer, group, name, tensor in message.tensors():
            dtype = str(tensor.dtype).removeprefix("torch.")
            declared = (f for f in fields if f.name == group and f.peers == (peer is not None))
            if not any(field.allows(name, dtype) for field in declared):
                raise MessageError(
                    f"The tensor {name!r} ({dtype}) of the group {group!r} may not be sent ({way})."
                )
            if not is_finite(tensor):
                raise MessageError(
                    f"The tensor {name!r} of the group {group!r} contains non-finite values."
                )
        for name, value in message.values.items():
            if not any(f.dtype == "json" and f.name == name for f in fields):
                raise MessageError(f"The value {name!r} may not be sent ({way}).")
            if not plain(value):
                raise MessageError(
                    f"The value {name!r} contains non-finite numbers or integers beyond 64 "
                    f"bits, or is nested more than {DEEPEST} levels deep."
                )

    def send(self, way: Way, message: Message) -> bytes:
        """The bytes of a message, once it is sure that all of it may travel."""
        self.check(way, message)
        return message.encode()

    def receive(self, way: Way, data: bytes) -> Message:
        """The message in some bytes that arrived, if all of it may travel this way."""
        message = Message.decode(data)
        self.check(way, message)
        return message


def check_shapes(tensors: Tensors, expected: Shapes) -> None:
    """Raise MessageError unless a group holds exactly the expected tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() ^ expected.keys()):
        fault = "is missing from" if name in expected else "was not expected in"
        raise MessageError(f"The tensor {name!r} {fault} the message.")
    for name, shape in shapes.items():
        if shape != tuple(expected[name]):
            raise MessageError(
                f"The tensor {name!r} has shape {shape}, but {tuple(expected[name])} was expected."
            )


def plain(value: Json, levels: int = DEEPEST) -> bool:
    """Whether a value is text, finite numbers of 64 bits, and not too deep lists and mappings."""
    match value:
        case dict():
            return levels > 0 and all(plain(v, levels - 1) for v in value.values())
        case list() | tuple():
            return levels > 0 and all(plain(v, levels - 1) for v in value)
        case float():
            return math.isfinite(value)
        case int():
            return -(2**63) <= value < 2**63
        case _:
            return isinstance(value, str | None)
