"""What a server or a client of a deployment shows while it works, on a terminal or in a log, and
what a person reads before agreeing to a run."""

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
    """A table that lives on a terminal: the round, who is in, what each is doing, and its bytes.

    Elsewhere (a file, a pipe, a service's log) a line for every event and round.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console, Live(console=console, auto_refresh=False, transient=True))
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self.last: dict[str, str] = {}

    def start(self, title: str, rounds: int, done: int) -> None:
        """Note what runs."""
        self.title, self.rounds, self.done, self.first = title, rounds, done, done
        already = f", {done} already done" if done else ""
        self._say(f"{title}: {plural(rounds, 'round')}{already}")
        self.began = time.monotonic()

    def seats(self, round: int, seats: Mapping[str, Seat], working: Iterable[str]) -> None:
        """Draw the table anew."""
        if self.console.is_terminal:
            busy = set(working)
            states = {name: _state(seat, name in busy) for name, seat in sorted(seats.items())}
            self.live.update(self._table(states), refresh=True)

    def moved(self, client: str, up: int, down: int) -> None:
        """Count bytes."""
        self.up[client] += up
        self.down[client] += down
        if up:
            self.last[client] = f"{datetime.now():%H:%M:%S}"

    def note(self, text: str) -> None:
        """A line that stays."""
        self._say(f"{datetime.now():%H:%M:%S} {text}")

    def round_over(self, round: int, counted: int) -> None:
        """A line for every round."""
        self.done = round + 1
        counts = f"{plural(counted, 'upload')} counted"
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
            moved = (size(self.up[name]), size(self.down[name]))
            table.add_row(name, state, self.last.get(name, ""), *moved)
        return table


class ClientBoard(LiveDisplay[Status]):
    """A line for every event of a client's part, and on a terminal one that lives."""

    def __init__(
        self, console: Console, estimate: Callable[[RunConfig], int | None] = lambda _: None
    ) -> None:
        """estimate: returns the bytes of memory that a run takes, if it can tell."""
        super().__init__(console, Status("connecting to the server", console=console))
        self.estimate = estimate
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
                        self._say(f"  leaves this machine {when}: {field.description}")
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
        self.live.stop()
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
        figures += [f"about {clock(seconds)} left"] if seconds else []
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


def in_words(order: Order, config: RunConfig, memory: int | None = None) -> list[tuple[str, str]]:
    """Return what a person should know before agreeing to a run, as (subject, text) pairs.

    memory: see `costs_in_words`.
    """
    method, schema, training = config.method, config.aggregating().schema, config.training
    settings = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in flat(method.described())
        if key != "name"
    ]
    told = {
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
        "losses": "sent, with all other metrics"
        if config.deployment.share_metrics
        else "stay here",
        "public text": order.public or "",
        "plugins": "; ".join(
            sorted({f"{p.file} {p.sha256[:16]}" for p in (order.plugins or {}).values()})
        ),
    }
    return [(what, text) for what, text in told.items() if text]


def costs_in_words(config: RunConfig, memory: int | None = None) -> dict[str, str]:
    """Return what a person should know of the costs before agreeing to a run, by subject.

    memory: estimated bytes of the client's process on a CPU; None if there is no estimate.
    """
    estimate = "" if memory is None else f"about {memory / 1e9:,.1f} GB on a CPU: "
    training, evaluation = config.training, config.evaluation
    steps = training.steps * config.exchanges
    every = "after the last round"
    if evaluation.every is not None:
        every = "every round" if evaluation.every == 1 else f"every {evaluation.every} rounds"
    return {
        "computing": f"{steps:,} training steps in all, with "
        f"{config.threads or 'the default number of'} threads; scored {every}",
        "memory": f"{estimate}{training.at_once} samples of {config.data.window} tokens at once in "
        f"training, {evaluation.batch} in scoring; `coterie client --check` measures it",
        "disk": "two checkpoints of the trained parameters, and the score of each test window; at "
        f"most {MAX_DISK / 2**30:.0f} GiB for all runs in one folder",
    }
