"""The uploads of a round at the server: they wait on disk, and are counted or excluded."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coterie.aggregation.mean import Aggregation
from coterie.aggregation.transform import TRAIN, Contribution
from coterie.engines.server_part import contribution, decoded
from coterie.errors import CoterieError, no_client_left
from coterie.files import writing
from coterie.messages import Message, MessageError
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import LEFT_OUT
from coterie.methods.contract import ServerSide
from coterie.network.link import LONGEST_LINE
from coterie.runs import Recorder


class Uploads:
    """The uploads of the round in progress, by client; they are counted in the order of names.

    They wait in one file without a name: a kill leaves nothing of them, and however many there are,
    the process has one open file.

    Args:
        folder: where they wait.
        server: the method's server side.
        aggregation: what makes a mean of uploads.
        strict: raise what is wrong with an upload instead of excluding the upload.
    """

    def __init__(
        self, folder: Path, server: ServerSide, aggregation: Aggregation, *, strict: bool = False
    ) -> None:
        self.folder, self.server = folder, server
        self.aggregation, self.strict = aggregation, strict
        self.refused: dict[str, str] = {}
        """Clients that are excluded, and why."""
        self.diverged: set[str] = set()
        """Excluded clients that have no upload because they diverged."""
        self.asked_again: set[str] = set()
        self._measures: dict[str, dict[str, Any]] = {}
        """What transforms know of each upload, by client and transform."""
        self._places: dict[str, tuple[int, int]] = {}
        """Where each upload begins in the file, and how long it is."""
        with writing(folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)

    def begin(self) -> None:
        """Begin a round: nothing is uploaded yet."""
        for name in [*self._places, *self.refused]:
            self.drop(name)
        self.asked_again.clear()
        self._file.truncate(0)

    def take(self, name: str, body: bytes) -> None:
        """Measure an upload, and let it wait."""
        self.drop(name)
        try:
            message = self.aggregation.schema.receive("up", body)
        except CoterieError as error:
            self._refuse(name, error)
            return
        if self.aggregation.transforms.phase == TRAIN and not self._measured(name, message):
            return
        with writing(self.folder):
            start = self._file.seek(0, os.SEEK_END)
            if start > 2 * (len(body) + sum(length for _, length in self._places.values())):
                start = self._compact()
            self._file.write(body)
            self._file.flush()
        self._places[name] = start, len(body)

    def _measured(self, name: str, message: Message) -> bool:
        """Measure an upload; return whether it could be decoded and measured."""
        try:
            message = decoded(self.server, self.aggregation, name, message)
            reference = self.server.reference(name)
            self._measures[name] = self.aggregation.transforms.measure(name, message, reference)
        except CoterieError as error:
            self._refuse(name, error)
            return False
        return True

    def _compact(self) -> int:
        """Close the gaps that replaced uploads have left; return where the last one ends."""
        end = 0
        for name, (start, length) in sorted(self._places.items(), key=lambda item: item[1]):
            self._file.seek(start)
            body = self._file.read(length)
            self._file.seek(end)
            self._file.write(body)
            self._places[name] = end, length
            end += length
        self._file.truncate(end)
        return self._file.seek(end)

    def message(self, name: str) -> Message:
        """Return an upload that waits."""
        start, length = self._places[name]
        self._file.seek(start)
        return self.aggregation.schema.receive("up", self._file.read(length))

    def diverge(self, name: str) -> None:
        """Note that a client has diverged and has no upload."""
        self.drop(name)
        self.refused[name] = FAULT_MESSAGES["diverged"]
        self.diverged.add(name)

    def require(self, round: int, waiting: Collection[str]) -> None:
        """Raise Diverged if every client of a round has diverged, and no reply is waited for."""
        clients = self.refused.keys() | self._places.keys() | {*waiting}
        if self.diverged and self.diverged == clients:
            names = ", ".join(sorted(self.diverged))
            raise no_client_left(
                round, f"the training of {names} diverged: {FAULT_MESSAGES['diverged']}."
            )

    def ask_again(self, name: str) -> bool:
        """Forget an upload, which is to come again; return whether that is for the first time."""
        self.drop(name)
        first = name not in self.asked_again
        self.asked_again.add(name)
        return first

    def drop(self, name: str) -> bool:
        """Forget a client's upload, and what was wrong with it; return whether there was one."""
        self.diverged.discard(name)
        self._measures.pop(name, None)
        refused, place = self.refused.pop(name, None), self._places.pop(name, None)
        return refused is not None or place is not None

    @property
    def counted(self) -> list[str]:
        """Clients whose uploads are not refused."""
        return sorted(self._places.keys() - self.refused.keys())

    def record(self, recorder: Recorder) -> None:
        """Record the figures of the round's uploads, and which were excluded, and why."""
        for name, metric, value in self.aggregation.transforms.figures(self._measures):
            recorder.log(name, metric, value)
        for name, why in sorted(self.refused.items()):
            recorder.log(name, LEFT_OUT, why[:LONGEST_LINE])

    def mean(self, round: int) -> Message:
        """Return the mean of the uploads that count; `refused` has the others.

        In a phase of a transform's own, the transform collects the answers and there is no mean.
        """
        transforms = self.aggregation.transforms
        if transforms.phase == TRAIN:
            return self.aggregation.mean(round, self._contributions())
        for name in self.counted:
            try:
                transforms.collect(name, self.message(name))
            except MessageError as error:
                self._refuse(name, error)
        return Message(round)

    def _contributions(self) -> Iterator[Contribution]:
        self.refused |= self.aggregation.transforms.refuse(self._measures)
        for name in self.counted:
            try:
                found = contribution(self.server, self.aggregation, name, self.message(name))
            except Exception as error:  # whatever is wrong with it, the others count
                self._refuse(name, error)
            else:
                yield found

    def _refuse(self, name: str, error: Exception) -> None:
        if self.strict:
            raise error
        foreseen = isinstance(error, CoterieError)
        self.refused[name] = str(error) if foreseen else f"{type(error).__name__} in the method"
