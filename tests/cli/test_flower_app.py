"""The Flower app: its files, its server and its clients, with a substitute for Flower itself."""

import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import fake_flower
import pytest
import yaml
from fake_flower import Context, Grid
from typer.testing import CliRunner

import coterie
from coterie.cli import app as cli
from coterie.cli import flower_app as flower
from coterie.config.run import parse
from coterie.deployment import seats
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_state, client_of, sides

NAMES = ("diarist", "poet", "whaler")


@pytest.fixture
def run(values: Any) -> dict[str, Any]:
    """A run file of three clients."""
    return values(name="us", evaluation={"every": 1})


def write(run: dict[str, Any], folder: Path, *options: object) -> Any:
    """Write the app of a run with the command, and return the command's result."""
    file = folder / "us.yaml"
    file.write_text(yaml.safe_dump(run, allow_unicode=True))
    out = ["--out", folder / "server"]
    words = ["flower", "init", folder / "app", "--run", file, *out, *options]
    return CliRunner().invoke(cli, list(map(str, words)))


def settings(folder: Path) -> dict[str, Any]:
    """Return the configuration of an app that was written to a folder."""
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    return project["tool"]["flwr"]["app"]["config"]


def node(spec: dict[str, Any], place: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Return the --node-config of a client."""
    client = next(client for client in spec["clients"] if client["name"] == name)
    text = Path(spec.get("data_root", ".")) / client["path"]
    keys = {"name": name, "data": str(text), "folder": str(place / name), "base": spec["base"]}
    return keys | {"yes": True} | changes


@pytest.fixture
def federation(run, tmp_path, monkeypatch) -> Grid:
    """Three nodes of a federation, and the app of the run in a folder."""
    fake_flower.install(monkeypatch)
    monkeypatch.setattr(flower, "POLL_SECONDS", 0)
    assert write(run, tmp_path).exit_code == 0
    nodes = {7 + number: node(run, tmp_path, name) for number, name in enumerate(NAMES)}
    return Grid(flower.client_app(), nodes)  # pyright: ignore[reportArgumentType]


def start(grid: Grid, folder: Path) -> None:
    """Execute the server app."""
    app: Any = flower.server_app()
    app.functions["main"](grid, Context(run_config=settings(folder)))


def assert_as_local(run: dict[str, Any], folder: Path) -> None:
    """Check that a federation's run ended with the bits of the local engine."""
    local = RunFolder(coterie.run(parse(run), out=folder / "local").path)
    for side in sides(local):
        name = client_of(side)
        ended = next((folder / name).glob(f"{name}-*")) if name else folder / "server"
        assert_same_state(RunFolder(ended), local, side)
        assert RunFolder(ended).result is not None


def test_a_federation_ends_with_the_local_engines_bits(run, federation, tmp_path) -> None:
    start(federation, tmp_path)
    assert_as_local(run, tmp_path)
    kinds = [kind for _, kind in federation.sent]
    assert kinds.count("query") == 3
    assert kinds.count("train") == 3 * (1 + run["rounds"] + 1)  # join, rounds, finish


def test_lost_replies_and_a_stop_change_no_bit(run, federation, tmp_path, monkeypatch) -> None:
    def lose(number: int) -> bool:
        if number == 12:
            raise KeyboardInterrupt  # between two rounds, as by `flwr stop`
        return number in (2, 5, 8)

    monkeypatch.setattr(seats, "RETRY", 0.01)
    federation.lose = lose
    with pytest.raises(KeyboardInterrupt):
        start(federation, tmp_path)
    start(federation, tmp_path)
    assert_as_local(run, tmp_path)


def test_nodes_that_leave_or_take_a_name(run, federation, tmp_path, monkeypatch) -> None:
    notes: list[str] = []
    federation.nodes[99] = node(run, tmp_path, "poet")
    federation.nodes[100] = {"partition-id": 3}
    link = flower.GridLink(federation, notes.append)  # pyright: ignore[reportArgumentType]
    while len(link.present()) < 3:
        pass
    assert link.present() == {"diarist": "7", "poet": "8", "whaler": "9"}
    ignored = "node 99 is ignored: node 8 has the same name"
    assert [note.split(";")[0] for note in notes] == ["node 100 cannot take part", ignored]
    del federation.nodes[8]
    ticket = link.send("poet", b"an order", 1, 60)
    assert list(link.replies([ticket])) == [(ticket, None)]
    assert link.present()["poet"] == "8"  # its heartbeat may be late
    monkeypatch.setattr(flower, "ABSENT_SECONDS", 0.05)
    time.sleep(0.1)
    assert link.present()["poet"] == "99"


def test_after_a_reply_the_next_wait_ends_at_once(monkeypatch) -> None:
    sleeps: list[float] = []
    link = flower.GridLink(Grid(None, {}), print)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(link, "_pull", lambda *_: iter([("a ticket", b"a reply")]))
    monkeypatch.setattr(flower.time, "sleep", sleeps.append)
    assert list(link.replies(["a ticket"])) == [("a ticket", b"a reply")]
    link.wait()  # the reply may be a round's last: nothing more would arrive
    assert sleeps == []
    link.wait()
    assert sleeps == [flower.POLL_SECONDS]


def test_the_app_contains_the_run_but_no_clients_paths(run, tmp_path) -> None:
    run["base"] = '/nowhere/ü \\ """'
    result = write(run, tmp_path, "--set", "rounds=9")
    assert result.exit_code == 0, result.output
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dependencies"] == []  # Flower would install them
    config = project["tool"]["flwr"]["app"]["config"]
    content = yaml.safe_load(config["run"])
    assert content["clients"] == [{"name": name} for name in NAMES]
    assert (content["rounds"], content["base"]) == (9, run["base"])
    assert config["folder"] == str(tmp_path / "server")
    assert "already exists" in str(write(run, tmp_path).exception)
    assert "lists no clients" in str(write({**run, "clients": []}, tmp_path).exception)


WRONG_NODES = [
    ({"partition-id": 1}, "A Flower simulation gives its nodes a partition number"),
    ({"yes": False}, r"add `run` \(the run file to agree to\), or `yes=true`"),
    ({"folder": None}, "folder: .*path"),
    ({"folders": "x"}, "folders: extra"),
    ({"data": None}, "Neither data nor train is given"),
    ({"data": "nowhere.txt"}, "No such file or folder"),
    ({"run": "nowhere.yaml"}, "There is no run file nowhere.yaml"),
    ({"plugins": "nowhere.py"}, "The plugin nowhere.py cannot be read"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG_NODES)
def test_a_node_config_that_cannot_be_used(changes, sentence, run, tmp_path) -> None:
    with pytest.raises(CoterieError, match=sentence):
        flower.site_of(node(run, tmp_path, "poet", **changes))


def test_a_node_can_agree_to_one_run_file_only(run, federation, tmp_path, capsys) -> None:
    agreed = tmp_path / "agreed.yaml"
    agreed.write_text(yaml.safe_dump({**run, "rounds": run["rounds"] + 1}))
    site = flower.site_of(node(run, tmp_path, "poet", run=str(agreed)))
    assert site.agreed is not None
    assert site.agreed["rounds"] == run["rounds"] + 1


def test_without_flower_or_with_an_old_one_a_sentence_says_so(monkeypatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "flwr":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[flower\]'"):
        flower.server_app()
    fake_flower.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "flwr.clientapp")
    with pytest.raises(CoterieError, match=r"install flwr 1\.23 or newer"):
        flower.client_app()
