"""Progress of running commands: a live display on a terminal, or else plain lines."""

import time
from datetime import timedelta
from typing import Generic, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

from coterie.cli.terminal import console, tell
from coterie.errors import plural
from coterie.messages import Json
from coterie.messages.names import DRIFT, JUMPED, LOSS
from coterie.runs import Callback, RunStart


def jump_warning(client: str | None, value: Json) -> str:
    """Return the warning for the metric `JUMPED`, which records a jump in the validation loss."""
    return (
        f"Warning: {client}'s validation loss is {value['loss']:.2f} after round {value['round']}, "
        f"but {value['best']:.2f} for the best model so far; another client's upload may have "
        "damaged the shared model (the server's metrics record the size and direction of each "
        "upload)."
    )


MOST_DRIFT = 1.0
"""The drift above which a run warns, in nats per token."""


def drift_warning(client: str | None, drift: float) -> str:
    """Return the warning for a value of the metric `DRIFT` above `MOST_DRIFT`."""
    return (
        f"Warning: {client}'s model has lost much of what its base knew (drift {drift:.2f} nats "
        "per token on general requests). What helps: a gate, if this client's prompts are unlike "
        "general requests (training.gate), replay (training.replay), a lower learning rate or "
        "fewer steps."
    )


Drawn = TypeVar("Drawn", Live, Status, Progress)


class LiveDisplay(Generic[Drawn]):
    """A context manager that shows a live display, such as a progress bar, on a terminal.

    If the console is not a terminal, there is no live display, and only lines of text are printed.
    """

    def __init__(self, console: Console, live: Drawn) -> None:
        self.console, self.live = console, live

    def _say(self, text: str) -> None:
        tell(self.console, text)

    def __enter__(self) -> Self:
        """Start the live display, if the console is a terminal."""
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the live display."""
        self.live.stop()


class ConsoleProgress(LiveDisplay[Progress], Callback):
    """The progress of a run: round, client, loss, tokens per second and remaining time.

    A terminal shows one line that is updated in place. If the output is not a terminal (a file, a
    pipe), a line is printed for each round instead.
    """

    def __init__(self, console: Console = console) -> None:
        live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        super().__init__(console, live)
        self.printed: set[str] = set()

    def on_warning(self, text: str) -> None:
        self._say(text)

    def on_run_begin(self, run: RunStart) -> None:
        self.rounds, self.tokens, self.first = run.rounds, run.tokens, run.done
        self.began, self.updates, self.losses = time.monotonic(), 0, {}
        self.round, self.title = run.done, run.method
        for line in (f"{self.title}: {adapter}" for adapter in run.adapters):
            if line not in self.printed:  # printed once, not for every seed
                self.printed.add(line)
                self._say(line)
        clients = len(run.clients)
        self.task = self.live.add_task(
            self.title, total=run.turns * clients, completed=run.turns_done * clients, status=""
        )
        if not self.console.is_terminal:
            line = f"{self.title}: {plural(run.rounds, 'round')}, {plural(clients, 'client')}"
            self._say(line + (f", resuming after round {run.done}" if run.done else ""))
        self.__enter__()

    def on_metric(self, round: int, client: str | None, name: str, value: Json) -> None:
        if name == JUMPED:
            self._say(jump_warning(client, value))
        if name == DRIFT and value > MOST_DRIFT:
            self._say(drift_warning(client, value))
        if client is None or not name.startswith(LOSS):
            return
        self.updates += 1
        self.losses[client] = value
        status = f"{self.round + 1}/{self.rounds} {client:<10.10} loss {value:.3f} {self._speed()}"
        self.live.update(self.task, status=status)

    def on_client_end(self, round: int, client: str) -> None:
        self.round = round
        self.live.advance(self.task)

    def on_round_end(self, round: int, scores: str) -> None:
        self.round = round + 1
        if self.console.is_terminal or not (self.losses or scores):
            return
        columns = [f"round {round + 1}/{self.rounds}"]
        if self.losses:
            columns += [f"loss {sum(self.losses.values()) / len(self.losses):.3f}", self._speed()]
        elapsed = time.monotonic() - self.began
        left = elapsed / (round + 1 - self.first) * (self.rounds - round - 1)
        columns += [f"{clock(left)} left" if left else f"took {clock(elapsed)}", scores.strip()]
        self._say(f"{self.title}: {'  '.join(columns).rstrip()}")

    def on_run_end(self, error: BaseException | None) -> None:
        self.__exit__()
        self.live.remove_task(self.task)

    def _speed(self) -> str:
        return f"{self.updates * self.tokens / (time.monotonic() - self.began):,.0f} tokens/s"


def clock(seconds: float) -> str:
    """Format a duration in seconds as hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
