"""Output of a deployment's server and clients, and the description of a run that users agree to."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.filesize import decimal as size
from rich.live import Live
from rich.prompt import Confirm
from rich.status import Status
from rich.table import Table
from rich.text import Text

from coterie.cli.progress import LiveDisplay, clock, jump_warning
from coterie.config.run import RunConfig
from coterie.deployment.costs import MAX_DISK
from coterie.deployment.seats import Seat, ServerWatch
from coterie.deployment.terms import flat
from coterie.errors import plural
from coterie.messages.envelope import Order
from coterie.messages.names import BYTES_DOWN, BYTES_UP, JUMPED, LOSS


class Board(LiveDisplay[Live], ServerWatch):
    """The server's table of clients: status, time of the last upload, and bytes transferred.

    A terminal shows the table, which is updated in place. If the output is not a terminal (a file,
    a pipe, a service's log), a line is printed for each event and each round instead.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console, Live(console=console, auto_refresh=False, transient=True))
        self.bytes_up: Counter[str] = Counter()
        self.bytes_down: Counter[str] = Counter()
        self.last_upload: dict[str, str] = {}

    def start(self, title: str, rounds: int, done: int) -> None:
        self.title, self.rounds, self.done, self.first = title, rounds, done, done
        resumed = f", resuming after round {done}" if done else ""
        self._say(f"{title}: {plural(rounds, 'round')}{resumed}")
        self.began = time.monotonic()

    def seats(self, round: int, seats: Mapping[str, Seat], working: Iterable[str]) -> None:
        if self.console.is_terminal:
            busy = set(working)
            states = {name: _state(seat, name in busy) for name, seat in sorted(seats.items())}
            self.live.update(self._table(states), refresh=True)

    def moved(self, client: str, up: int, down: int) -> None:
        self.bytes_up[client] += up
        self.bytes_down[client] += down
        if up:
            self.last_upload[client] = f"{datetime.now():%H:%M:%S}"

    def note(self, text: str) -> None:
        self._say(f"{datetime.now():%H:%M:%S} {text}")

    def round_over(self, round: int, counted: int) -> None:
        self.done = round + 1
        counts = f"{plural(counted, 'upload')} used"
        self.note(f"round {self.done}/{self.rounds}: {counts}{self._left()}")

    def _left(self) -> str:
        finished = self.done - self.first
        if not finished or self.done == self.rounds:
            return ""
        seconds = (time.monotonic() - self.began) / finished * (self.rounds - self.done)
        return f", about {clock(seconds)} left"

    def _table(self, states: Mapping[str, str]) -> Table:
        title = f"{self.title}: round {min(self.done + 1, self.rounds)} of {self.rounds}"
        table = Table("client", "state", title=title + self._left(), title_justify="left")
        for head in ("last upload", "up", "down"):
            table.add_column(head, justify="right")
        for name, state in states.items():
            moved = (size(self.bytes_up[name]), size(self.bytes_down[name]))
            table.add_row(name, state, self.last_upload.get(name, ""), *moved)
        return table


class ClientBoard(LiveDisplay[Status]):
    """The client's output: a line for each event and, on a terminal, a status line.

    Args:
        estimate: Function that returns the number of bytes of memory that a run needs. It returns
            None if this number is unknown.
    """

    def __init__(
        self, console: Console, estimate: Callable[[RunConfig], int | None] = lambda _: None
    ) -> None:
        super().__init__(console, Status("connecting to the server", console=console))
        self.estimate = estimate
        self.losses: list[float] = []
        self.bytes = {BYTES_UP: 0, BYTES_DOWN: 0}

    def __call__(self, event: str, value: Any) -> None:
        """Show an event of the client.

        This method implements `coterie.network.link.Seen`.
        """
        match event:
            case "connected":
                self._say(f"connected to {value}")
            case "away":
                self._say(f"{value}; retrying")
            case "joined":
                self.rounds, self.done = value.config.exchanges, 0
                self.began = time.monotonic()
                self._say(f"joined the run {value.config.name}: {value.config.label}")
                for adapter in value.part.covered:
                    self._say(f"  trained on this machine: {adapter}")
                schema = value.part.schema
                for when, fields in (("once", schema.hello), ("every round", schema.up)):
                    for field in fields:
                        self._say(f"  leaves this machine {when}: {field.description}")
            case "warning":
                self._say(value)
            case "fault":
                self._say(f"could not process the server's request: {value}")
            case "step":
                self._step(value)
            case "stopped":
                self._say(
                    f"no better validation score for {plural(value, 'round')}: training stopped, "
                    "waiting for the end of the run"
                )
            case _ if event in self.bytes:
                self.bytes[event] = value
            case _ if event == JUMPED:
                self._say(jump_warning("this client", value))
            case _ if event.startswith(LOSS):
                self.losses.append(value)
                self.live.update(f"training: loss {value:.3f}")

    def agrees(self, order: Order, config: RunConfig) -> bool:
        """Show the run that the client is asked to join, and prompt the user for agreement."""
        self.live.stop()
        table = Table.grid(padding=(0, 2))
        for subject, text in in_words(order, config, self.estimate(config)):
            table.add_row(subject, Text(text))
        self.console.print("The server asks you to take part in this run:")
        self.console.print(table)
        answer = Confirm.ask(
            "Your agreement holds for this run only. Do you agree to take part?",
            console=self.console,
        )
        self.__enter__()
        return answer

    def _step(self, round: int) -> None:
        """Print a line about a round whose training is complete.

        The upload has not been sent at this time.
        """
        self.done += 1
        items = [f"loss {sum(self.losses) / len(self.losses):.3f}"] if self.losses else []
        items += [f"{size(self.bytes[name])} {name[6:]}" for name in self.bytes]  # up or down
        seconds = (time.monotonic() - self.began) / self.done * (self.rounds - round - 1)
        items += [f"about {clock(seconds)} left"] if seconds else []
        self._say(f"round {round + 1}/{self.rounds}: {', '.join(items)}")
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


def in_words(order: Order, config: RunConfig, memory: int | None = None) -> list[tuple[str, str]]:
    """Return (subject, text) pairs that describe a run to the user who is asked to agree to it.

    Args:
        order: The server's order to join the run.
        config: The run as the client sees it.
        memory: The estimated memory of the client's process on a CPU, in bytes; None if unknown.
    """
    method, schema, training = config.method, config.aggregating().schema, config.training
    settings = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in flat(method.described())
        if key != "name"
    ]
    texts = {
        "run": config.name,
        "method": f"{method.name}: {method.summary}",
        "settings": ", ".join(settings),
        "training": f"{plural(config.rounds, 'round')} of {plural(training.steps, 'step')} of "
        f"{plural(training.batch, 'sample')}",
        **costs_in_words(config, memory),
        "base": str(config.base),
        "sent once": "; ".join(field.description for field in schema.hello),
        "every round": "; ".join(field.description for field in schema.up),
        "transforms": "; ".join(f"{t.name}: {t.summary}" for t in config.transforms),
        "privacy": "; ".join(
            f"{budget.description}: epsilon {budget.epsilon:g}, delta {budget.delta:g}"
            for budget in config.budgets
        ),
        "losses": "sent to the server, with all other metrics"
        if config.deployment.share_metrics
        else "stay on this machine",
        "public text": order.public or "",
        "plugins": "; ".join(
            sorted({f"{p.file} {p.sha256[:16]}" for p in (order.plugins or {}).values()})
        ),
    }
    return [(subject, text) for subject, text in texts.items() if text]


def costs_in_words(config: RunConfig, memory: int | None = None) -> dict[str, str]:
    """Describe the costs of a run to the user who is asked to agree to the run.

    The result maps subjects, such as "memory", to texts.

    Args:
        config: The run as the client sees it.
        memory: The estimated memory of the client's process on a CPU, in bytes; None if unknown.
    """
    estimate = "" if memory is None else f"about {memory / 1e9:,.1f} GB on a CPU: "
    training, evaluation = config.training, config.evaluation
    steps = training.steps * config.exchanges
    threads = (
        plural(config.threads, "thread") if config.threads else "the default number of threads"
    )
    when = "after the last round"
    if evaluation.every is not None:
        when = "every round" if evaluation.every == 1 else f"every {evaluation.every} rounds"
    return {
        "computing": f"{steps:,} training steps in all, on {threads}; evaluated {when}",
        "memory": f"{estimate}batches of {training.at_once} samples in training and "
        f"{evaluation.batch} samples in evaluation, each of up to {config.data.window} tokens; "
        "`coterie client --check` measures the memory",
        "disk": "two checkpoints of the trained parameters, and the score of each test window; at "
        f"most {MAX_DISK / 2**30:.0f} GiB for all runs in --out",
    }
