"""Output of a deployment's server and clients, and the description of a run that users agree to."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from statistics import median_low
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.filesize import decimal as size
from rich.live import Live
from rich.prompt import Prompt
from rich.status import Status
from rich.table import Table
from rich.text import Text

from coterie.cli.progress import MOST_DRIFT, LiveDisplay, clock, drift_warning, jump_warning
from coterie.config.run import RunConfig
from coterie.deployment.costs import MAX_DISK
from coterie.deployment.status import ServerWatch, opposition
from coterie.deployment.status import Status as RunStatus
from coterie.deployment.terms import flat
from coterie.errors import plural
from coterie.federation.pipeline import pipeline_of
from coterie.federation.sizes import MiB
from coterie.federation.statements import protection, statements
from coterie.messages.envelope import Order
from coterie.messages.names import BYTES_DOWN, BYTES_UP, DRIFT, JUMPED, LOSS
from coterie.turn import Turn

if TYPE_CHECKING:
    from coterie.deployment.client import SiteRun

WIDEST = 40
"""The greatest width of the subjects of a description, in characters."""


class Board(LiveDisplay[Live], ServerWatch):
    """The server's table of clients: status, time of the last upload, and bytes transferred.

    A line is printed for each event, such as the end of a round. On a terminal, the table is shown
    below these lines and is updated in place. If the output is not a terminal (a file, a pipe, a
    service's log), only the lines are printed.

    Args:
        console: The output.
        as_json: Whether to print the lines as JSON objects if the output is not a terminal.
    """

    def __init__(self, console: Console, as_json: bool = False) -> None:
        super().__init__(console, Live(console=console, auto_refresh=False, transient=True))
        self.as_json = as_json and not console.is_terminal

    def note(self, text: str) -> None:
        now = datetime.now()
        self._say(in_json(now, text) if self.as_json else f"{now:%H:%M:%S} {text}")

    def ends(self, text: str) -> None:
        """Print `text` as the last line of the server's output, after the end of the run."""
        self._say(in_json(datetime.now(), text) if self.as_json else text)

    def show(self, status: RunStatus) -> None:
        if self.console.is_terminal:
            self.live.update(status_table(status), refresh=True)


class JsonLines(logging.Formatter):
    """Formats log records as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return in_json(datetime.fromtimestamp(record.created), text, record.levelname)


def in_json(time: datetime, message: str, level: str = "INFO") -> str:
    """Format an event as a JSON object."""
    fields = {"time": time.astimezone().isoformat(), "level": level, "message": message}
    return json.dumps(fields, ensure_ascii=False)


def status_table(status: RunStatus) -> Group:
    """Return what a terminal shows about a run's status.

    The first line names the current round. A table lists the clients. A line for each client whose
    changes point against the others' changes follows. The last line says for which clients the
    server is waiting; it is empty if the server is not waiting.
    """
    table = Table("client", "state")
    for head in ("last reply", "up", "down", "rounds missed"):
        table.add_column(head, justify="right")
    for name, client in sorted(status.clients.items()):
        when = "" if client.last_reply is None else time_of_day(client.last_reply)
        moved = size(client.bytes_up), size(client.bytes_down)
        table.add_row(name, client.state, when, *moved, str(client.excluded or ""))
    title = f"{status.title}: round {min(status.done + 1, status.rounds)} of {status.rounds}"
    if status.seconds_left:
        title += f", about {clock(status.seconds_left)} left"
    opposing = [opposition(name, c) for name, c in sorted(status.clients.items()) if c.opposes]
    return Group(Text(title), table, *map(Text, opposing), Text(status.waiting))


def time_of_day(seconds: float) -> str:
    """Format a time, in seconds since 1970, as hours, minutes and seconds."""
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


@dataclass(frozen=True)
class Estimate:
    """The needs of a client's part of a run, computed before the run."""

    memory: int | None = None
    """The memory of the client's process on a CPU, in bytes; None if it is unknown."""
    up: int | None = None
    """The largest upload, in bytes; None if it is unknown."""
    down: int | None = None
    """The largest download, in bytes; None if it is unknown."""
    trained: tuple[str, ...] = ()
    """Descriptions of the trained layers; empty if they are unknown."""


class ClientBoard(LiveDisplay[Status]):
    """The client's output: a line for each event and, on a terminal, a status line.

    Args:
        estimate: Function that returns the needs of a run with a given number of clients.
    """

    def __init__(
        self,
        console: Console,
        estimate: Callable[[RunConfig, int], Estimate] = lambda *_: Estimate(),
    ) -> None:
        super().__init__(console, Status("connecting to the server", console=console))
        self.estimate = estimate
        self.losses: list[float] = []
        self.began: float | None = None
        """The time on the monotonic clock at which the client completed its last round.

        Before the end of the first round, it is the time at which the first order arrived.
        """
        self.bytes = {BYTES_UP: 0, BYTES_DOWN: 0}

    def __call__(self, event: str, value: Any) -> None:
        """Show an event of the client, such as the start of a connection or a training loss.

        This method implements `coterie.network.link.Seen`.

        Args:
            event: The name of the event or of a metric.
            value: The details of the event, or the value of the metric.
        """
        match event:
            case "connected":
                self._say(f"connected to {value}")
                self.live.update("waiting for the server")
            case "away":
                self._say(f"{value}; retrying")
                self.live.update("connecting to the server")
            case "joined":
                self._joins(value)
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
                if self.began is None and event == BYTES_DOWN:  # the first order has arrived
                    self.began = time.monotonic()
            case _ if event == JUMPED:
                self._say(jump_warning("this client", value))
            case _ if event == DRIFT and value > MOST_DRIFT:
                self._say(drift_warning("this client", value))
            case _ if event.startswith(LOSS):
                self.losses.append(value)
                self.live.update(f"training: loss {value:.3f}")

    def _joins(self, run: "SiteRun") -> None:
        self.config, self.done = run.config, 0
        self.began, self.durations = None, []
        self._say(f"joined the run {run.config.name}: {run.config.label}")
        for adapter in run.host.covered:
            self._say(f"  trained on this machine: {adapter}")
        for when, texts in run.host.schema.described().items():
            for text in texts:
                self._say(f"  leaves this machine {when}: {text}")
        for subject, text in protection(run.config):
            self._say(f"  {subject}: {text}")

    def agrees(self, order: Order, config: RunConfig) -> bool:
        """Show the run that the client is asked to join, and prompt the user for agreement."""
        self.live.stop()
        estimate = self.estimate(config, order.clients or 1)
        self.console.print("The server asks you to take part in this run:")
        self.console.print(_grid(in_words(order, config, estimate)))
        self.console.print(
            "Your agreement holds for this run only. If you decline, the server is told that you "
            "declined, and nothing else."
        )
        while (answer := self._answer()) == "show":
            self.console.print(_grid(settings_in_words(order)))
        self.__enter__()
        return answer == "y"

    def _answer(self) -> str:
        """Prompt the user for `y`, `n` or `show`. The end of the input means `n`."""
        question = "Do you agree to take part? (show: all settings)"
        try:
            return Prompt.ask(question, choices=["y", "n", "show"], console=self.console)
        except EOFError:
            return "n"

    def _step(self, turn: Turn) -> None:
        """Print a line about a turn for which the client has completed its training.

        The client has not sent its upload for this turn yet.
        """
        self.done += 1
        items = [f"loss {sum(self.losses) / len(self.losses):.3f}"] if self.losses else []
        items += [f"{size(self.bytes[name])} {name[6:]}" for name in self.bytes]  # up or down
        now = time.monotonic()
        self.durations.append(now - (self.began or now))
        self.began = now
        # The lower median ignores one of two rounds, which may have waited for other clients.
        seconds = median_low(self.durations) * (self.config.turns - turn.number - 1)
        items += [f"about {clock(seconds)} left"] if seconds else []
        self._say(f"round {turn.round + 1}/{self.config.rounds}: {', '.join(items)}")
        self.losses = []
        self.live.update("waiting for the server")


def _grid(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=WIDEST)
    for subject, text in rows:
        table.add_row(Text(subject), Text(text))
    return table


def settings_in_words(order: Order) -> list[tuple[str, str]]:
    """Return (key, value) pairs of all settings of the run that an order asks a client to join."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in flat(order.config or {})
    ]


def in_words(
    order: Order, config: RunConfig, estimate: Estimate | None = None
) -> list[tuple[str, str]]:
    """Return (subject, text) pairs that describe a run to the user who is asked to agree to it.

    Args:
        order: The server's order to join the run.
        config: The run as the client sees it.
        estimate: The needs of the client's part of the run; None if they are unknown.
    """
    method, training, estimate = config.method, config.training, estimate or Estimate()
    texts = {
        "run": config.name,
        "method": f"{method.name}: {method.summary}",
        "base": str(config.base),
        "trained": "\n".join(estimate.trained),
        "training": f"{plural(config.rounds, 'round')} of {plural(training.steps, 'step')} of "
        f"{plural(training.batch, 'sample')}",
        **dict(statements(config)),
        "transforms": "; ".join(f"{t.name}: {t.summary}" for t in config.transforms),
        "losses": "sent to the server, with all other metrics"
        if config.deployment.share_metrics
        else "on this client's texts, they stay on this machine",
        "traffic": traffic_in_words(config, estimate),
        **costs_in_words(config, estimate.memory),
        "public text": order.public or "",
        "plugins": "; ".join(
            sorted({f"{p.file} {p.sha256[:16]}" for p in (order.plugins or {}).values()})
        ),
    }
    return [(subject, text) for subject, text in texts.items() if text]


def traffic_in_words(config: RunConfig, estimate: Estimate) -> str:
    """Describe the sizes of a client's messages; the result is empty if they are unknown."""
    if estimate.up is None or estimate.down is None:
        return ""
    schema = pipeline_of(config).schema
    up, down = estimate.up / MiB, estimate.down / MiB
    texts = [f"at most {up:,.1f} MiB up and {down:,.1f} MiB down"] if up or down else []
    if any(not isinstance(field.dtype, str) for field in (*schema.up, *schema.down)):
        texts.append("predictions, whose size depends on the public text")
    return f"in an exchange, {' and '.join(texts)}" if texts else ""


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
        "memory": f"{estimate}at most {training.at_once} samples per forward pass in training and "
        f"{evaluation.batch} in evaluation, with up to {config.data.window} tokens per sample; "
        "`coterie client --check` measures the memory",
        "disk": "two checkpoints of the trained parameters, and the score of each test window; at "
        f"most {MAX_DISK / 2**30:.0f} GiB for all runs in --out",
    }
