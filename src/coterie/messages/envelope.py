"""What stands around a message between machines: which run and round it is for, and what to do.

An envelope is a small JSON header and the message's bytes. Headers hold nothing of a client's text.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.messages import names as metric
from coterie.messages.message import LAST_ROUND, Json, MessageError
from coterie.messages.schema import plain

LARGEST_HEADER = 2**24
"""Bytes; a header holds a run's description, or a round's entries where they are shared."""
Kind = Literal["join", "step", "finish", "end"]
"""`finish` gives the result; `end` tells that an error ended the run."""
Fault = Literal[
    "unknown run",
    "refused",
    "failed",
    "diverged",
    "protocol",
    "base",
    "unable",
    "plugin",
    "public",
    "terms",
    "budget",
]
"""Why a client has no upload."""
FAULT_MESSAGES: dict[Fault, str] = {
    "refused": "it rejected the message; see its log",
    "failed": "an error occurred on its machine; see its log",
    "diverged": "its loss or its upload is not finite; a lower training.learning_rate may help",
    "protocol": "it runs another version of Coterie; install the same version on both sides",
    "base": "its base has different weights than the run's",
    "unable": "an error on its machine keeps it from joining, and it has left; see its log",
    "plugin": "it lacks the run's plugin, or has another version of it",
    "public": "it has no copy of the run's public text, or a different one",
    "terms": "nobody there has agreed to this run as it is",
    "budget": "it would spend more of its privacy budget than it allows",
}
"""What a server says of a fault; who must join first is asked to."""
LEAVES: tuple[Fault, ...] = ("unable", "terms", "budget")
"""Faults after which a client leaves."""


OF_SERVER = (metric.BYTES, metric.SECONDS, metric.SERVER, metric.CHANGE, metric.LEFT_OUT)
"""How names of entries begin that are the server's to record."""


class PluginFile(BaseModel):
    """The file that a method is from, where that is no part of Coterie; the file stays at home."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str = Field(max_length=255)
    """its name, without a path"""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Coterie's own run id"""
    client: str = Field(max_length=64)
    kind: Kind
    round: int = Field(ge=0, le=LAST_ROUND)


class Order(_Header):
    """From the server: join the run, do the step of a round, finish, or end without a result; the
    body is a download.

    What other protocols add is passed over, so that a client can say that they are others.
    """

    model_config = ConfigDict(extra="ignore")

    counted: int | None = None
    """The last round in which the server counted this client's upload."""
    protocol: int = 1
    """What the server speaks; see exchange/formats.py."""
    base: str = ""
    """Hash of the weights that the others have, if anybody has joined."""
    plugins: dict[str, PluginFile] | None = None
    """The plugins that the method, transforms, ... are from, by noun and name; to join only."""
    public: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Hash of the run's public text, if it has one; to join only."""
    config: dict[str, Json] | None = None
    """The run, without anybody's paths; to join only."""


class Entry(BaseModel):
    """What a client logged: a line of metrics.jsonl."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    round: int = Field(ge=0, le=LAST_ROUND)
    client: str | None = Field(default=None, max_length=64)
    name: str = Field(max_length=200)
    value: Json = None

    @model_validator(mode="after")
    def _draws(self) -> Self:
        fits = FITS.get(self.name.partition("/")[0], plain)
        if not (plain(self.value) and fits(self.value)):
            raise ValueError("it is not an entry")
        return self

    @property
    def is_from_client(self) -> bool:
        """Whether it is of a client, and of nothing that the server records itself."""
        return self.client is not None and not self.name.startswith(OF_SERVER)


def _is_number(value: Json) -> bool:
    return type(value) in (int, float)


def _is_round(value: Json) -> bool:
    return type(value) is int and 0 <= value <= LAST_ROUND


def _are_numbers(value: Json) -> bool:
    """Whether it is numbers by name, or None where there is none."""
    return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())


def _is_array(value: Json) -> bool:
    """Whether it is numbers in lists, to any depth."""
    return isinstance(value, list) and all(_is_number(v) or _is_array(v) for v in value)


def _is_score(value: Json) -> bool:
    """Whether it is what reports draw: entries by name, at least those that every text has."""
    return (
        isinstance(value, dict)
        and {"perplexity", "bits_per_byte"} <= value.keys()
        and all(type(number) in (int, float) for number in value.values())
    )


FITS: dict[str, Callable[[Json], bool]] = {
    metric.LOSS: _is_number,
    metric.REWARDS: _are_numbers,
    metric.SECONDS: _is_number,
    metric.KEPT: _is_round,
    metric.TEST: _is_score,
    metric.TRUST: _are_numbers,
    metric.RANK: _are_numbers,
    metric.TAUGHT: _are_numbers,
    metric.ROUTING: _is_array,
    metric.FUSION: _is_array,
}
"""What tables and reports draw, by the first part of an entry's name, and what it must be."""
FITS |= {name.removesuffix("/"): fits for name, fits in FITS.items()}


class Reply(_Header):
    """From a client: the answer to an order; the body is a hello or an upload."""

    fault: Fault | None = None
    base: str = ""
    """Hash of the base's weights, in the answer to join."""
    stops: bool | None = None
    """Whether the client takes no part in further rounds (`evaluation.patience`); else left out."""
    entries: list[Entry] | None = None
    """What was logged, where the run shares metrics."""


H = TypeVar("H", bound=_Header)


def seal(header: _Header, body: bytes = b"") -> bytes:
    """Header and message as bytes."""
    text = json.dumps(header.model_dump(exclude_none=True), allow_nan=False).encode()
    return len(text).to_bytes(4, "big") + text + body


def unseal(kind: type[H], data: bytes) -> tuple[H, bytes]:
    """What `seal` wrote; raises MessageError for anything else."""
    end = 4 + int.from_bytes(data[:4], "big")
    if not 4 < end <= min(len(data), LARGEST_HEADER):
        raise MessageError("The bytes received are not a Coterie envelope.")
    try:
        values: Any = json.loads(data[4:end])
        return kind.model_validate(values), data[end:]
    except (ValidationError, ValueError, RecursionError) as error:
        raise MessageError("The bytes received are not a Coterie envelope.") from error
