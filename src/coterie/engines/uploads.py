"""The uploads of a round on the server, which are stored on disk, then aggregated or excluded."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coterie.aggregation.mean import Aggregation
from coterie.aggregation.transform import TRAIN, Contribution
from coterie.engines.memory import memory_for_aggregation
from coterie.engines.server_part import aggregate, contribution, decoded
from coterie.errors import CoterieError, no_client_left, ran_out_of_memory
from coterie.files import writing
from coterie.messages import Message, MessageError
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import LEFT_OUT
from coterie.methods.contract import ServerSide
from coterie.network.link import LONGEST_LINE
from coterie.runs import Recorder


class Uploads:
    """The uploads of the current exchange, which are aggregated in the order of client names.

    All uploads are in one unnamed temporary file. The file disappears if the process is killed, and
    needs only one file descriptor for any number of clients.

    Args:
        folder: The folder of the temporary file.
        server: The method's server-side object.
        aggregation: The run's aggregation.
        strict: Whether an invalid upload raises an error instead of being excluded.
    """

    def __init__(
        self, folder: Path, server: ServerSide, aggregation: Aggregation, *, strict: bool = False
    ) -> None:
        self.folder, self.server = folder, server
        self.aggregation, self.strict = aggregation, strict
        self.refused: dict[str, str] = {}
        """A mapping from each excluded client to the reason why the client's upload is excluded."""
        self.diverged: set[str] = set()
        """Excluded clients that have no upload because they diverged."""
        self.asked_again: set[str] = set()
        """Clients that were asked for a second upload."""
        self._measures: dict[str, dict[str, Any]] = {}
        """The results of transforms' `measure` hooks. The first key is a client, and the second key
        is a transform."""
        self._places: dict[str, tuple[int, int]] = {}
        """The start and the length of each client's upload in the file."""
        with writing(folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)

    def begin(self) -> None:
        """Start an exchange: remove all uploads."""
        for name in [*self._places, *self.refused]:
            self.drop(name)
        self.asked_again.clear()
        self._file.truncate(0)

    def take(self, name: str, body: bytes) -> None:
        """Validate an upload, pass it to the transforms' `measure` hooks, and store it."""
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
        """Pass an upload to the transforms' `measure` hooks; return whether the upload is valid."""
        try:
            message = decoded(self.server, self.aggregation, name, message)
            reference = self.server.reference(name, message)
            self._measures[name] = self.aggregation.transforms.measure(name, message, reference)
        except CoterieError as error:
            self._refuse(name, error)
            return False
        return True

    def _compact(self) -> int:
        """Close the gaps that removed uploads have left in the file; return the file's new size."""
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
        """Return a client's stored upload."""
        start, length = self._places[name]
        self._file.seek(start)
        return self.aggregation.schema.receive("up", self._file.read(length))

    def diverge(self, name: str) -> None:
        """Record that a client diverged and has no upload."""
        self.drop(name)
        self.refused[name] = FAULT_MESSAGES["diverged"]
        self.diverged.add(name)

    def require(self, round: int, waiting: Collection[str]) -> None:
        """Check that at least one client of a round has not diverged.

        Args:
            round: The number of the round; the first is 0.
            waiting: The clients that have not replied.

        Raises:
            Diverged: If all clients of the round have diverged.
        """
        clients = self.refused.keys() | self._places.keys() | {*waiting}
        if self.diverged and self.diverged == clients:
            names = ", ".join(sorted(self.diverged))
            raise no_client_left(
                round, f"the training of {names} diverged: {FAULT_MESSAGES['diverged']}."
            )

    def ask_again(self, name: str) -> bool:
        """Remove a client's upload, because the server will request it again.

        Returns:
            Whether this is the first time in this exchange that the client is asked for another
            upload.
        """
        self.drop(name)
        first = name not in self.asked_again
        self.asked_again.add(name)
        return first

    def drop(self, name: str) -> bool:
        """Remove a client's upload, and the reason why the upload was excluded, if any.

        Returns:
            Whether an upload or a reason was removed.
        """
        self.diverged.discard(name)
        self._measures.pop(name, None)
        refused, place = self.refused.pop(name, None), self._places.pop(name, None)
        return refused is not None or place is not None

    @property
    def counted(self) -> list[str]:
        """The clients whose uploads are not excluded, sorted by name."""
        return sorted(self._places.keys() - self.refused.keys())

    def record(self, recorder: Recorder) -> None:
        """Record the metrics of all uploads, and the reasons why uploads were excluded."""
        for name, metric, value in self.aggregation.transforms.figures(self._measures):
            recorder.log(name, metric, value)
        for name, reason in sorted(self.refused.items()):
            recorder.log(name, LEFT_OUT, reason[:LONGEST_LINE])

    def mean(self, round: int) -> Message:
        """Aggregate all valid uploads.

        An upload that proves to be invalid is excluded, and `self.refused` then has the reason.

        Returns:
            The aggregate. If the current phase was added by a transform, the aggregate is empty,
            because the transform itself collects the uploads of this phase.
        """
        transforms = self.aggregation.transforms
        if transforms.phase == TRAIN:
            with memory_for_aggregation():
                return aggregate(self.server, self.aggregation, round, self._contributions)
        for name in self.counted:
            try:
                transforms.collect(name, self.message(name))
            except MessageError as error:
                self._refuse(name, error)
        return Message(round)

    def _contributions(self, first: bool) -> Iterator[Contribution]:
        self.refused |= self.aggregation.transforms.refuse(self._measures)
        for name in self.counted:
            try:
                message = self.message(name)
                result = contribution(self.server, self.aggregation, name, message, first=first)
            except Exception as error:  # one invalid upload must not stop the round
                self._refuse(name, error)
            else:
                yield result

    def _refuse(self, name: str, error: Exception) -> None:
        if self.strict or ran_out_of_memory(error):
            raise error
        expected = isinstance(error, CoterieError)
        self.refused[name] = str(error) if expected else f"{type(error).__name__} in the method"
