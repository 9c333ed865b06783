"""`--check` says what a run needs and what stands in its way, and starts nothing."""

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config.run import parse

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from coterie.analysis import trial
from coterie.cli import check
from coterie.errors import CoterieError
from coterie.messages.envelope import Order
from coterie.messages.formats import PROTOCOL
from coterie.network import certificates
from coterie.network.keys import Keys


@pytest.fixture
def place(values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with keys and a run file for it; the run, with its text."""
    monkeypatch.chdir(tmp_path)
    keys = Keys.create(tmp_path / "keys")
    run = values(clients=[{"name": "poet", "path": "poet.txt"}])
    keys.add("poet", tmp_path / "poet.key")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**run, "clients": [{"name": "poet"}]}))
    return run


def server(*more: str) -> Result:
    return CliRunner().invoke(app, ["server", "run.yaml", "--check", *more])


def client(run: dict[str, Any], *more: str) -> Result:
    text = Path(run["data_root"]) / "poet.txt"
    where = ["--server", "localhost:1", "--key", "poet.key", "--data", str(text)]
    where += ["--base", run["base"]]
    return CliRunner().invoke(app, ["client", *where, "--check", *more])


def test_a_server_that_can_start(place, tmp_path: Path) -> None:
    result = server("--address", "127.0.0.1:0")
    assert result.exit_code == 0, result.output
    for words in (
        "keys        ok      1 client has a key",
        "address     ok",
        "run         ok      comigs-1g1s, 3 rounds of",
        "messages    ok",
        "B up and ",
        "The server can start.",
    ):
        assert words in result.output
    assert not (tmp_path / "runs").exists()


def test_a_server_whose_clients_messages_are_too_large(place, monkeypatch) -> None:
    monkeypatch.setattr("coterie.messages.message.LARGEST_MESSAGE", 1000)
    result = server("--address", "127.0.0.1:0")
    assert result.exit_code == 1
    assert "run         NOT OK  An upload of a client may have" in result.output


def test_a_port_in_use_and_a_certificate_that_ended(place, tmp_path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        result = server("--address", busy)
        other = server("--address", "127.0.0.1:0", "--metrics", busy)
    assert result.exit_code == other.exit_code == 1
    assert "address     NOT OK  Could not listen on 127.0.0.1:" in other.output
    assert "address     NOT OK  Could not listen on 127.0.0.1:" in result.output
    assert "The remaining checks were skipped." in result.output
    assert "run         ok" not in result.output
    monkeypatch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
    Keys(tmp_path / "keys").certify()
    assert "keys        NOT OK  The server's certificate expired on" in server().output


def order(run: dict[str, Any], protocol: int = PROTOCOL, public: str | None = None) -> Order:
    told = parse(run).visible_to("poet")
    more: dict[str, Any] = {"protocol": protocol, "config": told, "public": public}
    return Order(run="0" * 16, client="poet", kind="join", turn=0, **more)


def test_a_client_that_can_take_part(place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(check, "first_order", lambda *_: order(place))
    result = client(place)
    assert result.exit_code == 0, result.output
    for words in (
        "key         ok      poet, valid until",
        "connection  ok      localhost:1 accepts poet",
        "texts       ok",
        "memory      ok",
        "sent        ok",
        "LoRA pairs of the generalists",
        "passed on to other clients: nothing",
        "privacy: no noise is added to anything",
        "time        ok      ",
        "This client can take part",
    ):
        assert words in result.output
    assert not (tmp_path / "runs").exists()


def test_a_client_that_cannot(place, monkeypatch) -> None:
    result = client(place)
    assert result.exit_code == 1
    assert "connection  NOT OK  localhost:1 is unreachable." in result.output
    monkeypatch.setattr(check, "first_order", lambda *_: order(place, PROTOCOL + 1))
    assert "run         NOT OK  The run uses protocol version" in client(place).output


def test_a_client_that_agreed_to_another_run_or_has_another_public_text(place, monkeypatch) -> None:
    asked = order({**place, "rounds": 9})
    monkeypatch.setattr(check, "first_order", lambda *_: asked)
    result = client(place, "--run", "run.yaml")
    assert result.exit_code == 1
    assert "run         NOT OK  The run differs from what was agreed" in result.output
    assert "rounds: agreed 3, requested 9" in " ".join(result.output.split())
    monkeypatch.setattr(check, "first_order", lambda *_: order(place, public="0" * 32))
    mine = str(Path(place["data_root"]) / "whaler.txt")
    result = client(place, "--run", "run.yaml", "--public", mine)
    assert "run         NOT OK  The run has a different public text than" in result.output


def test_a_step_that_needs_other_clients_is_left_out_and_no_fault(place, monkeypatch) -> None:
    run = {**place, "method": {"name": "fedamole", "experts": 6}}
    monkeypatch.setattr(check, "first_order", lambda *_: order(run))
    result = client(run)
    assert result.exit_code == 0, result.output
    step = "step        -       not measured: the step needs the server or other clients"
    assert step in result.output
    assert "This client can take part" in result.output


def test_a_server_whose_run_no_demo_text_fits_can_start(place, monkeypatch) -> None:
    def run_trial(*_: object) -> None:
        raise CoterieError("The method needs prompts.")

    monkeypatch.setattr(trial, "run_trial", run_trial)
    result = server("--address", "127.0.0.1:0")
    assert result.exit_code == 0, result.output
    tried = "messages    -       not measured: this run cannot be tried with the built-in demo text"
    assert tried in result.output
