"""The uploads of a round at a server: they wait on disk, and are counted in or left out."""

from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from coterie.aggregation.bounds import Measure
from coterie.aggregation.mean import Aggregation, Contribution
from coterie.engines.runtime import LogFor, contribution, record
from coterie.errors import CoterieError, no_client_left
from coterie.files import writing
from coterie.messages.envelope import TOLD
from coterie.methods.contract import ServerSide
from coterie.network.link import LONGEST_LINE


class Uploads:
    """Those of the round in progress, by the names of clients."""

    def __init__(self, folder: Path, server: ServerSide, aggregation: Aggregation) -> None:
        self.folder, self.server, self.aggregation = folder, server, aggregation
        self.refused: dict[str, str] = {}
        """Who is left out, and why."""
        self.diverged: set[str] = set()
        """Those of them who have no upload because they diverged."""
        self.asked_again: set[str] = set()
        self._files: dict[str, IO[bytes]] = {}
        self._measures: dict[str, Measure] = {}

    def begin(self) -> None:
        """A new round."""
        for name in [*self._files, *self.refused]:
            self.drop(name)
        self.asked_again.clear()

    def take(self, name: str, body: bytes) -> None:
        """Let an upload wait, in a file without a name: a kill leaves nothing of it."""
        self.drop(name)
        try:
            message = self.aggregation.schema.receive("up", body)
        except CoterieError as error:
            self.refused[name] = str(error)
            return
        reference = self.server.reference(name)
        self._measures[name] = self.aggregation.measure(name, message, reference)
        with writing(self.folder):
            self._files[name] = TemporaryFile(dir=self.folder)  # noqa: SIM115  (open until `begin`)
            self._files[name].write(body)

    def diverge(self, name: str) -> None:
        """Note that a client has diverged and has no upload."""
        self.drop(name)
        self.refused[name] = TOLD["diverged"]
        self.diverged.add(name)

    def require(self, round: int, waiting: Collection[str]) -> None:
        """Raise Diverged if every client of a round has diverged, and no reply is waited for."""
        if self.diverged and self.diverged == self.refused.keys() | self._files.keys() | {*waiting}:
            names = ", ".join(sorted(self.diverged))
            raise no_client_left(round, f"the training of {names} diverged: {TOLD['diverged']}.")

    def ask_again(self, name: str) -> bool:
        """Forget an upload, which is to come again; whether that is for the first time."""
        self.drop(name)
        first = name not in self.asked_again
        self.asked_again.add(name)
        return first

    def drop(self, name: str) -> bool:
        """Forget a client's upload, and what was wrong with it; whether there was one."""
        self.diverged.discard(name)
        refused, file = self.refused.pop(name, None), self._files.pop(name, None)
        self._measures.pop(name, None)
        if file is not None:
            file.close()
        return refused is not None or file is not None

    @property
    def counted(self) -> list[str]:
        """Clients whose uploads are not refused."""
        return sorted(self._files.keys() - self.refused.keys())

    def record(self, log: LogFor) -> None:
        """Record the figures of the round's uploads, and which were excluded, and why."""
        record(self._measures, {n: why[:LONGEST_LINE] for n, why in self.refused.items()}, log)

    def contributions(self) -> Iterator[Contribution]:
        """What the uploads add to the mean. Whatever is wrong with one, the others count."""
        self.refused |= self.aggregation.left_out(self._measures)
        for name in self.counted:
            try:
                self._files[name].seek(0)
                upload = self.aggregation.schema.receive("up", self._files[name].read())
                found = contribution(self.server, self.aggregation, name, upload)
            except CoterieError as error:
                self.refused[name] = str(error)
            except Exception as error:  # what a method did not foresee
                self.refused[name] = f"{type(error).__name__} in the method"
            else:
                yield found
