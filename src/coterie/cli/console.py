"""What a server or a client of a deployment shows while it works, on a terminal or in a log."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.prompt import Confirm
from rich.status import Status
from rich.table import Table
from rich.text import Text

from coterie.cli.agreement import in_words
from coterie.cli.progress import jump_warning
from coterie.config.run import RunConfig
from coterie.deployment.seats import Seat, ServerWatch
from coterie.errors import plural
from coterie.messages.envelope import Order
from coterie.messages.names import BYTES_DOWN, BYTES_UP, JUMPED, LOSS


class LiveDisplay:
    """What lives on a terminal within its block; elsewhere there are lines alone."""

    def __init__(self, console: Console, live: Live | Status) -> None:
        self.console, self._live = console, live

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """Begin to draw, on a terminal."""
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take away what was drawn."""
        self._live.stop()


class Board(LiveDisplay, ServerWatch):
    """A table that lives on a terminal: the round, who is in, what each is doing, and its bytes.

    Elsewhere (a file, a pipe, a service's log) a line for every event and round.
    """

    def __init__(self, console: Console) -> None:
        self.live = Live(console=console, auto_refresh=False, transient=True)
        super().__init__(console, self.live)
        self.title, self.rounds, self.done, self.first = "", 0, 0, 0
        self.states: dict[str, str] = {}
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.last: dict[str, datetime] = {}
        self.began = time.monotonic()

    def start(self, title: str, rounds: int, done: int) -> None:
        """Note what runs."""
        self.title, self.rounds, self.done, self.first = title, rounds, done, done
        self._say(
            f"{title}: {plural(rounds, 'round')}" + (f", {done} already done" if done else "")
        )
        self.began = time.monotonic()

    def seats(self, round: int, seats: Mapping[str, Seat], working: Iterable[str]) -> None:
        """Draw the table anew."""
        busy = set(working)
        self.states = {name: _state(seat, name in busy) for name, seat in seats.items()}
        if self.console.is_terminal:
            self.live.update(self._table(), refresh=True)

    def moved(self, client: str, up: int, down: int) -> None:
        """Count bytes."""
        self.up[client] = self.up.get(client, 0) + up
        self.down[client] = self.down.get(client, 0) + down
        if up:
            self.last[client] = datetime.now()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._say(f"{datetime.now():%H:%M:%S} {text}")

    def round_over(self, round: int, counted: int) -> None:
        """A line for every round."""
        self.done = round + 1
        left = self._left()
        rest = f", about {left} left" if left else ""
        self.note(f"round {self.done}/{self.rounds}: {plural(counted, 'upload')} counted{rest}")

    def _left(self) -> str:
        finished = self.done - self.first
        if not finished or self.done == self.rounds:
            return ""
        seconds = (time.monotonic() - self.began) / finished * (self.rounds - self.done)
        return str(timedelta(seconds=round(seconds)))

    def _table(self) -> Table:
        left = self._left()
        title = f"{self.title}: round {min(self.done + 1, self.rounds)} of {self.rounds}"
        table = Table(title=title + (f", about {left} left" if left else ""), title_justify="left")
        for head in ("client", "state"):
            table.add_column(head)
        for head in ("last upload", "up", "down"):
            table.add_column(head, justify="right")
        for name, state in sorted(self.states.items()):
            last = f"{self.last[name]:%H:%M:%S}" if name in self.last else ""
            moved = (size(self.up.get(name, 0)), size(self.down.get(name, 0)))
            table.add_row(name, state, last, *moved)
        return table


class ClientBoard(LiveDisplay):
    """A line for every event of a client's part, and on a terminal one that lives."""

    def __init__(
        self, console: Console, estimate: Callable[[RunConfig], int | None] = lambda _: None
    ) -> None:
        """estimate: returns the bytes of memory that a run takes, if it can tell."""
        self.estimate = estimate
        self.live = Status("connecting to the server", console=console)
        super().__init__(console, self.live)
        self.rounds, self.done, self.began = 0, 0, time.monotonic()
        self.losses: list[float] = []
        self.bytes = {BYTES_UP: 0, BYTES_DOWN: 0}

    def __call__(self, what: str, value: Any) -> None:
        """See `deployment.client.Seen`."""
        match what:
            case "connected":
                self._say(f"connected to {value}")
            case "away":
                self._say(f"{value}; retrying")
            case "joined":
                self.rounds, self.done = value.config.exchanges, 0
                self.began = time.monotonic()
                self._say(f"joined the run {value.config.name}: {value.config.label}")
                for adapter in value.part.covered:
                    self._say(f"  trained here: {adapter}")
                schema = value.part.schema
                for when, fields in (("once", schema.hello), ("every round", schema.up)):
                    for field in fields:
                        self._say(f"  leaves this machine {when}: {field.what}")
            case "warning":
                self._say(value)
            case "fault":
                self._say(f"could not process the server's request: {value}")
            case "step":
                self._step(value)
            case "stopped":
                self._say(
                    f"no gain for {plural(value, 'round')}: training stopped, waiting for the end"
                )
            case _ if what in self.bytes:
                self.bytes[what] = value
            case _ if what == JUMPED:
                self._say(jump_warning("this client", value))
            case _ if what.startswith(LOSS):
                self.losses.append(value)
                self.live.update(f"training: loss {value:.3f}")

    def agrees(self, order: Order, config: RunConfig) -> bool:
        """Show what the server asks for, and ask whoever is at the terminal."""
        self._live.stop()
        table = Table.grid(padding=(0, 2))
        for what, text in in_words(order, config, self.estimate(config)):
            table.add_row(what, Text(text))
        self.console.print("The server asks you to take part in this run:")
        self.console.print(table)
        answer = Confirm.ask("Do you agree to this run, and to no other?", console=self.console)
        self.__enter__()
        return answer

    def _step(self, round: int) -> None:
        """A round's work is done; what the server makes of it comes later."""
        self.done += 1
        figures = [f"loss {sum(self.losses) / len(self.losses):.3f}"] if self.losses else []
        figures += [f"{size(self.bytes[way])} {way[6:]}" for way in self.bytes]
        seconds = (time.monotonic() - self.began) / self.done * (self.rounds - round - 1)
        figures += [f"about {timedelta(seconds=int(seconds))} left"] if seconds else []
        self._say(f"round {round + 1}/{self.rounds}: {', '.join(figures)}")
        self.losses = []
        self.live.update("waiting for the server")


def _state(seat: Seat, working: bool) -> str:
    if seat.present is None:
        return "away"
    if not seat.joined:
        return "joining"
    if seat.stopped:
        return "stopped"
    return "working" if working else "ready"


def size(count: float) -> str:
    """Bytes for people: 2.4 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.1f} {unit}".replace(".0 B", " B")
        count /= 1000
    return f"{count:.1f} GB"
