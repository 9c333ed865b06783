"""Output of a deployment's server and clients, and the description of a run that users agree to."""

import json
import logging
import time
from collections.abc import Callable
from datetime import datetime
from statistics import median_low
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal as size
from rich.live import Live
from rich.prompt import Confirm
from rich.status import Status
from rich.table import Table
from rich.text import Text

from coterie.cli.progress import LiveDisplay, clock, jump_warning
from coterie.config.run import RunConfig
from coterie.deployment.costs import MAX_DISK
from coterie.deployment.status import ServerWatch
from coterie.deployment.status import Status as RunStatus
from coterie.deployment.terms import flat
from coterie.errors import plural
from coterie.messages.envelope import Order
from coterie.messages.names import BYTES_DOWN, BYTES_UP, JUMPED, LOSS


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
    """Return what a terminal shows about a run's status: two lines, and a table between them.

    The first line names the current round. The table lists the clients. The last line says for
    which clients the server is waiting; it is empty if the server is not waiting.
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
    return Group(Text(title), table, Text(status.waiting))


def time_of_day(seconds: float) -> str:
    """Format a time, in seconds since 1970, as hours, minutes and seconds."""
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


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
            case "away":
                self._say(f"{value}; retrying")
            case "joined":
                self.rounds, self.done = value.config.exchanges, 0
                self.began, self.durations = None, []
                self._say(f"joined the run {value.config.name}: {value.config.label}")
                for adapter in value.part.covered:
                    self._say(f"  trained on this machine: {adapter}")
                for when, texts in value.part.schema.described().items():
                    for text in texts:
                        self._say(f"  leaves this machine {when}: {text}")
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
        """Print a line about a round for which the client has completed its training.

        The client has not sent its upload for this round yet.
        """
        self.done += 1
        items = [f"loss {sum(self.losses) / len(self.losses):.3f}"] if self.losses else []
        items += [f"{size(self.bytes[name])} {name[6:]}" for name in self.bytes]  # up or down
        now = time.monotonic()
        self.durations.append(now - (self.began or now))
        self.began = now
        # The lower median ignores one of two rounds, which may have waited for other clients.
        seconds = median_low(self.durations) * (self.rounds - round - 1)
        items += [f"about {clock(seconds)} left"] if seconds else []
        self._say(f"round {round + 1}/{self.rounds}: {', '.join(items)}")
        self.losses = []
        self.live.update("waiting for the server")


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
        "sent": "\n".join(f"{when}: {'; '.join(t)}" for when, t in schema.described().items()),
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
        "memory": f"{estimate}at most {training.at_once} samples per forward pass in training and "
        f"{evaluation.batch} in evaluation, with up to {config.data.window} tokens per sample; "
        "`coterie client --check` measures the memory",
        "disk": "two checkpoints of the trained parameters, and the score of each test window; at "
        f"most {MAX_DISK / 2**30:.0f} GiB for all runs in --out",
    }
