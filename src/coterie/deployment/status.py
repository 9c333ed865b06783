"""The status of a server's run, for the server's display, `coterie status` and monitoring."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from coterie.deployment.seats import Seat
from coterie.errors import CoterieError, Unwritable, plural
from coterie.exchanges.bounds import AGAINST, OTHERS
from coterie.files import read_inside, write_text
from coterie.messages.names import CHANGE
from coterie.network.link import LONGEST_LINE
from coterie.runs import RunFolder
from coterie.turn import Turn

log = logging.getLogger(__name__)
State = Literal["away", "joining", "declined", "ready", "working", "stopped"]
FILE = "status.json"
SAVE_SECONDS = 2.0
"""The time between two writes of the status file."""
REMIND_SECONDS = 60.0
"""The shortest interval between two reminders that the server is waiting.

It is also the time from the beginning of a round to the first reminder. The interval doubles with
each reminder.
"""
LONGEST_REMINDER = 1800.0
"""The longest interval between two reminders."""
OPPOSED_ROUNDS = 4
"""The minimum number of rounds after which the server names a client that opposes the others."""
OPPOSED_SHARE = 0.9
"""The minimum share of such rounds. The first changes of honest clients with different texts still
have a direction in common."""
COMPARED_ROUNDS = 20
"""The maximum number of rounds in which a client is compared. Later changes of honest clients with
different texts may all point against one another, so more rounds would name honest clients."""
NAMED = 6
"""The maximum number of clients that a reminder names."""


class ClientStatus(BaseModel):
    """The status of one client."""

    state: State = "away"
    bytes_up: int = 0
    """Number of bytes received from the client since the server started."""
    bytes_down: int = 0
    """Number of bytes sent to the client since the server started."""
    last_reply: float | None = None
    """The time of the client's last reply, in seconds since 1970; None if there was none."""
    excluded: int = 0
    """Number of rounds without an accepted upload of this client, since the server started."""
    compared: int = 0
    """Number of rounds in which the client's change was compared with at least `OTHERS` others,
    up to `COMPARED_ROUNDS`."""
    against: int = 0
    """Number of these rounds in which the client's change pointed against the others' changes."""

    @property
    def opposes(self) -> bool:
        """Whether the client's changes nearly always point against the others' changes."""
        return self.against >= max(OPPOSED_ROUNDS, OPPOSED_SHARE * self.compared)


class Status(BaseModel):
    """The status of a run."""

    title: str
    rounds: int
    done: int = 0
    """Number of complete rounds."""
    waiting: str = ""
    """A sentence about the clients for which the server is waiting; empty if it is not waiting."""
    seconds_left: float | None = None
    """The estimated time until the end of the run, without waits for a quorum; None: unknown."""
    clients: dict[str, ClientStatus] = {}
    updated: float = 0.0
    """The time of this status, in seconds since 1970."""
    ended: bool = False
    """Whether the run has ended."""

    @classmethod
    def read(cls, folder: RunFolder) -> "Status":
        """Read the status from a server's run folder.

        Raises:
            CoterieError: The folder contains no valid status.
        """
        try:
            status = cls.model_validate_json(read_inside(folder.path, FILE))
        except FileNotFoundError:
            raise CoterieError(
                f"{folder.path} contains no status. `coterie server` writes one when it starts; "
                "`coterie run` does not."
            ) from None
        except (OSError, ValidationError) as error:
            raise CoterieError(f"{folder.path / FILE} cannot be read.") from error
        status.ended = status.ended or folder.result is not None
        return status


def is_running(folder: RunFolder) -> bool:
    """Return whether a process is executing a run."""
    try:
        with folder.lock():
            return False
    except CoterieError:
        return True


class ServerWatch:
    """Callbacks for displaying a server's run.

    The methods of this class do nothing; subclasses override them.
    """

    def note(self, text: str) -> None:
        """Display a line of text about an event."""

    def show(self, status: Status) -> None:
        """Display the status of the run."""


class Monitor:
    """Keeps the status of a server's run up to date, shows it, and writes it to a file.

    Args:
        title: A description of the run.
        rounds: Number of rounds of the run.
        folder: The run folder.
        watch: The callbacks that display the run.
        one_mean: Whether all clients start each round from one mean. Otherwise, the directions of
            their changes are not compared.
    """

    def __init__(
        self,
        title: str,
        rounds: int,
        folder: RunFolder,
        watch: ServerWatch,
        *,
        one_mean: bool = True,
    ) -> None:
        self.status = Status(title=title, rounds=rounds, updated=time.time())
        self.one_mean = one_mean
        self.folder, self.watch = folder, watch
        self.saved, self.save_fault = float("-inf"), ""
        self.durations: list[float] = []
        """Seconds from the opening to the end of each round since the server started."""
        self.round, self.opened = -1, 0.0
        """The current round, and the time at which it was opened, on the monotonic clock."""
        self.remind_at = self.interval = 0.0

    def note(self, text: str) -> None:
        """Log a line about an event, and display it."""
        line = " ".join(text.split())[:LONGEST_LINE]  # the text may quote a client's message
        log.info(line)
        self.watch.note(line)

    def tell(self, event: str) -> None:
        """Log a line about an event in the current round, and display it."""
        self.note(f"round {self.round + 1}: {event}")

    def start(self, done: int) -> None:
        """Record that the run starts, or resumes after `done` complete rounds."""
        self.status.done = done
        resumed = f", resuming after round {done}" if done else ""
        self.note(f"{self.status.title}: {plural(self.status.rounds, 'round')}{resumed}")
        self.compares(self.folder.metrics())

    def opens(self, turn: Turn) -> None:
        """Record that a turn is opened."""
        now, self.status.waiting = time.monotonic(), ""
        if turn.round != self.round:
            self.round, self.opened = turn.round, now
        self.remind_at, self.interval = now + REMIND_SECONDS, REMIND_SECONDS

    def waits(self, turn: Turn, missing: str) -> None:
        """Record that the server is waiting, and remind the operator at growing intervals.

        Args:
            turn: The turn in progress.
            missing: What the server waits for, with the names of the clients.
        """
        reason = f"round {turn.round + 1}: waiting for {missing}"
        now, self.status.waiting = time.monotonic(), reason
        if now >= self.remind_at:
            self.note(reason)
            self.interval = min(max(REMIND_SECONDS, 2 * self.interval), LONGEST_REMINDER)
            self.remind_at = now + self.interval

    def moved(self, client: str, up: int = 0, down: int = 0) -> None:
        """Count the bytes received from a client (`up`) and sent to the client (`down`)."""
        about = self.status.clients.setdefault(client, ClientStatus())
        about.bytes_up += up
        about.bytes_down += down
        if up:
            about.last_reply = time.time()

    def excludes(self, client: str) -> None:
        """Increment a client's number of rounds in which no upload of the client was accepted."""
        self.tell(f"{client} was excluded")
        self.status.clients.setdefault(client, ClientStatus()).excluded += 1

    def compares(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count in how many rounds each client's change pointed against the others' changes.

        The server names a client that `opposes` whenever the number of its rounds against the
        others is a power of two.

        Args:
            lines: Metrics of one or more turns.
        """
        rounds: dict[int, dict[str, float]] = {}
        for line in lines if self.one_mean else ():
            if line["name"] == CHANGE and line["value"].get("cosine") is not None:
                rounds.setdefault(line["round"], {})[line["client"]] = line["value"]["cosine"]
        for cosines in rounds.values():
            for name, cosine in cosines.items() if len(cosines) > OTHERS else ():
                about = self.status.clients.setdefault(name, ClientStatus())
                if about.compared == COMPARED_ROUNDS:
                    continue
                about.compared += 1
                about.against += cosine < AGAINST
                doubled = about.against.bit_count() == 1
                if cosine < AGAINST and doubled and about.opposes:
                    self.note(f"{opposition(name, about)}; see the page on hostile clients")

    def closes(self, turn: Turn, counted: int, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Record that a turn with `counted` accepted uploads is complete and saved.

        Args:
            turn: The turn.
            counted: The number of accepted uploads.
            lines: The metrics of the turn.
        """
        if turn.ends_round:
            self._ends_round(counted)
        self.remind_at = self.interval = 0.0
        self.compares(lines)

    def _ends_round(self, counted: int) -> None:
        status = self.status
        self.durations.append(time.monotonic() - self.opened)
        status.done += 1
        remaining = status.rounds - status.done
        # The median ignores a few rounds that waited long for uploads.
        status.seconds_left = median(self.durations) * remaining
        left = f", about {timedelta(seconds=round(status.seconds_left))} left" if remaining else ""
        self.note(f"round {status.done}/{status.rounds}: {plural(counted, 'upload')} used{left}")

    def shows(self, seats: Mapping[str, Seat], working: Collection[str]) -> None:
        """Display all clients' status; write the status file if it is older than `SAVE_SECONDS`.

        Args:
            seats: The server's record of each client's connection, last reply and current order,
                keyed by the client's name.
            working: The clients that have not replied to their current order.
        """
        status = self.status
        for name in status.clients.keys() - seats.keys():  # expelled
            del status.clients[name]
        for name, seat in seats.items():
            about = status.clients.setdefault(name, ClientStatus())
            about.state = state_of(seat, name in working)
        status.updated = time.time()
        self.watch.show(status)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self, ended: bool = False) -> None:
        """Write the status file.

        An error is logged and not raised, because the run does not need the file. Repeated errors
        are not logged.
        """
        self.status.ended, self.saved = ended, time.monotonic()
        self.status.waiting = "" if ended else self.status.waiting
        try:
            write_text(self.folder.path / FILE, self.status.model_dump_json(indent=2))
            self.save_fault = ""
        except Unwritable as error:
            if str(error) != self.save_fault:
                self.note(f"the status is out of date: {error}")
            self.save_fault = str(error)


def opposition(name: str, client: ClientStatus) -> str:
    """Return a sentence about a client whose changes point against the others' changes."""
    rounds = f"{client.against} of {client.compared} rounds"
    return f"{name}'s changes point against the others' in {rounds}"


def state_of(seat: Seat, is_working: bool) -> State:
    """Return the state of a client for the display.

    Args:
        seat: The server's record of the client's connection, last reply and current order.
        is_working: Whether the client has not replied to its current order.
    """
    if seat.declined:  # the client then disconnects
        return "declined"
    if seat.present is None:
        return "away"
    if not seat.joined:
        return "joining"
    if seat.stopped:
        return "stopped"
    return "working" if is_working else "ready"


def named(names: Collection[str]) -> str:
    """Format clients' names; name at most `NAMED` of them."""
    first, rest = sorted(names)[:NAMED], len(names) - NAMED
    if rest > 0:
        return f"{', '.join(first)} and {rest} more"
    return " and ".join(filter(None, [", ".join(first[:-1]), *first[-1:]]))


def awaited_uploads(names: Collection[str], seconds: float) -> str:
    """Return a text that names the clients whose uploads are missing, and the round's deadline.

    Args:
        names: The names of the clients whose uploads are missing.
        seconds: The number of seconds until the round's deadline. It is zero or negative if the
            deadline has passed.
    """
    uploads = f"the {'upload' if len(names) == 1 else 'uploads'} of {named(names)}"
    deadline = datetime.now() + timedelta(seconds=seconds)
    if seconds > 0:
        return f"{uploads}; the deadline is {deadline:%H:%M:%S}"
    return f"{uploads}; the deadline was {deadline:%H:%M:%S}, but the quorum is still missing"
