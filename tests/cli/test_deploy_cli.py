"""The commands of a deployment, given what they cannot use: one sentence each, before anything
runs."""

import re
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from ports import free_port
from typer.testing import CliRunner

from coterie.cli import app
from coterie.cli import deploy as deploy_cli
from coterie.cli.console import Estimate
from coterie.config.deployed import load_deployment, load_with_any_text
from coterie.config.run import parse
from coterie.config.values import read_values
from coterie.errors import CoterieError
from coterie.testing.loop import deploy

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from coterie.analysis import trial
from coterie.cli import check
from coterie.messages.envelope import Order
from coterie.messages.formats import PROTOCOL
from coterie.network import certificates
from coterie.network.keys import Keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deployment")
    made = Keys.create(folder / "keys")
    for name in ("anna", "ben"):
        made.add(name, folder / f"{name}.key")
    return folder


def complaint(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(result.exception, CoterieError), result.output
    text = str(result.exception)
    assert "\n" not in text
    return text


DORA = {"dora": 1, "others": 1}


NOT_DEPLOYABLE = [
    ({"clients": [{"name": "anna"}, {"name": "carol"}]}, "'carol' has no key.* keys add carol"),
    ({"clients": [{"name": "anna"}], "deployment": {"quorum": 2}}, "quorum is 2, but .* 1 "),
    ({"divide": {"source": "x.jsonl", "by": "label"}}, "`coterie divide`"),
    ({"method": "centralized"}, "cannot be deployed"),
    ({"checkpoint": {"every": 2}}, "every is 2, but the server .* in every round; remove"),
    ({"clients": 3}, "clients should be a list"),
    ({"deployment": {"deadline": 0}}, "deployment.deadline should be greater than 0"),
    ({"method": {"name": "comigs-1g1s", "mlp": {"specialists": DORA}}}, "'dora'"),
]


@pytest.mark.parametrize(("run", "sentence"), NOT_DEPLOYABLE)
def test_run_files_that_no_server_takes(run, sentence, keys, tmp_path) -> None:
    path = tmp_path / "us.yaml"
    path.write_text(yaml.safe_dump(run))
    error = complaint("server", path, "--keys", keys / "keys", "--out", tmp_path / "out")
    assert re.search(sentence, error), error
    assert not (tmp_path / "out").exists()


def test_a_server_without_keys_says_how_to_make_them(tmp_path) -> None:
    (tmp_path / "us.yaml").write_text("rounds: 2\n")
    words = ("server", tmp_path / "us.yaml", "--keys", tmp_path / "keys")
    assert "coterie keys init" in complaint(*words)
    Keys.create(tmp_path / "keys")
    assert "coterie keys add" in complaint(*words)


ANNA = "--server x:1 --key anna.key"


WRONG_OPTIONS = [
    ("--server localhost --key anna.key --data t", "takes HOST:PORT"),
    ("--server https://x:1 --key anna.key --data t", "takes HOST:PORT"),
    ("--server x:1 --key none.key --data t", "none.key"),
    ("--server x:1 --key keys/ca.pem --data t", "not a client's key file"),
    (f"{ANNA} --name ben --data t", "belongs to 'anna'"),
    (ANNA, "Neither --data nor --train is given; give --data"),
    (f"{ANNA} --data nowhere", "No such file or folder: .*nowhere"),
    (f"{ANNA} --data t --train t", "Both --data and --train are given"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG_OPTIONS)
def test_what_a_client_cannot_begin_with(arguments, sentence, keys, monkeypatch) -> None:
    monkeypatch.chdir(keys)
    Path("t").mkdir(exist_ok=True)
    assert re.search(sentence, complaint("client", *arguments.split()))


@pytest.fixture
def waiting_run(keys, tmp_path, monkeypatch) -> list[object]:
    """The arguments of a server whose run folder and keys are valid."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = tmp_path / "us.yaml"
    path.write_text(yaml.safe_dump({"base": "tiny-gpt2", "clients": [{"name": "anna"}]}))
    return ["server", path, "--keys", keys / "keys", "--out", tmp_path / "out"]


@pytest.mark.parametrize("metrics", [(), ("--metrics", "127.0.0.1:0")])
def test_an_address_that_is_in_use_is_one_sentence(waiting_run, metrics, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = f"127.0.0.1:{other.getsockname()[1]}"
        error = complaint(*waiting_run, "--address", busy, *metrics)
        assert re.search(rf"Could not listen on {busy}: another program uses port", error)
        free = f"127.0.0.1:{free_port()}"
        assert complaint(*waiting_run, "--address", free, "--metrics", busy) == error
    assert (tmp_path / "out" / "server.log").read_text().count(f"ERROR {error}") == 2


@pytest.mark.parametrize("metrics", ["localhost:9192", "9192", "127.0.0.1", "[::1]"])
def test_an_address_for_monitoring_has_the_form_of_an_example(waiting_run, metrics) -> None:
    error = complaint(*waiting_run, "--address", "127.0.0.1:0", "--metrics", metrics)
    form = "--metrics takes an IP address and a port, such as 127.0.0.1:9192"
    assert error == f"{form}, not {metrics!r}."


INVALID_CERTIFICATES = [
    ("CERTIFICATE_LASTS", timedelta(hours=-1), "certificate expired on .* renew it with `cot"),
    ("DAY", -timedelta(days=1), "certificate is not valid yet, by .*; set the clock"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), INVALID_CERTIFICATES)
def test_a_certificate_must_be_valid(name, value, sentence, waiting_run, tmp_path, monkeypatch):
    made = Keys.create(tmp_path / "keys")
    made.add("anna", tmp_path / "anna.key")
    with monkeypatch.context() as patch:
        patch.setattr(certificates, name, value)
        made.certify()
    error = complaint(*waiting_run, "--keys", made.folder)
    assert re.search(sentence, error), error


def test_without_the_extra_its_name_is_given(keys, monkeypatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("coterie.network", "coterie.deployment.mailbox", "aiohttp")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("coterie.deployment.mailbox", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    error = complaint("client", "--server", "x:1", "--key", keys / "anna.key", "--data", keys)
    assert "pip install 'coterie[deployment]'" in error


def test_a_run_without_clients_is_for_everybody_with_a_key(tmp_path) -> None:
    path = tmp_path / "us.yaml"
    path.write_text("rounds: 2\n")
    config = load_deployment(read_values(path), ["anna", "ben"])
    assert [client.name for client in config.clients] == ["anna", "ben"]
    assert config.deployment.anyone
    path.write_text("clients: [{name: anna}]\n")
    assert not load_deployment(read_values(path), ["anna", "ben"]).deployment.anyone
    assert Path(load_with_any_text(read_values(path)).clients[0].path or "").exists()
    settings = ["data.messages=true", "evaluation.generate=5", "evaluation.metric=rouge_l"]
    tried = load_with_any_text(read_values(path, settings)).evaluation
    assert (tried.generate, tried.metric) == (None, None)


def test_a_deployed_run_is_not_resumed_by_another_engine(config, tmp_path) -> None:
    deploy(config(rounds=1), tmp_path)
    assert "coterie server --resume" in complaint("run", "--resume", tmp_path / "server")


def test_a_user_who_declines_is_told_what_happens(keys, monkeypatch) -> None:
    worker = SimpleNamespace(declined=True, error="You declined the run. More.", run=None)
    monkeypatch.setattr("coterie.deployment.mailbox.take_part", lambda *_: worker)
    key, text = keys / "anna.key", keys / "keys"
    options = f"client --server x:1 --key {key} --data {text} --yes"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    assert "You declined the run. More." in result.output


def test_the_needs_of_a_run_are_shown_before_a_client_agrees(config) -> None:
    for method, memory in (("fedavg", True), ("fedprompt", False)):
        needs = [deploy_cli._estimate("poet", config(method=method), n) for n in (2, 5)]
        assert (needs[0].memory is not None) == memory
        assert needs[0].up
        assert needs[0].down == needs[1].down
    few, many = (deploy_cli._estimate("poet", config(method="pcl-1"), n) for n in (2, 5))
    assert few.up == many.up
    assert few.down == few.up  # the upload of the other client
    assert many.down == 4 * (few.down or 0)
    assert any("GPT2MLP" in line for line in few.trained)
    nowhere = config(base="no/such-base", method="fedavg")
    assert deploy_cli._estimate("poet", nowhere, 2) == Estimate()


# --- `--check` says what a run needs and what stands in its way, and starts nothing


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


def assert_succeeded(result: Result, *phrases: str) -> None:
    """Check that a command has succeeded and has printed all phrases."""
    assert result.exit_code == 0, result.output
    for phrase in phrases:
        assert phrase in result.output


def test_a_server_that_can_start(place, tmp_path: Path) -> None:
    assert_succeeded(
        server("--address", "127.0.0.1:0"),
        "keys        ok      1 client has a key",
        "address     ok",
        "run         ok      comigs-1g1s, 3 rounds of",
        "messages    ok",
        "B up and ",
        "The server can start.",
    )
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
    config = parse(run).visible_to("poet")
    more: dict[str, Any] = {"protocol": protocol, "config": config, "public": public}
    return Order(run="0" * 16, client="poet", kind="join", turn=0, **more)


def test_a_client_that_can_take_part(place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(check, "first_order", lambda *_: order(place))
    assert_succeeded(
        client(place),
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
    )
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
    other = str(Path(place["data_root"]) / "whaler.txt")
    result = client(place, "--run", "run.yaml", "--public", other)
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
