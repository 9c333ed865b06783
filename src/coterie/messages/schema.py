"""Schemas: the fields that a method may send, and the checks of every message against them.

Each method declares one schema. A message with an undeclared field is refused twice: by the sender,
before any byte leaves the machine, and by the receiver, before the content reaches a model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coterie.messages.host import are_finite
from coterie.messages.message import Json, Message, MessageError, Tensors

Way = Literal["hello", "up", "down"]
Reduce = Literal["mean", "rows", "each"]
Shapes = Mapping[str, tuple[int, ...]]
DEEPEST = 32
"""Maximum nesting of lists and mappings in a value; deeper nesting could exhaust Python's stack."""


@dataclass(frozen=True)
class Field:
    """A group of tensors, or a JSON value, that may be sent.

    Args:
        name: Name of the group or value in the message.
        description: A few words about the content, shown by audits and consent prompts.
        dtype: A torch dtype such as `"float32"` permits tensors of any name with this dtype. A
            mapping from tensor names to dtypes permits only the tensors that it lists. `"json"`
            permits a value made of numbers, text, lists and mappings, instead of tensors.
        reduce: Used only for uploads. With `"mean"`, the server's method object receives the mean
            over clients. With `"rows"`, it receives several means whose weights it chooses, such as
            one mean for each client; see `Exchange.means`. With `"each"`, it receives every
            client's upload. If the server needs a group in several forms, the schema contains one
            field of this name for each form.
        peers: Used only for downloads. If true, the field contains single values that other
            clients uploaded, and its description says which; consent prompts and audits show it to
            the clients that send these values. Tensors are then sent in `Message.peers`.
        of: Used only for downloads. Names of the upload fields from which the server computes the
            field. By default, this is the upload field of the same name, if there is one.
        copies: Function of a shared parameter (an `adapters.Parameter`) and the number of the run's
            clients. It returns the maximum number of tensors with the parameter's shape in this
            field of a message. The default is 1 or, with `peers`, the number of other clients.
        grows: Whether the tensors are low-rank factors whose rank grows in every exchange by the
            sum of the clients' LoRA ranks, up to the full rank.
        when: A few words on how often the field is sent, shown by audits and consent prompts. Not
            used for fields of the first message of a client, which is sent once.
        exclusive: Whether no message has both this field and an exclusive field with another value
            of `when`.
    """

    name: str
    description: str
    dtype: str | Mapping[str, str] = "float32"
    reduce: Reduce = "each"
    peers: bool = False
    of: tuple[str, ...] | None = None
    copies: Callable[[Any, int], int] | None = dataclasses.field(default=None, compare=False)
    grows: bool = False
    when: str = "every exchange"
    exclusive: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the upload fields from which the server computes this download field."""
        return (self.name,) if self.of is None else self.of

    def allows(self, name: str, dtype: str) -> bool:
        """Return whether the group may contain a tensor of this name and dtype.

        Args:
            name: Name of the tensor within the group.
            dtype: Name of the tensor's dtype without `torch.`, such as `float32`.
        """
        allowed = self.dtype if isinstance(self.dtype, str) else self.dtype.get(name)
        return allowed == dtype


@dataclass(frozen=True)
class Schema:
    """All fields that a method may send.

    Args:
        hello: Fields of the message that a client sends once, when it joins.
        up: Fields of uploads.
        down: Fields of downloads.
    """

    hello: tuple[Field, ...] = ()
    up: tuple[Field, ...] = ()
    down: tuple[Field, ...] = ()

    def reduced(self, reduce: Reduce) -> set[str]:
        """Return the names of the upload fields that have a given reduction.

        Args:
            reduce: `"mean"` for fields that are averaged over clients, `"rows"` for fields that are
                averaged with several sets of weights, `"each"` for fields that the server's method
                object receives from each client separately.
        """
        return {field.name for field in self.up if field.reduce == reduce}

    @property
    def averaged(self) -> set[str]:
        """The names of the upload fields whose reduction is `mean` or `rows`."""
        return self.reduced("mean") | self.reduced("rows")

    def described(self) -> dict[str, list[str]]:
        """Return the descriptions of all fields that clients send, by how often they are sent."""
        return by_frequency((*(replace(field, when="once") for field in self.hello), *self.up))

    def forwarded(self) -> dict[str, list[str]]:
        """Return the descriptions of single clients' values that reach others, by how often."""
        return by_frequency(field for field in self.down if field.peers)

    def check(self, way: Way, message: Message) -> None:
        """Check that a message contains only declared fields with valid content.

        Args:
            way: The kind of message: `"hello"` (a client's message when it joins), `"up"` (an
                upload) or `"down"` (a download).
            message: The message to be sent, or received.

        Raises:
            MessageError: A tensor or value is not declared for this kind of message, has another
                dtype, or is not finite. The error is also raised if a value contains integers of
                more than 64 bits or is nested too deeply.
        """
        fields: tuple[Field, ...] = getattr(self, way)
        for peer, group, name, tensor in message.tensors():
            dtype = str(tensor.dtype).removeprefix("torch.")
            declared = (f for f in fields if f.name == group and f.peers == (peer is not None))
            if not any(field.allows(name, dtype) for field in declared):
                raise MessageError(
                    f"The tensor {name!r} ({dtype}) of the group {group!r} may not be sent: the "
                    f"method's schema does not declare it for `{way}` messages."
                )
            if not are_finite([tensor]):
                raise MessageError(
                    f"The tensor {name!r} of the group {group!r} contains non-finite values."
                )
        for name, value in message.values.items():
            if not any(f.dtype == "json" and f.name == name for f in fields):
                raise MessageError(
                    f"The value {name!r} may not be sent: the method's schema does not declare it "
                    f"for `{way}` messages."
                )
            if not plain(value):
                raise MessageError(
                    f"The value {name!r} contains non-finite numbers or integers beyond 64 "
                    f"bits, or is nested more than {DEEPEST} levels deep."
                )

    def send(self, way: Way, message: Message) -> bytes:
        """Check a message that is about to be sent, and return it encoded.

        This method does not send the message; the caller sends the returned payload.

        Args:
            way: The kind of message: `"hello"` (a client's message when it joins), `"up"` (an
                upload) or `"down"` (a download).
            message: The message to encode.

        Returns:
            The payload, which is the encoded message.

        Raises:
            MessageError: The message fails `check`.
        """
        message = replace(message, peers=dict(message.peers))  # reads files once
        self.check(way, message)
        return message.encode()

    def receive(self, way: Way, data: bytes) -> Message:
        """Decode a payload and check the message.

        Args:
            way: The kind of message: `"hello"` (a client's message when it joins), `"up"` (an
                upload) or `"down"` (a download).
            data: The payload.

        Raises:
            MessageError: The bytes are not a message, or the message fails `check`.
            FormatError: The sender's version of Coterie uses another message format.
        """
        message = Message.decode(data)
        self.check(way, message)
        return message


def by_frequency(fields: Iterable[Field]) -> dict[str, list[str]]:
    """Return the descriptions of fields, without repetitions, by how often they are sent."""
    described: dict[str, list[str]] = {}
    for field in fields:
        texts = described.setdefault(field.when, [])
        if field.description not in texts:  # a group that the server needs in several forms
            texts.append(field.description)
    return described


def check_shapes(tensors: Tensors, expected: Shapes) -> None:
    """Check that a group contains exactly the expected tensors.

    Args:
        tensors: The tensors of the group, as received.
        expected: A mapping from the name of each tensor to its shape.

    Raises:
        MessageError: A tensor is missing, is not expected, or has another shape.
    """
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
    """Return whether a value is plain JSON: text, finite 64-bit numbers, lists and mappings.

    Args:
        value: The value to check.
        levels: Maximum nesting of lists and mappings.
    """
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
