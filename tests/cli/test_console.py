"""The output of runs, servers and clients: a table, and lines where there is no terminal."""

import io
import json
import logging
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coterie.cli import console as module
from coterie.cli.console import Board, ClientBoard, Estimate, JsonLines
from coterie.cli.progress import ConsoleProgress
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.seats import Seat
from coterie.deployment.status import Monitor
from coterie.messages import Field, Schema
from coterie.messages.envelope import Order
from coterie.runs import RunFolder, RunStart
from coterie.testing import loop
from coterie.turn import FIRST, Turn


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_of(rounds: int, host: Any) -> SimpleNamespace:
    config = SimpleNamespace(name="us", label="fedavg", rounds=rounds, turns=rounds)
    return SimpleNamespace(config=config, host=host)


def test_a_server_shows_who_is_there_and_what_they_do(tmp_path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Board(console) as board:
        monitor = Monitor("fedavg", 4, RunFolder(tmp_path), board)
        monitor.start(1)
        monitor.moved("anna", up=2_400_000, down=512)
        monitor.excludes("ben")
        seats = {"anna": Seat(present="1", joined=True), "ben": Seat(present="2")}
        seats |= {"chloe": Seat(joined=True), "dan": Seat(present="3", joined=True)}
        seats["eve"] = Seat(present="4", joined=True, stopped=True)
        seats["fay"] = Seat(declined=True)
        monitor.shows(seats, {"dan"})
    text = shown(console)
    assert "round 2 of 4" in text
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "2.4 MB" in rows["anna"]
    assert "512 bytes" in rows["anna"]
    assert rows["ben"].split()[-2] == "1"
    states = [rows[name].split()[3] for name in seats]
    assert states == ["ready", "joining", "away", "working", "stopped", "declined"]


def test_lines_without_a_terminal_are_those_of_the_log(console, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "coterie")
    with Board(console) as board:
        monitor = Monitor("fedavg", 2, RunFolder(tmp_path), board)
        monitor.start(0)
        monitor.waits(FIRST, "anna; 0 of 1 clients are ready")
        monitor.shows({}, set())
        monitor.note("anna joined")
        for round, counted in enumerate((3, 2)):
            monitor.opens(Turn(round, round, round))
            monitor.closes(Turn(round, round, round), counted)
    lines = [line.partition(" ")[2] for line in shown(console).splitlines()]
    assert len(lines) == 5
    assert "round 1/2: 3 uploads used, about" in lines[3]
    assert lines[4].endswith("round 2/2: 2 uploads used")
    assert caplog.messages == lines


def test_lines_without_a_terminal_can_be_json(console) -> None:
    with Board(console, as_json=True) as board:
        board.note("„anna“ joined [bold]")
    line = json.loads(shown(console))
    assert (line["level"], line["message"]) == ("INFO", "„anna“ joined [bold]")
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    record = logging.makeLogRecord({"msg": "lost %d", "args": (3,), "levelname": "WARNING"})
    assert json.loads(JsonLines().format(record))["message"] == "lost 3"


def test_a_client_shows_what_leaves_and_how_far_it_is(console, monkeypatch) -> None:
    facts = [("passed on to other clients", "nothing"), ("privacy", "no noise")]
    monkeypatch.setattr(module, "protection", lambda _: facts)
    averaged = Field("a", "the averaged part", reduce="mean"), Field("a", "the averaged part")
    hello = (Field("size", "how much there is", "json"),)
    schema = Schema(hello, (*averaged, Field("b", "what a transform adds")))
    host = SimpleNamespace(schema=schema, covered=("experts inside A in all 2 layers", "LoRA on B"))
    run = run_of(2, host)
    with ClientBoard(console) as board:
        board("warning", "Data: texts duplicated within a split: 3")
        board("joined", run)
        for loss in (3.0, 2.0):
            board("loss/joint", loss)
        board("bytes/down", 1_500)
        board("bytes/up", 999)
        board("step", FIRST)
        board("step", Turn(1, 1, 1))
        board("away", "example.org:9092 is unreachable")
    text = shown(console)
    assert text.startswith("Data: texts duplicated")
    for words in (
        "  trained on this machine: LoRA on B\n",
        "leaves this machine once: how much there is",
        "  passed on to other clients: nothing\n  privacy: no noise\n",
        "leaves this machine every exchange: what a transform adds\n",
        "round 1/2: loss 2.500, 999 bytes up, 1.5 kB down, about",
        "round 2/2: 999 bytes up, 1.5 kB down\n",
    ):
        assert words in text
    assert text.count("leaves this machine every exchange: the averaged part") == 1
    assert text.endswith("is unreachable; retrying\n")


def test_a_client_shows_a_real_run(console, config, tmp_path) -> None:
    run = config(method="fedavg", rounds=1)
    with ClientBoard(console) as board:
        of = {c.name: loop.site(run, c.name, tmp_path) for c in run.clients}
        workers = {name: Worker(site, board) for name, site in of.items()}
        loop.server(run, tmp_path / "server", loop.Loop(workers)).rounds()
    text = shown(console)
    assert text.count("joined the run") == len(run.clients)
    assert "  trained on this machine: LoRA on" in text
    assert "leaves this machine every exchange: LoRA pairs" in text


def test_a_client_that_is_connected_does_not_show_that_it_connects(console) -> None:
    with ClientBoard(console) as board:
        assert board.live.status == "connecting to the server"
        board("connected", "example.org:9092")
        assert board.live.status == "waiting for the server"
        board("away", "example.org:9092 is unreachable")
        assert board.live.status == "connecting to the server"


def test_a_clients_time_left_does_not_count_waiting(console, monkeypatch) -> None:
    monkeypatch.setattr(module, "protection", lambda _: [])
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    run = run_of(5, SimpleNamespace(schema=Schema((), ()), covered=()))
    with ClientBoard(console) as board:
        board("joined", run)
        for round, (wait, work) in enumerate(((5000, 10), (90_000, 12), (0, 11))):
            now[0] += wait
            board("bytes/down", 1_500)
            now[0] += work
            board("step", Turn(round, round, round))
    left = [line.rpartition("about ")[2] for line in shown(console).splitlines() if "about" in line]
    assert left == ["0:00:40 left", "0:00:30 left", "0:00:22 left"]


def test_a_client_warns_of_a_validation_loss_that_jumps(console) -> None:
    with ClientBoard(console) as board:
        board("validation/loss", 4.9)
        board("validation/jump", {"round": 3, "loss": 8.8, "best": 4.9})
    jump = "validation loss is 8.80 after round 3, but 4.90 for the best model so far"
    assert jump in shown(console)


@pytest.fixture
def asked(console, config, monkeypatch):
    """A function that asks a user with given answers, and returns the agreement and the output."""

    def ask(run: RunConfig, *answers: str, estimate: Estimate | None = None) -> tuple[bool, str]:
        left = iter(answers)

        def answer(*_: object) -> str:
            if (line := next(left, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", answer)
        header = {"run": "0" * 16, "client": "poet", "kind": "join", "turn": 0, "clients": 3}
        order = Order(**header, config=run.visible_to("poet"))
        with ClientBoard(console, lambda *_: estimate or Estimate()) as board:
            return board.agrees(order, run), shown(console)

    return ask


REPLIES = [
    (["y"], True, False),
    (["n"], False, False),
    (["what", "show", "y"], True, True),
    ([], False, False),  # the end of the input
    (["show"], False, True),
]


@pytest.mark.parametrize(("answers", "agrees", "shows"), REPLIES)
def test_a_user_agrees_or_declines(answers, agrees, shows, asked, config) -> None:
    answer, text = asked(config(), *answers)
    assert answer == agrees
    assert ("method.lora.alpha" in text) == shows
    assert "the server is told that you declined" in " ".join(text.split())


def test_the_question_names_few_settings_and_what_others_receive(asked, config) -> None:
    estimate = Estimate(2 * 10**9, 5 * 2**19, 2**20, ("LoRA on A in all 2 layers",))
    trials = "in trials: LoRA pairs on attention; in trials, and after"
    for method, passed_on in (("auto", trials), ("fedavg", "nothing")):
        text = asked(config(method=method), "y", estimate=estimate)[1]
        parts = [line.partition("  ") for line in text.splitlines()]
        lines = {key: " ".join(value.split()) for key, _, value in parts}
        assert lines["passed on to other clients"].startswith(passed_on[:40])
        assert lines["privacy"] == "no noise is added to anything"
        assert lines["trained"] == "LoRA on A in all 2 layers"
        assert lines["traffic"].startswith("in an exchange, at most 2.5 MiB up and 1.0")
        assert "settings" not in lines


NAMES = ("lexicographer", "poet", "diarist", "whaler")


def follow(progress: ConsoleProgress, losses: bool, *adapters: str) -> None:
    progress.on_run_begin(RunStart("comigs-1g1s", 2, 0, NAMES[:1], 1000, adapters, 2, 0))
    for round in range(2):
        if losses:
            progress.on_metric(round, "lexicographer", "loss/experts", 4.5)
            progress.on_metric(round, "lexicographer", "bytes/up", 10)
        progress.on_client_end(round, "lexicographer")
        progress.on_round_end(round, "test perplexity 90.00  " if round == 1 else "")
    progress.on_run_end(None)


def plain(losses: bool) -> list[str]:
    out = io.StringIO()
    follow(ConsoleProgress(Console(file=out, width=40)), losses)
    return out.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_per_round() -> None:
    title, first, second = plain(losses=True)
    assert title == "comigs-1g1s: 2 rounds, 1 client"
    assert first.startswith("comigs-1g1s: round 1/2  loss 4.500  ")
    assert first.endswith("tokens/s  0:00:00 left")
    assert second.endswith("tokens/s  took 0:00:00  test perplexity 90.00")


def test_a_method_that_trains_nothing_has_no_line_without_news() -> None:
    last = "comigs-1g1s: round 2/2  took 0:00:00  test perplexity 90.00"
    assert plain(losses=False)[1:] == [last]


def test_a_second_run_has_its_own_bar_and_repeats_no_adapter() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=80, force_terminal=True, color_system=None))
    for _ in range(2):
        follow(progress, True, "rank 8 on 4 layers")
    assert out.getvalue().count("rank 8 on 4 layers") == 1
    assert progress.live.tasks == []
    assert not progress.live.live.is_started


def test_on_a_terminal_everything_fits_in_a_line() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=80, force_terminal=True, color_system=None))
    progress.on_run_begin(RunStart("comigs-1g1s", 20, 3, NAMES, 4000, (), 20, 3))
    progress.on_metric(3, "lexicographer", "loss/experts", 4.5)
    Console(width=200, file=(text := io.StringIO())).print(progress.live.get_renderable())
    progress.live.refresh()
    progress.on_run_end(None)
    (line,) = text.getvalue().rstrip().splitlines()
    assert len(line.rstrip()) <= 80
    assert "comigs-1g1s" in line
    assert "4/20 lexicograp loss 4.500" in line
    assert "tokens/s" in line
    assert line.rstrip().endswith("left")
