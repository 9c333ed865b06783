"""Envelopes of messages between machines: headers with the run, the round and the request.

An envelope is a small JSON header followed by the message's bytes. A header contains none of a
client's text.
"""

import json
from collections.abc import Callable
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.files import parse_json
from coterie.messages import names as metric
from coterie.messages.message import LAST_ROUND, Json, MessageError
from coterie.messages.schema import plain

LARGEST_HEADER = 2**24
"""Maximum header size in bytes; a header holds a run's description or a round's metrics."""
Kind = Literal["join", "step", "finish", "end"]
"""Kind of the server's order: `finish` delivers the result; `end` reports a run that failed."""
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
    "declined",
    "limits",
    "budget",
]
"""Reason why a client sends no upload."""
FAULT_MESSAGES: dict[Fault, str] = {
    "refused": "the client rejected the server's message; see the client's log",
    "failed": "an error occurred on the client's machine; see the client's log",
    "diverged": "the client's loss or upload is not finite; a lower training.learning_rate may "
    "help",
    "protocol": "the client runs another version of Coterie; install the same version on both "
    "sides",
    "base": "the weights of the client's base differ from those of the run's base",
    "unable": "the client left because of an error on its machine; see the client's log",
    "plugin": "the run's plugin is missing on the client's machine, or has another version",
    "public": "the public text on the client's machine is missing, or differs from the run's "
    "public text",
    "terms": "this run differs from the run file that was agreed to on the client's machine",
    "declined": "the client's user declined to take part",
    "limits": "the run exceeds a limit of the client's machine; see the client's log",
    "budget": "the run would exceed the client's privacy budget",
}
"""Text that the server shows for each fault.

`unknown run` has no text, because the client then joins again.
"""
LEAVES: tuple[Fault, ...] = ("unable", "terms", "declined", "limits", "budget")
"""Faults after which a client leaves the run."""


def fault_in_words(client: str, kind: Kind, fault: Fault) -> str:
    """Return a sentence on the fault in a client's reply to an order, without its full stop."""
    if fault == "declined":
        return f"{client} declined to take part in the run"
    if fault == "diverged":
        return f"{client} diverged: {FAULT_MESSAGES[fault]}"
    return f"{client} could not {'train' if kind == 'step' else kind}: {FAULT_MESSAGES[fault]}"


SERVER_METRICS = (metric.BYTES, metric.SECONDS, metric.SERVER, metric.CHANGE, metric.LEFT_OUT)
"""Prefixes of the metrics that only the server records."""
MOST_EXPERTS = 1 << 16
"""An upper bound of the indices of experts in metrics."""


class PluginFile(BaseModel):
    """A plugin's file, identified by name and hash; its content is not sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str = Field(max_length=255)
    """File name without its folder."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Coterie's run id."""
    client: str = Field(max_length=64)
    kind: Kind
    turn: int = Field(ge=0, le=LAST_ROUND)
    """The number of the turn; see `coterie.turn.Turn`."""


class Order(_Header):
    """The header of an envelope with a server's order to a client.

    The kind of the order is `join` (join the run), `step` (take part in a turn), `finish` (receive
    the result of the finished run) or `end` (abandon the run, because it failed). The envelope's
    body is a download if the kind is `step` or `finish`, and empty if it is `join` or `end`.

    Unknown fields, which a server with another protocol version may add, are ignored, so that the
    client can report the difference in versions.
    """

    model_config = ConfigDict(extra="ignore")

    counted: int | None = None
    """The last turn in which the server used this client's upload."""
    protocol: int = 1
    """The server's protocol version; see messages/formats.py."""
    base: str = ""
    """Hash of the weights of the joined clients' base; empty until the first client has joined."""
    plugins: dict[str, PluginFile] | None = None
    """Files of the run's plugins, by the keys of `plugins` in run.json; set only for `join`."""
    clients: int | None = Field(default=None, ge=1)
    """The number of the run's clients, to compute the size of downloads; set only for `join`."""
    public: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Hash of the run's public text, if the run has one; set only for `join`."""
    config: dict[str, Json] | None = None
    """The run file without paths of any participant; set only for `join`."""


class Entry(BaseModel):
    """A metric logged by a client: one line of metrics.jsonl."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    round: int = Field(ge=0, le=LAST_ROUND)
    client: str | None = Field(default=None, max_length=64)
    name: str = Field(max_length=200)
    value: Json = None

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        is_valid = VALUE_CHECKS.get(self.name.partition("/")[0], plain)
        if not (plain(self.value) and is_valid(self.value)):
            raise ValueError("the value is invalid for this metric")
        return self

    @property
    def is_from_client(self) -> bool:
        """Whether the entry is a metric that a client may report about itself.

        Such an entry names a client, and its metric is not in `SERVER_METRICS`, because these
        metrics are reserved for the server.
        """
        return self.client is not None and not self.name.startswith(SERVER_METRICS)


def _is_number(value: Json) -> bool:
    return type(value) in (int, float)


def _is_round(value: Json) -> bool:
    return type(value) is int and 0 <= value <= LAST_ROUND


def _is_mapping_of_numbers(value: Json) -> bool:
    """Return whether a value maps each name to a number, or to None if the number is missing."""
    return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())


def _is_array(value: Json) -> bool:
    """Return whether a value is a list of numbers or a nested list of numbers."""
    return isinstance(value, list) and all(_is_number(v) or _is_array(v) for v in value)


def _is_assignment(value: Json) -> bool:
    """Return whether a value maps each client to a list of the indices of experts."""
    return isinstance(value, dict) and all(
        isinstance(ids, list) and all(type(i) is int and 0 <= i < MOST_EXPERTS for i in ids)
        for ids in value.values()
    )


def _is_score(value: Json) -> bool:
    """Return whether a value maps metrics to numbers, and includes perplexity and bits per byte."""
    return (
        isinstance(value, dict)
        and {"perplexity", "bits_per_byte"} <= value.keys()
        and all(type(number) in (int, float) for number in value.values())
    )


VALUE_CHECKS: dict[str, Callable[[Json], bool]] = {
    metric.LOSS: _is_number,
    metric.REPLAY: _is_number,
    metric.DRIFT: _is_number,
    metric.BYTES: _is_number,
    metric.CHANGE: _is_mapping_of_numbers,
    metric.LEFT_OUT: lambda value: isinstance(value, str),
    metric.VALIDATION: lambda value: _is_number(value) or _is_mapping_of_numbers(value),
    metric.ASSIGNMENT: _is_assignment,
    metric.REWARDS: _is_mapping_of_numbers,
    metric.SECONDS: _is_number,
    metric.KEPT: _is_round,
    metric.TEST: _is_score,
    metric.TRUST: _is_mapping_of_numbers,
    metric.RANK: _is_mapping_of_numbers,
    metric.CLUSTER: _is_round,
    metric.TAUGHT: _is_mapping_of_numbers,
    metric.ROUTING: _is_array,
    metric.FUSION: _is_array,
}
"""Functions that check the values of metrics. The keys are names or prefixes of metrics.

These metrics are displayed in tables and reports.
"""
VALUE_CHECKS |= {name.removesuffix("/"): is_valid for name, is_valid in VALUE_CHECKS.items()}


class Reply(_Header):
    """The header of an envelope with a client's reply to an order.

    In a reply to `join`, the envelope's body is the message declared by `Schema.hello`. In a reply
    to `step`, the body is an upload.
    """

    fault: Fault | None = None
    base: str = ""
    """Hash of the base's weights, in a reply to `join`."""
    stops: bool | None = None
    """True if the client will skip all later rounds (`evaluation.patience`), otherwise None."""
    entries: list[Entry] | None = None
    """Metrics that the client logged, if the run shares metrics."""


H = TypeVar("H", bound=_Header)


def seal(header: _Header, body: bytes = b"") -> bytes:
    """Serialise a header and a message's bytes as one envelope."""
    text = json.dumps(header.model_dump(exclude_none=True), allow_nan=False).encode()
    return len(text).to_bytes(4, "big") + text + body


def unseal(kind: type[H], data: bytes) -> tuple[H, bytes]:
    """Split an envelope into its header and its message's bytes.

    Args:
        kind: Class of the header: `Order` or `Reply`.
        data: The bytes received.

    Raises:
        MessageError: The bytes are not an envelope with a header of this class.
    """
    end = 4 + int.from_bytes(data[:4], "big")
    if not 4 < end <= min(len(data), LARGEST_HEADER):
        raise MessageError("The bytes received are not a Coterie envelope.")
    try:
        return kind.model_validate(parse_json(data[4:end])), data[end:]
    except (ValidationError, ValueError, RecursionError) as error:
        raise MessageError("The bytes received are not a Coterie envelope.") from error
