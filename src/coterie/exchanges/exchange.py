"""One exchange on the server: uploads are decoded, measured and stored, then aggregated."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import CoterieError, enough_memory, no_client_left, ran_out_of_memory
from coterie.exchanges.mean import Aggregation
from coterie.exchanges.store import Store
from coterie.messages import Groups, Message, MessageError, Shapes
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import LEFT_OUT
from coterie.network.link import LONGEST_LINE
from coterie.runs import Recorder
from coterie.transforms.context import Contribution, Rows
from coterie.turn import TRAIN, Turn

SMALLER = ("`base` to a smaller one", "the LoRA rank to a smaller number")
"""Changes that reduce the memory of every task."""


def memory_for_aggregation() -> AbstractContextManager[None]:
    """Raise CoterieError if the server runs out of memory in the body of the `with` statement."""
    return enough_memory("the aggregation", lambda: SMALLER)


class Receiver(Protocol):
    """The calls of a method's server-side object that an exchange makes; see `ServerSide`."""

    def download(self, client: str, /) -> Message:
        """Return a client's download."""
        ...

    def expects(self, client: str, /) -> Mapping[str, Shapes]:
        """Return the shapes that a client must upload, keyed by group and name."""
        ...

    def reference(self, client: str, upload: Message, /) -> Groups:
        """Return the tensors from which a client's training started, keyed by group and name."""
        ...

    def receive(self, client: str, upload: Message, /) -> None:
        """Process the part of an upload that is not averaged."""
        ...

    def rows(self) -> Rows:
        """Return the clients' weights in each mean of the fields whose reduction is `rows`."""
        ...


class Exchange:
    """The uploads of the current exchange, which are aggregated in the order of client names.

    Each upload is decoded once, when it arrives. Decoded uploads wait on disk.

    Args:
        folder: The folder of the temporary file that contains the uploads.
        server: The method's server-side object.
        aggregation: The run's aggregation.
        strict: Whether an invalid upload raises an error instead of being excluded.
    """

    def __init__(
        self, folder: Path, server: Receiver, aggregation: Aggregation, *, strict: bool = False
    ) -> None:
        self.server, self.aggregation, self.strict = server, aggregation, strict
        self.refused: dict[str, str] = {}
        """A mapping from each excluded client to the reason why the client's upload is excluded."""
        self.diverged: set[str] = set()
        """Excluded clients that have no upload because they diverged."""
        self.asked_again: set[str] = set()
        """Clients that were asked for a second upload."""
        self.store = Store(folder)
        self._measures: dict[str, dict[str, Any]] = {}
        """The results of transforms' `measure` hooks. The first key is a client, and the second key
        is a transform."""

    def begin(self) -> None:
        """Start an exchange: remove all uploads."""
        for name in [*self.store, *self.refused]:
            self.drop(name)
        self.asked_again.clear()
        self.store.clear()

    def take(self, name: str, body: bytes) -> None:
        """Validate and decode an upload, pass it to transforms' `measure` hooks, and store it."""
        self.drop(name)
        transforms = self.aggregation.transforms
        try:
            message = self.aggregation.schema.receive("up", body)
            if transforms.phase == TRAIN:
                if transforms.pipeline.active:
                    message = transforms.upload(name, message, self.server.download(name))
                reference = self.server.reference(name, message)
                self._measures[name] = transforms.measure(name, message, reference)
        except CoterieError as error:
            self._refuse(name, error)
        else:
            self.store.put(name, message)

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
        clients = self.refused.keys() | {*self.store, *waiting}
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
        refused = self.refused.pop(name, None) is not None
        return self.store.drop(name) or refused

    @property
    def counted(self) -> list[str]:
        """The clients whose uploads are not excluded, sorted by name."""
        return [name for name in self.store if name not in self.refused]

    def record(self, recorder: Recorder) -> None:
        """Record the metrics of all uploads, and the reasons why uploads were excluded."""
        for name, metric, value in self.aggregation.transforms.figures(self._measures):
            recorder.log(name, metric, value)
        for name, reason in sorted(self.refused.items()):
            recorder.log(name, LEFT_OUT, reason[:LONGEST_LINE])

    def mean(self, turn: Turn) -> Message:
        """Aggregate all valid uploads of a turn.

        An upload that proves to be invalid is excluded, and `self.refused` then has the reason.

        Returns:
            The mean, with the means that `rows` requests as peers. If the current phase was added
            by a transform, the message is empty, because the transform itself collects the uploads
            of this phase.
        """
        aggregation = self.aggregation
        if turn.phase == TRAIN:
            with memory_for_aggregation():
                mean = aggregation.mean(turn.exchange, self._contributions(first=True))
                rows = self.server.rows()
                if not rows:
                    return mean
                return aggregation.with_rows(mean, self._contributions(first=False), rows)
        for name in self.counted:
            try:
                aggregation.transforms.collect(name, self.store.get(name))
            except MessageError as error:
                self._refuse(name, error)
        return Message(turn.exchange)

    def _contributions(self, *, first: bool) -> Iterator[Contribution]:
        """Yield the clients' contributions to the means.

        Args:
            first: Whether this is the first pass over the uploads. Only the first pass decides
                which uploads are excluded, and passes the groups whose reduction is `each` to the
                method.
        """
        server, transforms = self.server, self.aggregation.transforms
        if first:
            self.refused |= transforms.refuse(self._measures)
        for name in self.counted:
            try:
                upload = self.store.get(name)
                reference = partial(server.reference, name, upload)
                upload = transforms.bounded(name, upload, reference)
                result = self.aggregation.contribution(name, upload, server.expects(name))
                if first:
                    server.receive(name, self.aggregation.each(upload))
            except Exception as error:  # one invalid upload must not stop the round
                self._refuse(name, error)
            else:
                yield result

    def _refuse(self, name: str, error: Exception) -> None:
        if self.strict or ran_out_of_memory(error):
            raise error
        expected = isinstance(error, CoterieError)
        self.refused[name] = str(error) if expected else f"{type(error).__name__} in the method"
