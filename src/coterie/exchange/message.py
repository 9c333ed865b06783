"""Messages and states: named tensors and a little JSON, as safetensors, never as pickle."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from coterie.errors import CoterieError

Json = Any
LARGEST_MESSAGE = 2**30
"""Bytes that are accepted: three full-rank updates of GPT-2's layers (see methods/exact.py)."""
LARGEST_HEADER = 2**23
"""Bytes of a message's names, shapes and values, which take up to 65 times as much when parsed."""
LAST_ROUND = 2**31
MOST_DIMENSIONS = 64
"""Of a tensor that torch can compute with."""


class MessageError(CoterieError):
    """What arrived is not a message, or not one that the method declares."""


@dataclass(frozen=True)
class State:
    """What one side must keep to go on: tensors by name, and JSON values. It never travels."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As safetensors, the values in its header."""
        return _pack(self.tensors, {"values": dict(self.values)})

    @classmethod
    def decode(cls, data: bytes) -> "State":
        """Read what `encode` wrote; raises MessageError for anything else."""
        tensors, header = _unpack(data)
        return cls(tensors, header["values"])


@dataclass(frozen=True)
class Message:
    """What travels between a client and the server: one down and one up per client and round."""

    round: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As safetensors, the round and the values in its header."""
        return _pack(self.tensors, {"round": self.round, "values": dict(self.values)})

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """Read what `encode` wrote; raises MessageError for anything else or too large."""
        if len(data) > LARGEST_MESSAGE:
            raise MessageError(f"A message of {len(data):,} bytes is larger than is accepted.")
        if _header_size(data) > LARGEST_HEADER:
            raise MessageError("A message's header is larger than is accepted.")
        tensors, header = _unpack(data)
        number = header.get("round")
        if type(number) is not int or not 0 <= number <= LAST_ROUND:
            raise MessageError("A message has no valid round number.")
        return cls(number, tensors, header["values"])


def _pack(tensors: Mapping[str, Tensor], header: Json) -> bytes:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"coterie": json.dumps(header, allow_nan=False, sort_keys=True)}
    return safetensors.torch.save(whole, metadata)


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, Json]]:
    try:
        tensors = safetensors.torch.load(data)  # also checks the layout of the header
        metadata = json.loads(data[8 : 8 + _header_size(data)])["__metadata__"]
        header = json.loads(metadata["coterie"], parse_float=_finite, parse_constant=_finite)
    # RuntimeError: torch's for a shape whose strides overflow, and Python's for deep nesting.
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MessageError("Bytes arrived that are not a Coterie message.") from error
    if not isinstance(header, dict) or not isinstance(header.get("values"), dict):
        raise MessageError("A message's header does not hold its values.")
    if any(tensor.ndim > MOST_DIMENSIONS for tensor in tensors.values()):
        raise MessageError("A message holds a tensor of too many dimensions.")
    return tensors, header


def _finite(text: str) -> float:
    number = float(text)  # also of "NaN", "-Infinity" and "1e999", which Python's JSON lets through
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
