"""What a server or a client of a deployment shows while it works, on a terminal or in a log."""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.engines.server import Seat, ServerWatch


class Board(ServerWatch):
    """A table that lives on a terminal: the round, who is in, what each is doing, and its bytes.

    Elsewhere (a file, a pipe, a service's log) a line for every event and round.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.title, self.rounds, self.done, self.first = "", 0, 0, 0
        self.states: dict[str, str] = {}
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.last: dict[str, datetime] = {}
        self.began = time.monotonic()

    def start(self, title: str, rounds: int, done: int) -> None:
        """Note what runs."""
        self.title, self.rounds, self.done, self.first = title, rounds, done, done
        self._say(f"{title}: {rounds} rounds" + (f", {done} are done" if done else ""))
        self.began = time.monotonic()

    def seats(self, round: int, seats: Mapping[str, Seat], working: Iterable[str]) -> None:
        """Draw the table anew."""
        self.states = {name: _state(seat, name in set(working)) for name, seat in seats.items()}
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
        self.note(f"round {self.done}/{self.rounds}: {counted} uploads counted{rest}")

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
            moved = (_size(self.up.get(name, 0)), _size(self.down.get(name, 0)))
            table.add_row(name, state, last, *moved)
        return table

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """Begin to draw, on a terminal."""
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the table away."""
        self.live.stop()


def _state(seat: Seat, working: bool) -> str:
    if seat.present is None:
        return "away"
    if not seat.joined:
        return "joining"
    return "working" if working else "ready"


def _size(count: float) -> str:
    """Bytes for people: 2.4 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.1f} {unit}".replace(".0 B", " B")
        count /= 1000
    return f"{count:.1f} GB"
