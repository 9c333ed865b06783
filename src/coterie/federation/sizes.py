"""Sizes of a run's largest messages, computed from the schema and the shapes of parameters.

With these sizes, a run with messages that are too large is refused before the first round. The run
would otherwise fail in the round of the first such message.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import Literal, NamedTuple

import torch
from torch import nn

from coterie.adapters import Parameter, detach, pairs_of
from coterie.config.run import RunConfig
from coterie.errors import CoterieError, plural
from coterie.federation.pipeline import pipeline_of
from coterie.messages import Field, Schema, message
from coterie.methods.adapter import AdapterMethod
from coterie.training.context import ClientId

Way = Literal["up", "down"]
ENTRY = 128
"""An upper bound on the bytes of a tensor's entry in a message's header, without names."""
LONGEST_NAME = 64
"""The maximum length of a client's name."""
VALUES = 2**16
"""An allowance for the bytes of a message's JSON values."""
MiB = 2**20


class Size(NamedTuple):
    """An upper bound on the size of a message, in bytes."""

    total: int
    header: int
    """The part of `total` for the names and shapes of tensors, and for JSON values."""

    @property
    def tensors(self) -> int:
        """The part of `total` for the values of tensors."""
        return self.total - self.header


@dataclass(frozen=True)
class MessageSizes:
    """The schema, parameters and numbers that determine the sizes of a client's messages."""

    schema: Schema
    """The fields of messages, after the run's transforms have encoded them."""
    shared: Mapping[str, Parameter]
    """The client's shared parameters, by name."""
    clients: int
    """The number of the run's clients."""
    exchanges: int
    """The number of exchanges in the run."""

    def largest(self, way: Way) -> Size:
        """Return an upper bound on the sizes of the client's uploads or downloads.

        Groups whose tensors are not shaped like parameters, such as predictions, are not counted.
        """
        fields = self.schema.up if way == "up" else self.schema.down
        # A group that the server needs in several forms has several fields, but is sent once.
        alternatives: dict[str, list[Size]] = {"": []}
        for field in {(f.name, f.peers): f for f in fields}.values():
            case = field.when if field.exclusive else ""
            alternatives.setdefault(case, []).append(self._size(field))
        always = alternatives.pop("")
        sizes = [*always, *max(alternatives.values(), key=_bytes, default=[])]
        header = VALUES + sum(size.header for size in sizes)
        return Size(header + _bytes(sizes), header)

    def _size(self, field: Field) -> Size:
        if not isinstance(field.dtype, str) or field.dtype == "json":
            return Size(0, 0)
        counts = dict.fromkeys(self.shared, self.clients - 1 if field.peers else 1)
        if field.copies is not None:
            counts = {n: field.copies(p, self.clients) for n, p in self.shared.items()}
        numbers = sum(count * self.shared[n].tensor.numel() for n, count in counts.items())
        if field.grows:
            numbers = self.grown()
        entry = ENTRY + len(field.name) + field.peers * LONGEST_NAME
        return Size(
            numbers * getattr(torch, field.dtype).itemsize,
            sum(count * (entry + len(name)) for name, count in counts.items()),
        )

    def grown(self) -> int:
        """Return the number of values in the factors of all pairs at the end of the run.

        In each exchange, a product's rank grows by the sum of the clients' LoRA ranks, up to the
        smaller dimension of the layer's weight.
        """
        numbers = 0
        for a, b in pairs_of(self.shared):
            (rank, columns), rows = a.tensor.shape, len(b.tensor)
            rank = min(self.exchanges * self.clients * rank, rows, columns)
            numbers += rank * (rows + columns)
        return numbers


def _bytes(sizes: Iterable[Size]) -> int:
    return sum(size.total for size in sizes)


def message_sizes(
    config: RunConfig, parameters: Mapping[str, Parameter], clients: int
) -> MessageSizes:
    """Return the sizes of a client's messages.

    Args:
        config: The run.
        parameters: The client's parameters, by name.
        clients: The number of the run's clients.
    """
    shared = {name: p for name, p in parameters.items() if config.method.shared(p)}
    return MessageSizes(pipeline_of(config).schema, shared, clients, config.exchanges)


def check_run(
    config: RunConfig,
    base: nn.Module,
    clients: Sequence[ClientId],
    folder: Path,
    largest_upload: float = math.inf,
) -> None:
    """Check the sizes of messages, and of a round's uploads on disk, before clients are created.

    Only an `AdapterMethod` is checked: the parameters of other methods depend on clients' data.

    Args:
        config: The run.
        base: The run's base, whose tensors may be on the meta device. Its adapters are detached.
        clients: The names of the clients.
        folder: The folder in which a round's uploads are stored.
        largest_upload: The value of `deployment.largest_message` in bytes, in a deployment.

    Raises:
        CoterieError: A message, or all uploads of a round, may be too large.
    """
    method = config.method
    if not isinstance(method, AdapterMethod):
        return
    detach(base)
    for client in method.representatives(tuple(clients)):
        parameters = method.adapter(base, config.seed, client).parameters()
        sizes = message_sizes(config, parameters, len(clients))
        check_messages(sizes, largest_upload)
        uploads, free = len(clients) * sizes.largest("up").total, disk_usage(folder).free
        if uploads > free:
            raise CoterieError(
                f"The uploads of a round may need {_text(uploads)} in {folder.resolve()}, where "
                f"only {_text(free)} are free; delete files there, or use another folder (TMPDIR "
                "sets the temporary folder)."
            )


def check_messages(
    sizes: MessageSizes, largest_upload: float = math.inf, largest_download: float = math.inf
) -> None:
    """Refuse a run in which a message may be larger than its receiver accepts.

    Args:
        sizes: The sizes of a client's messages.
        largest_upload: The value of `deployment.largest_message` in bytes, in a deployment.
        largest_download: The largest message that the network transfers, in bytes.

    Raises:
        CoterieError: A message may be too large. The error names numbers of clients and rounds, and
            a LoRA rank, with which the messages fit.
    """
    _check(sizes, "up", min(largest_upload, message.LARGEST_MESSAGE))
    _check(sizes, "down", min(largest_download, message.LARGEST_MESSAGE))


def _check(sizes: MessageSizes, way: Way, limit: float) -> None:
    def fits(sizes: MessageSizes) -> bool:
        size = sizes.largest(way)
        return size.total <= limit and size.header <= message.LARGEST_HEADER

    if fits(sizes):
        return
    size, remedies = sizes.largest(way), list[str]()
    for key, noun, least in (("clients", "client", 2), ("exchanges", "round", 1)):
        if (most := _most(sizes, key, fits)) >= least:
            remedies.append(f"at most {plural(most, noun)} instead of {getattr(sizes, key)}")
    rank = max((len(p.tensor) for p in sizes.shared.values() if p.factor == "A"), default=0)
    most = int(rank * (limit - size.header) / max(size.total - size.header, 1))
    if size.total > limit and most > 0:
        remedies.append(f"a LoRA rank of at most {most} instead of {rank}")
    if way == "up" and limit < size.total <= message.LARGEST_MESSAGE:
        remedies.append(f"deployment.largest_message: {math.ceil(size.total / MiB)}")
    parts = "" if size.total > limit else f", of which {_text(size.header)} are names and shapes"
    allowed = limit if size.total > limit else message.LARGEST_HEADER
    raise CoterieError(
        f"{'An upload' if way == 'up' else 'A download'} of a client may have {_text(size.total)}"
        f"{parts}, but the limit is {_text(allowed)}; "
        + (f"it fits with {', or with '.join(remedies)}." if remedies else "use another method.")
    )


def _most(sizes: MessageSizes, key: str, fits: Callable[[MessageSizes], bool]) -> int:
    """Return the largest number below the attribute `key` with which messages fit, or 0."""
    numbers = range(1, getattr(sizes, key))
    return bisect_left(numbers, True, key=lambda n: not fits(replace(sizes, **{key: n})))


def _text(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
