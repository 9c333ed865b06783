"""The information for an operator: reminders, the status file, /health and /metrics."""

import json
import re
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
from looped import Notes
from rich.console import Console
from typer.testing import CliRunner

from coterie.cli import app
from coterie.cli.console import status_table
from coterie.deployment import status as module
from coterie.deployment.monitoring import exposition, monitored
from coterie.deployment.seats import Seat
from coterie.deployment.start import errors_logged, log
from coterie.deployment.status import Monitor, ServerWatch, Status, awaited_uploads, named
from coterie.errors import CoterieError, Unwritable
from coterie.network import accepting
from coterie.network.address import listen
from coterie.runs import RunFolder
from coterie.runs.progress import logged
from coterie.turn import FIRST, Turn


@pytest.fixture
def watch() -> Notes:
    return Notes()


@pytest.fixture
def monitor(tmp_path: Path, watch: Notes) -> Monitor:
    return Monitor("fedavg", 3, RunFolder(tmp_path), watch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_server_that_waits_says_so_at_once_and_ever_less_often(monitor, watch, clock) -> None:
    reported = []
    for second in range(4000):
        clock[0] = 1000.0 + second
        monitor.waits(FIRST, "anna")
        if len(watch.lines) > len(reported):
            reported.append(second)
            watch.lines[-1:] = [f"{second}"]
    assert reported == [0, 60, 180, 420, 900, 1860, 3660]
    assert monitor.status.waiting == "round 1: waiting for anna"


def test_a_round_that_takes_long_is_mentioned_after_a_minute(monitor, watch, clock) -> None:
    monitor.opens(FIRST)
    for second in range(100):
        clock[0] = 1000.0 + second
        monitor.waits(FIRST, "the upload of ben")
    assert watch.lines == ["round 1: waiting for the upload of ben"]
    monitor.closes(FIRST, 2)
    assert monitor.status.waiting == "round 1: waiting for the upload of ben"
    monitor.opens(FIRST)
    assert monitor.status.waiting == ""


def test_the_time_left_does_not_count_waiting(tmp_path, watch, clock) -> None:
    monitor = Monitor("fedavg", 5, RunFolder(tmp_path), watch)
    for round, (wait, work) in enumerate(((5000, 10), (0, 12), (90_000, 11))):
        turn = Turn(round, round, round)
        clock[0] += wait
        monitor.opens(turn)
        clock[0] += work
        monitor.closes(turn, 1)
    assert monitor.status.seconds_left == 2 * 11
    assert watch.lines[-1] == "round 3/5: 1 upload used, about 0:00:22 left"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["ben"], "ben"),
        (["ben", "anna"], "anna and ben"),
        (["c", "a", "b"], "a, b and c"),
        ([f"client-{n}" for n in range(9)], "client-0, client-1, client-2, client-3, client-4, "
         "client-5 and 3 more"),
    ],
)  # fmt: skip
def test_few_names_are_listed(names, text) -> None:
    assert named(names) == text


def test_the_deadline_is_named_also_when_it_has_passed() -> None:
    text = awaited_uploads(["ben"], 3600)
    assert re.fullmatch(r"the upload of ben; the deadline is \d\d:\d\d:\d\d", text)
    text = awaited_uploads({"ben", "anna"}, -5)
    assert text.startswith("the uploads of anna and ben; the deadline was ")
    assert text.endswith(", but the quorum is still missing")


def test_an_unwritable_status_stops_no_server(monitor, watch, monkeypatch, tmp_path) -> None:
    def fail(path: Path, text: str) -> None:
        raise Unwritable(f"Could not write {path}: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_text", fail)
        for _ in range(3):
            monitor.save()
    [line] = watch.lines
    assert line.startswith("the status is out of date: Could not write")
    monitor.save()
    assert Status.read(RunFolder(tmp_path)) == monitor.status


def filled(monitor: Monitor) -> None:
    monitor.moved("anna", up=100, down=7)
    monitor.excludes("ben")
    monitor.shows({"anna": Seat(present="1", joined=True), "ben": Seat()}, {"anna"})


def test_the_status_is_read_from_the_folder(monitor, tmp_path) -> None:
    filled(monitor)
    about = Status.read(RunFolder(tmp_path))
    assert about == monitor.status
    assert {name: client.state for name, client in about.clients.items()} == {
        "anna": "working",
        "ben": "away",
    }
    monitor.shows({"anna": Seat()}, set())  # ben was expelled
    monitor.save(ended=True)
    assert Status.read(RunFolder(tmp_path)).clients.keys() == {"anna"}
    assert Status.read(RunFolder(tmp_path)).ended


@pytest.mark.parametrize("text", ["", "{", '{"title": "x"}', '{"title": 3, "rounds": "many"}'])
def test_a_damaged_status_is_one_sentence(text, tmp_path) -> None:
    with pytest.raises(CoterieError, match="contains no status"):
        Status.read(RunFolder(tmp_path))
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(CoterieError, match=r"status\.json cannot be read"):
        Status.read(RunFolder(tmp_path))


LINE = re.compile(r'([a-z_]+)(?:\{client="([A-Za-z0-9._-]+)"\})? (-?[0-9.]+(?:e[+-][0-9]+)?)')


def parsed(text: str) -> dict[tuple[str, str], float]:
    """Parse Prometheus' text format, and check its rules and conventions.

    Each metric has one block: HELP, TYPE, and one line for each client. Counters, and nothing else,
    end with `_total`; a time or a size has its base unit in its name.
    """
    assert text.endswith("\n")
    values: dict[tuple[str, str], float] = {}
    metrics: list[str] = []
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, name, description = line.split(" ", 3)
            assert name not in metrics
            assert description.endswith(".")
            metrics.append(name)
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {metrics[-1]} " + (
                "counter" if metrics[-1].endswith("_total") else "gauge"
            )
        else:
            match = LINE.fullmatch(line)
            assert match, line
            name, client, value = match.groups()
            assert name == metrics[-1]
            assert (name, client or "") not in values
            values[name, client or ""] = float(value)
    return values


def test_metrics_are_in_the_text_format_of_prometheus(monitor) -> None:
    filled(monitor)
    monitor.status.clients["anna"].last_reply = 1795679070.25
    monitor.status.updated = 1795679080.5
    assert parsed(exposition(monitor.status)) == {
        ("coterie_rounds", ""): 3,
        ("coterie_rounds_complete", ""): 0,
        ("coterie_status_timestamp_seconds", ""): 1795679080.5,
        ("coterie_client_present", "anna"): 1,
        ("coterie_client_present", "ben"): 0,
        ("coterie_client_received_bytes_total", "anna"): 100,
        ("coterie_client_received_bytes_total", "ben"): 0,
        ("coterie_client_sent_bytes_total", "anna"): 7,
        ("coterie_client_sent_bytes_total", "ben"): 0,
        ("coterie_client_last_reply_timestamp_seconds", "anna"): 1795679070.25,
        ("coterie_client_excluded_rounds_total", "anna"): 0,
        ("coterie_client_excluded_rounds_total", "ben"): 1,
    }
    monitor.status.seconds_left = 90.5
    assert parsed(exposition(monitor.status))["coterie_remaining_seconds", ""] == 90.5


def test_the_metrics_are_those_that_prometheus_own_parser_reads(monitor) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    filled(monitor)
    text = exposition(monitor.status)
    read = {
        (sample.name, sample.labels.get("client", "")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert read == parsed(text)


def test_health_and_metrics_are_served_and_nothing_else(monitor) -> None:
    filled(monitor)
    listening = listen("127.0.0.1:0", "--metrics")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with monitored(monitor, listening):
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["updated_seconds_ago"] < 60
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"coterie_rounds 3\n" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/status.json")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health")


def test_idle_connections_do_not_stop_the_monitoring(monitor, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "PENDING", 5)
    monkeypatch.setattr(accepting, "PENDING_SECONDS", 1.0)
    listening = listen("127.0.0.1:0", "--metrics")
    address = listening.getsockname()
    with monitored(monitor, listening), ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(20)]
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/health") as answer:
            assert answer.status == 200
        assert [each.recv(1) for each in idle] == [b""] * 20


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "INFO stopped"),
        (CoterieError("The disk is full."), "ERROR The disk is full."),
        (ZeroDivisionError("by zero"), "ERROR the server failed\nTraceback"),
    ],
)
def test_the_log_says_why_a_server_ended(error, line, tmp_path, caplog) -> None:
    caplog.set_level("INFO", log.name)
    with pytest.raises(type(error)), logged(tmp_path / "server.log", log.name), errors_logged():
        raise error
    assert line in (tmp_path / "server.log").read_text()


def test_the_command_shows_the_status(config, tmp_path, monkeypatch) -> None:
    folder = RunFolder.create(tmp_path / "us", {"config": config().as_dict(), "clients": {}})
    monkeypatch.setattr("coterie.cli.operate.check_run", lambda _: None)
    monitor = Monitor("fedavg", 3, folder, ServerWatch())
    filled(monitor)
    monitor.status.waiting = "round 1: waiting for ben; 1 of 2 clients are ready"
    monitor.save()

    def shown(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["status", str(folder.path), *options])
        return result.exit_code, result.output

    code, text = shown()
    assert code == 1
    assert "waiting for ben" in " ".join(text.split())
    assert "The server is not running; this is the status of" in text
    with folder.lock():
        assert shown()[0] == 0
        assert "not running" not in shown()[1]
        assert Status.model_validate_json(shown("--json")[1]) == monitor.status
        assert json.loads(shown("--json")[1])["running"]
    code, text = shown("--json")
    assert (code, json.loads(text)["running"]) == (1, False)
    monitor.save(ended=True)
    code, text = shown()
    assert code == 0
    assert "The run has ended" in text


def change(round: int, **cosines: float | None) -> list[dict[str, object]]:
    return [
        {"round": round, "client": name, "name": "change", "value": {"ratio": 1.0, "cosine": value}}
        for name, value in cosines.items()
    ]


def test_a_client_whose_changes_point_against_the_others_is_named(monitor, watch) -> None:
    for round in range(9):
        monitor.compares(change(round, ada=0.1, ben=0.02, cy=-0.04, eve=-0.1))
    named = [line for line in watch.lines if "point against" in line]
    assert named == [
        "eve's changes point against the others' in 4 of 4 rounds; see the page on hostile clients",
        "eve's changes point against the others' in 8 of 8 rounds; see the page on hostile clients",
    ]
    assert [name for name, client in monitor.status.clients.items() if client.opposes] == ["eve"]
    shown = StringIO()
    Console(width=100, file=shown).print(status_table(monitor.status))
    assert "eve's changes point against the others' in 9 of 9 rounds" in shown.getvalue()


def test_few_clients_or_few_rounds_against_the_others_name_nobody(monitor, watch) -> None:
    for round in range(20):
        monitor.compares(change(round, ada=-0.5, ben=-0.5, cy=-0.5))  # two others each
        monitor.compares(change(100 + round, ada=None, ben=0.1, cy=0.1, eve=-0.5))
        against = -0.1 if round % 2 else 0.1
        monitor.compares(change(200 + round, ada=against, ben=0.1, cy=0.1, eve=0.1))
    personal = Monitor("auto", 30, monitor.folder, watch, one_mean=False)
    for round in range(20):
        personal.compares(change(round, ada=0.1, ben=0.1, cy=0.1, eve=-0.5))
    assert watch.lines == []


def test_late_changes_against_the_others_name_nobody(monitor, watch) -> None:
    """Report cosines of an honest client with other texts, then those of a hostile client."""
    for round in range(100):
        cosine = 0.02 if round < 5 else -0.14
        monitor.compares(change(round, ada=0.1, ben=0.02, cy=cosine, eve=-0.1))
    assert {line.split("'")[0] for line in watch.lines} == {"eve"}
    assert [name for name, client in monitor.status.clients.items() if client.opposes] == ["eve"]
    assert monitor.status.clients["cy"].compared == 20


def test_a_server_that_starts_again_counts_the_rounds_before(monitor, watch, tmp_path) -> None:
    lines = [line for r in range(4) for line in change(r, ada=0.1, ben=0.1, cy=0.1, eve=-0.1)]
    monitor.folder.append(lines)
    monitor.start(4)
    assert "eve's changes point against the others' in 4 of 4 rounds" in watch.lines[-1]
