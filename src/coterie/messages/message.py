"""Messages and states: named groups of tensors with a little JSON, stored as safetensors.

A group maps names to tensors: `message["adapter"]`. Reading a missing group gives an empty
mapping. In the encoded bytes, a tensor's key is `GROUP/NAME`. If the tensor belongs to a peer or to
a nested state, the key begins with the name of that peer or state, as in `alice:adapter/NAME`. Only
this file reads and writes these keys. Pickle is never used.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import safetensors
import safetensors.torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.files import check_nesting, parse_json
from coterie.memory import main_memory
from coterie.messages.formats import check_format, version_fields
from coterie.messages.host import are_finite, copied_to_host, on_host

Json = Any
Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]
LARGEST_MESSAGE = max(2**30, main_memory() // 8)
"""Maximum message size in bytes: an eighth of this machine's memory, but at least 1 GiB.

While a message is received and decoded, up to four copies of it are in memory.
"""
LARGEST_HEADER = min(LARGEST_MESSAGE // 128, 10**8)
"""Maximum header size in bytes; a parsed header takes up to 65 times as much memory.

safetensors reads headers of up to 100 MB.
"""
LAST_ROUND = 2**31
MOST_DIMENSIONS = 64
"""Maximum number of tensor dimensions that torch can compute with."""
DEEPEST_PART = 8
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""Valid names of groups, peers and nested states, which include all names of clients."""


class MessageError(CoterieError):
    """The bytes received are not a message, or the message does not match the method's schema."""


@dataclass(frozen=True)
class State:
    """The data that a client or a server needs to resume a run. A state is never sent.

    Args:
        groups: A mapping from names to groups of tensors. Each group is a mapping from the names of
            tensors to tensors of any dtype and shape.
        values: A mapping from names to JSON values.
        parts: A mapping from names to nested states, such as the optimiser's state or the state of
            each client. The names of nested states and groups consist of at most 100 letters,
            digits, dots, dashes and underscores.
    """

    groups: Groups = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    parts: Mapping[str, "State"] = field(default_factory=dict)

    def __getitem__(self, group: str) -> Tensors:
        """Return a group of tensors as a mapping from names to tensors.

        The mapping is empty if there is no such group.
        """
        return self.groups.get(group, {})

    def walk(self, *path: str) -> "Iterator[tuple[tuple[str, ...], State]]":
        """Yield this state and all nested states, each with its path.

        Args:
            *path: The path of this state; empty by default. The path of a nested state is this path
                followed by the names that lead from this state to the nested state.
        """
        yield path, self
        for name, part in self.parts.items():
            yield from part.walk(*path, name)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in this state and its nested states, in bytes."""
        groups = (group for _, state in self.walk() for group in state.groups.values())
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    def without(self, client: str) -> "State":
        """Return a copy that omits the client's entries in `values`.

        Args:
            client: The client's name. Keys that equal this name are removed from all mappings
                within `values`, but not from `values` itself.
        """
        values = {key: without(value, client) for key, value in self.values.items()}
        return State(self.groups, values, self.parts)

    def is_finite(self) -> bool:
        """Return whether all numbers in this state and its nested states are finite."""
        return all(_are_finite(state.values, state.groups) for _, state in self.walk())

    def encode(self) -> bytes:
        """Encode the state.

        Returns:
            A safetensors file whose header contains the values.

        Raises:
            ValueError: A value contains NaN or infinity, or is not JSON.
        """
        states = dict(self.walk())
        values = {":".join(path): dict(state.values) for path, state in states.items()}
        return _pack({path: state.groups for path, state in states.items()}, {"values": values})

    @classmethod
    def decode(cls, data: bytes) -> "State":
        """Decode a state.

        Args:
            data: Bytes written by `encode`.

        Raises:
            MessageError: The bytes are not a state.
            FormatError: The state was written by a version of Coterie that uses another format.
        """
        groups, header = _unpack(data, "A state", "Use the version that wrote it.")
        values: dict[str, Json] = header["values"]
        paths = [tuple(path.split(":")) if path else () for path in values]
        if (
            any(len(path) >= DEEPEST_PART for path in paths)
            or not all(NAME.fullmatch(name) for path in paths for name in path)
            or not all(isinstance(v, dict) for v in values.values())
        ):
            raise MessageError(
                "The state contains a nested state with an invalid path or invalid values."
            )
        return _assembled({path: {} for path in paths} | groups, values)


def without(value: Json, key: str) -> Any:
    """Copy a JSON value, and remove a key from all nested mappings in the copy."""
    if isinstance(value, dict):
        return {name: without(inner, key) for name, inner in value.items() if name != key}
    return value


def _are_finite(values: Mapping[str, Json], *all_groups: Groups) -> bool:
    tensors = (t for groups in all_groups for group in groups.values() for t in group.values())
    return are_finite(tensors) and _has_finite_numbers(values)


def _has_finite_numbers(value: object) -> bool:
    """Return whether all numbers in a JSON value are finite."""
    match value:
        case Mapping():
            return all(map(_has_finite_numbers, value.values()))
        case list() | tuple():
            return all(map(_has_finite_numbers, value))
        case float():
            return math.isfinite(value)
        case _:
            return True


def _assembled(
    groups: Mapping[tuple[str, ...], Groups], values: Mapping[str, Json], *path: str
) -> State:
    """Build the state at a path, including its nested states.

    Args:
        groups: A mapping from the paths of all states to the groups of the states.
        values: A mapping from the paths of all states to the values of the states. In this mapping,
            the components of a path are joined by colons.
        *path: The path of the state to build.
    """
    depth = len(path)
    below = {other: tensors for other, tensors in groups.items() if other[:depth] == path}
    names = sorted({other[depth] for other in below if len(other) > depth})
    parts = {name: _assembled(below, values, *path, name) for name in names}
    return State(groups.get(path, {}), values.get(":".join(path), {}), parts)


@dataclass(frozen=True)
class Message:
    """A message between a client and the server: a hello, a download or an upload.

    A client sends a hello when it joins the run. In one exchange, a client receives a download and
    then sends an upload. In most methods, a round consists of one exchange.

    Args:
        exchange: The number of the exchange to which the download or upload belongs; the first is
            0. In the download after the last exchange, it is the total number of exchanges. In a
            hello, it is 0.
        groups: A mapping from names to groups of tensors. Each group is a mapping from the names of
            tensors to tensors.
        values: A mapping from names to JSON values.
        peers: A mapping from the names of clients other than the receiver to the groups that these
            clients uploaded. The mapping is empty except in downloads that forward uploads.
    """

    exchange: int = 0
    groups: Groups = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    peers: Mapping[str, Groups] = field(default_factory=dict)

    def __getitem__(self, group: str) -> Tensors:
        """Return a group of tensors as a mapping from names to tensors.

        The mapping is empty if there is no such group.
        """
        return self.groups.get(group, {})

    def from_peer(self, name: str) -> "Message":
        """Return another client's upload, which this download forwards.

        Args:
            name: The other client's name, a key of `peers`.
        """
        return Message(self.exchange, self.peers[name])

    def tensors(self) -> Iterator[tuple[str | None, str, str, Tensor]]:
        """Yield every tensor as (peer, group, name, tensor).

        For tensors in `groups`, the peer is None. For tensors of a forwarded upload, the peer is
        the name of the client that uploaded them.
        """
        by_peer = [(None, self.groups), *self.peers.items()]
        for peer, groups in by_peer:
            for group, tensors in groups.items():
                for name, tensor in tensors.items():
                    yield peer, group, name, tensor

    def on_host(self) -> Self:
        """Return a copy whose tensors are detached and on the CPU; see `host.on_host`."""
        located = list(self.tensors())
        hosted = copied_to_host([tensor for *_, tensor in located])
        groups: dict[str | None, dict[str, dict[str, Tensor]]] = {
            peer: {group: {} for group in groups}
            for peer, groups in ((None, self.groups), *self.peers.items())
        }
        for (peer, group, name, _), tensor in zip(located, hosted, strict=True):
            groups[peer][group][name] = tensor
        return replace(self, groups=groups.pop(None), peers=groups)

    def is_finite(self) -> bool:
        """Return whether all numbers in tensors and values are finite."""
        return _are_finite(self.values, self.groups, *self.peers.values())

    def only(self, groups: Iterable[str]) -> Self:
        """Return a copy that keeps only some groups.

        Args:
            groups: Names of the groups to keep; the number, values and peers are always kept.
        """
        names = set(groups)
        return replace(self, groups={n: g for n, g in self.groups.items() if n in names})

    def encode(self) -> bytes:
        """Encode the message without checking it.

        The method `Schema.send` checks and encodes a message.

        Returns:
            A safetensors file whose header contains the number of the exchange and the values.

        Raises:
            ValueError: A value contains NaN or infinity, or is not JSON.
        """
        groups = {(): self.groups} | {(name,): groups for name, groups in self.peers.items()}
        return _pack(groups, {"exchange": self.exchange, "values": dict(self.values)})

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """Decode a message without checking its fields.

        The method `Schema.receive` decodes and checks a message.

        Args:
            data: Bytes written by `encode`.

        Raises:
            MessageError: The bytes are not a message, or exceed a size limit.
            FormatError: The sender's version of Coterie uses another message format.
        """
        if len(data) > LARGEST_MESSAGE:
            raise MessageError(
                f"The message has {len(data):,} bytes; at most {LARGEST_MESSAGE:,} are accepted."
            )
        if _header_size(data) > LARGEST_HEADER:
            raise MessageError(f"The message's header has more than {LARGEST_HEADER:,} bytes.")
        by_path, header = _unpack(data, "A message", "Install the same version on both sides.")
        number = header.get("exchange")
        if type(number) is not int or not 0 <= number <= LAST_ROUND:
            raise MessageError("The message has no valid number of an exchange.")
        groups = by_path.pop((), {})
        if any(len(path) > 1 for path in by_path):
            raise MessageError(
                "The message forwards another client's upload, which contains nested groups; these "
                "are not allowed."
            )
        return cls(number, groups, header["values"], {path[0]: g for path, g in by_path.items()})


def _pack(by_path: Mapping[tuple[str, ...], Groups], header: dict[str, Json]) -> bytes:
    keyed: dict[str, Tensor] = {}
    for path, groups in by_path.items():
        for group, tensors in groups.items():
            prefix = ":".join((*path, group))
            assert all(map(NAME.fullmatch, (*path, group))), prefix
            for name, tensor in tensors.items():
                keyed[f"{prefix}/{name}"] = tensor
    keyed = {key: tensor.contiguous() for key, tensor in on_host(keyed).items()}
    seen: set[int] = set()
    for key, tensor in keyed.items():  # safetensors refuses tensors that share memory
        if tensor.numel() and tensor.data_ptr() in seen:
            keyed[key] = tensor.clone()
        seen.add(tensor.data_ptr())
    text = json.dumps(version_fields() | header, allow_nan=False, sort_keys=True)
    return safetensors.torch.save(keyed, {"coterie": text})


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _unpack(
    data: bytes, source: str, remedy: str
) -> tuple[dict[tuple[str, ...], dict[str, dict[str, Tensor]]], dict[str, Json]]:
    """Decode the bytes of a message or a state.

    Returns:
        A pair. The first item is a mapping from paths to groups of tensors. The second item is the
        header.

    Raises:
        MessageError: The bytes are not a message or a state.
        FormatError: The bytes were written by a version of Coterie that uses another format.
    """
    try:
        tensors = safetensors.torch.load(data)  # also checks the layout of the header
        metadata = parse_json(data[8 : 8 + _header_size(data)])["__metadata__"]
        check_nesting(metadata["coterie"])
        header = json.loads(metadata["coterie"], parse_float=_finite, parse_constant=_finite)
    # torch raises RuntimeError if strides overflow.
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MessageError("The bytes received are not a Coterie message.") from error
    if not isinstance(header, dict) or not isinstance(header.get("values"), dict):
        raise MessageError("The message's header has no `values`.")
    check_format(source, header, remedy)
    by_path: dict[tuple[str, ...], dict[str, dict[str, Tensor]]] = {}
    for key, tensor in sorted(tensors.items()):  # safetensors returns them in any order
        if tensor.ndim > MOST_DIMENSIONS:
            raise MessageError(
                f"The message contains a tensor with {tensor.ndim} dimensions; at most "
                f"{MOST_DIMENSIONS} are accepted."
            )
        prefix, slash, name = key.partition("/")
        *path, group = names = prefix.split(":")
        if not slash or len(names) > DEEPEST_PART or not all(map(NAME.fullmatch, names)):
            raise MessageError("The message contains a tensor that belongs to no group.")
        by_path.setdefault(tuple(path), {}).setdefault(group, {})[name] = tensor
    return by_path, header


def _finite(text: str) -> float:
    number = float(text)  # Python's JSON parser accepts "NaN", "-Infinity" and "1e999"
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
