"""Messages and states: named groups of tensors and a little JSON, as safetensors, never as pickle.

A group is a mapping of names to tensors: `message["adapter"]`. What is not there is an empty group.
In the bytes a tensor is called `GROUP/NAME`, with the name of a peer or a part before the group:
`alice:adapter/NAME`. Nobody but this file reads these keys.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages.formats import check_format, version_fields

Json = Any
Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]
LARGEST_MESSAGE = 2**30
"""Bytes that are accepted: three full-rank updates of GPT-2's layers (see methods/exact.py)."""
LARGEST_HEADER = 2**23
"""Bytes of a message's names, shapes and values, which take up to 65 times as much when parsed."""
LAST_ROUND = 2**31
MOST_DIMENSIONS = 64
"""Of a tensor that torch can compute with."""
DEEPEST_PART = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""The name of a group, a peer or a part."""


class MessageError(CoterieError):
    """What arrived is not a message, or not one that the method declares."""


@dataclass(frozen=True)
class State:
    """What one side must keep to go on. It never travels.

    Groups of tensors, JSON values, and the states of what the side is made of, by name.
    """

    groups: Groups = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    parts: Mapping[str, "State"] = field(default_factory=dict)

    def __getitem__(self, group: str) -> Tensors:
        """The tensors of a group, by name; none where it is not there."""
        return self.groups.get(group, {})

    def walk(self, *path: str) -> "Iterator[tuple[tuple[str, ...], State]]":
        """This state and those inside it, each with its path."""
        yield path, self
        for name, part in self.parts.items():
            yield from part.walk(*path, name)

    def without(self, client: str) -> "State":
        """The same state without one client's part, and without what values have by its name."""
        values = {key: without(value, client) for key, value in self.values.items()}
        return State(self.groups, values, {n: p for n, p in self.parts.items() if n != client})

    def is_finite(self) -> bool:
        """Whether all numbers of its tensors and values are finite."""
        return all(_are_finite(state.values, state.groups) for _, state in self.walk())

    def encode(self) -> bytes:
        """As safetensors, the values in its header."""
        found = dict(self.walk())
        values = {":".join(path): dict(state.values) for path, state in found.items()}
        return _pack({path: state.groups for path, state in found.items()}, {"values": values})

    @classmethod
    def decode(cls, data: bytes) -> "State":
        """Read what `encode` wrote; raises MessageError for anything else."""
        found, header = _unpack(data, "A state", "Use the version that wrote it.")
        values: dict[str, Json] = header["values"]
        paths = [tuple(path.split(":")) if path else () for path in values]
        if (
            any(len(path) >= DEEPEST_PART for path in paths)
            or not all(NAME.fullmatch(name) for path in paths for name in path)
            or not all(isinstance(v, dict) for v in values.values())
        ):
            raise MessageError("The state contains values of unknown parts.")
        return _assembled({path: {} for path in paths} | found, values)


def without(value: Json, key: str) -> Any:
    """JSON less what stands under a key, however deep."""
    if isinstance(value, dict):
        return {name: without(inner, key) for name, inner in value.items() if name != key}
    return value


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any type holds finite numbers alone."""
    if not tensor.numel():  # perhaps of a shape beside the 0 that torch cannot compute with
        return True
    # torch tells finite from other only for some floats of 8 bits; float32 holds them all exactly.
    wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _are_finite(values: Mapping[str, Json], *found: Groups) -> bool:
    tensors = (t for groups in found for group in groups.values() for t in group.values())
    return all(map(is_finite, tensors)) and _has_finite_numbers(values)


def _has_finite_numbers(value: object) -> bool:
    """Whether no number in JSON, however deep, is infinite or NaN."""
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
    found: Mapping[tuple[str, ...], Groups], values: Mapping[str, Json], *path: str
) -> State:
    """The state at a path of all that were found, with its parts."""
    depth = len(path)
    below = {place: groups for place, groups in found.items() if place[:depth] == path}
    names = sorted({place[depth] for place in below if len(place) > depth})
    parts = {name: _assembled(below, values, *path, name) for name in names}
    return State(found.get(path, {}), values.get(":".join(path), {}), parts)


@dataclass(frozen=True)
class Message:
    """What travels between a client and the server: one down and one up per client and round."""

    round: int = 0
    groups: Groups = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    peers: Mapping[str, Groups] = field(default_factory=dict)
    """In a download that passes uploads on: the groups of other clients, by their names."""

    def __getitem__(self, group: str) -> Tensors:
        """The tensors of a group, by name; none where it is not there."""
        return self.groups.get(group, {})

    def from_peer(self, name: str) -> "Message":
        """What another client uploaded."""
        return Message(self.round, self.peers[name])

    def tensors(self) -> Iterator[tuple[str | None, str, str, Tensor]]:
        """Every tensor, with its peer (None: the sender's own), group and name."""
        everything = [(None, self.groups), *self.peers.items()]
        for peer, groups in everything:
            for group, tensors in groups.items():
                for name, tensor in tensors.items():
                    yield peer, group, name, tensor

    def is_finite(self) -> bool:
        """Whether all numbers of its tensors and values are finite."""
        return _are_finite(self.values, self.groups, *self.peers.values())

    def only(self, groups: Iterable[str]) -> Self:
        """The same message with no other groups than these."""
        kept = set(groups)
        return replace(self, groups={n: g for n, g in self.groups.items() if n in kept})

    def encode(self) -> bytes:
        """As safetensors, the round and the values in its header."""
        groups = {(): self.groups} | {(name,): groups for name, groups in self.peers.items()}
        return _pack(groups, {"round": self.round, "values": dict(self.values)})

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """Read what `encode` wrote; raises MessageError for anything else or too large."""
        if len(data) > LARGEST_MESSAGE:
            raise MessageError(f"The message has {len(data):,} bytes, more than the limit.")
        if _header_size(data) > LARGEST_HEADER:
            raise MessageError("The message's header exceeds the size limit.")
        found, header = _unpack(data, "A message", "Install the same version on both sides.")
        number = header.get("round")
        if type(number) is not int or not 0 <= number <= LAST_ROUND:
            raise MessageError("The message has no valid round number.")
        own = found.pop((), {})
        if any(len(path) > 1 for path in found):
            raise MessageError("The message contains parts of other clients' messages.")
        return cls(number, own, header["values"], {path[0]: g for path, g in found.items()})


def _pack(found: Mapping[tuple[str, ...], Groups], header: dict[str, Json]) -> bytes:
    whole: dict[str, Tensor] = {}
    for path, groups in found.items():
        for group, tensors in groups.items():
            prefix = ":".join((*path, group))
            assert all(map(NAME.fullmatch, (*path, group))), prefix
            for name, tensor in tensors.items():
                whole[f"{prefix}/{name}"] = tensor.detach().cpu().contiguous()
    text = json.dumps(version_fields() | header, allow_nan=False, sort_keys=True)
    return safetensors.torch.save(whole, {"coterie": text})


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _unpack(
    data: bytes, what: str, remedy: str
) -> tuple[dict[tuple[str, ...], dict[str, dict[str, Tensor]]], dict[str, Json]]:
    """Groups by path, and the header; raises MessageError, or FormatError as `check_format`."""
    try:
        tensors = safetensors.torch.load(data)  # also checks the layout of the header
        metadata = json.loads(data[8 : 8 + _header_size(data)])["__metadata__"]
        header = json.loads(metadata["coterie"], parse_float=_finite, parse_constant=_finite)
    # RuntimeError: torch's for a shape whose strides overflow, and Python's for deep nesting.
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MessageError("The bytes received are not a Coterie message.") from error
    if not isinstance(header, dict) or not isinstance(header.get("values"), dict):
        raise MessageError("The message's header lacks its values.")
    check_format(what, header, remedy)
    found: dict[tuple[str, ...], dict[str, dict[str, Tensor]]] = {}
    for key, tensor in sorted(tensors.items()):  # safetensors has them in any order
        if tensor.ndim > MOST_DIMENSIONS:
            raise MessageError("The message contains a tensor with too many dimensions.")
        place, slash, name = key.partition("/")
        *path, group = names = place.split(":")
        if not slash or len(names) > DEEPEST_PART or not all(map(NAME.fullmatch, names)):
            raise MessageError("The message contains a tensor that belongs to no group.")
        found.setdefault(tuple(path), {}).setdefault(group, {})[name] = tensor
    return found, header


def _finite(text: str) -> float:
    number = float(text)  # also of "NaN", "-Infinity" and "1e999", which Python's JSON lets through
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
