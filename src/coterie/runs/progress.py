"""What a run shows while it works: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.exchange import Json


class Watch:
    """Follows one run; the default one shows nothing."""

    def start(self, title: str, rounds: int, done: int, clients: int, tokens: int) -> None:
        """A run begins: `done` of its rounds are done; an update reads `tokens` tokens."""

    def seen(self, client: str | None, name: str, value: Json) -> None:
        """A figure was logged."""

    def worked(self, round: int, client: str) -> None:
        """A client finished its part of a round."""

    def round_over(self, round: int, note: str) -> None:
        """A round is complete and saved."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The run is over or has failed."""


class ConsoleWatch(Watch):
    """Progress for people: round, client, loss, tokens per second and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def start(self, title: str, rounds: int, done: int, clients: int, tokens: int) -> None:
        """Begin a bar with a step per client and round."""
        self.rounds, self.clients, self.tokens = rounds, clients, tokens
        self.first, self.began, self.updates, self.losses = done, time.monotonic(), 0, {}
        self.round, self.title = done, title
        self.task = self.live.add_task(
            title, total=rounds * clients, completed=done * clients, status=""
        )
        self.live.start()
        if not self.console.is_terminal:
            self.console.print(f"{title}: {rounds} rounds, {clients} clients")

    def seen(self, client: str | None, name: str, value: Json) -> None:
        """Show a loss."""
        if client is None or not name.startswith("loss/"):
            return
        self.updates += 1
        self.losses[client] = value
        speed = self.updates * self.tokens / (time.monotonic() - self.began)
        status = f"round {self.round + 1}/{self.rounds}  {client:<14.14} loss {value:.3f}"
        self.live.update(self.task, status=f"{status}  {speed:,.0f} tokens/s")

    def worked(self, round: int, client: str) -> None:
        """Move the bar."""
        self.round = round
        self.live.advance(self.task)

    def round_over(self, round: int, note: str) -> None:
        """A plain line where there is no terminal."""
        self.round = round + 1
        if self.console.is_terminal:
            return
        elapsed = time.monotonic() - self.began
        left = elapsed / (round + 1 - self.first) * (self.rounds - round - 1)
        loss = sum(self.losses.values()) / len(self.losses) if self.losses else float("nan")
        figures = f"loss {loss:.3f}  " if self.losses else ""
        self.console.print(
            f"{self.title}: round {round + 1}/{self.rounds}  {figures}{note}"
            f"{self.updates * self.tokens / elapsed:,.0f} tokens/s  {left:.0f} s left",
            highlight=False,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self.live.stop()
        for task in self.live.task_ids:
            self.live.remove_task(task)
