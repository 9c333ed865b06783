"""Deployments of real processes over TLS, which are killed and stopped from outside."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from looped import assert_private

import coterie
from coterie.bases import EMBEDDED
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.runs import RunFolder

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
import sites
from sites import Deployment, assert_same_bits

pytestmark = pytest.mark.slow
NAMES = ("diarist", "lexicographer", "poet", "whaler")
WRITERS = EMBEDDED / "demo-writers"
PLUGIN = """
from coterie.methods.registry import available

class Mine(available()["comigs-1g1s"]):
    name = "mine"
"""
PIECE = 64
"""The number of bytes of a piece of an upload."""


@pytest.fixture
def deployment(values, tmp_path, monkeypatch) -> Iterator[Deployment]:
    """A deployment of four clients, all of whom a round needs, which has not started."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setitem(sites.ENVIRONMENT, "TMPDIR", str(tmp_path / "temporary"))
    clients = [{"name": name, "path": f"{name}.txt"} for name in NAMES]
    (plugin := tmp_path / "mine.py").write_text(PLUGIN)
    load_plugin(plugin)
    method = {"name": "mine", "router": {"every": 2, "steps": 1}}
    run = values(data_root=str(WRITERS), clients=clients, method=method)
    taped = ("server", *NAMES)
    with Deployment(tmp_path / "run", run, taped=taped, plugins=(plugin,)) as deployment:
        yield deployment


def test_a_killed_server_goes_on_and_nothing_personal_travels(deployment, tmp_path) -> None:
    """Kill the server and a client in a round; no part of an upload is left on the server."""
    deployment.serve()
    ropes = {name: deployment.rope(name, round=1) for name in ("lexicographer", "poet", "whaler")}
    deployment.join()
    for name in ropes:
        deployment.held(name)
    before = len(deployment.tape("lexicographer"))
    ropes["lexicographer"].unlink()
    deployment.wait(lambda: len(deployment.tape("lexicographer")) > before)
    order, upload = deployment.tape("lexicographer")[before - 1 : before + 1]
    deployment.wait(lambda: upload in deployment.tape("server"))  # where it waits for the others
    deployment.kill("server")
    assert_unreadable(deployment, order, upload)
    deployment.kill("whaler")
    ropes["poet"].unlink()  # its upload finds no server
    assert deployment.done() == 1
    again = deployment.serve("--resume")
    deployment.wait(lambda: "poet joined" in again.text.partition("resuming after")[2])
    ropes["whaler"].unlink()
    deployment.join("whaler")
    assert set(deployment.ends().values()) == {0}
    local = coterie.run(parse(deployment.run), out=tmp_path / "local")
    assert_same_bits(deployment, RunFolder(local.path))
    loads = {name: deployment.client_log(name).count("loaded the base") for name in NAMES}
    assert loads == dict.fromkeys(NAMES, 1) | {"whaler": 2}
    assert_nothing_personal_travelled(deployment)


def assert_unreadable(deployment: Deployment, order: bytes, upload: bytes) -> None:
    """Check that no file of the server is for others, and that none contains part of an upload."""
    pieces = {upload[at : at + PIECE] for at in range(0, len(upload) - PIECE, PIECE)}
    trained = [piece for piece in pieces if len(set(piece)) > PIECE // 3 and piece not in order]
    assert len(trained) > 100
    assert list((deployment.folder.parent / "temporary").iterdir()) == []
    for path in filter(Path.is_file, deployment.server.path.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
        content = path.read_bytes()
        assert not any(piece in content for piece in trained), path


def assert_nothing_personal_travelled(deployment: Deployment) -> None:
    tapes = {name: deployment.tape(name) for name in ("server", *NAMES)}
    sent = {data for name in NAMES for data in tapes[name]}
    assert sum(data in sent for data in tapes["server"]) > 3 * 2 * len(NAMES)
    travelled = b"".join(data for tape in tapes.values() for data in tape)
    for name in NAMES:
        state = deployment.client(name).load(f"client-{name}")
        assert_private(state, deployment.texts[name].read_bytes(), travelled)
    assert str(deployment.folder).encode() not in travelled
    assert str(WRITERS).encode() not in travelled


def test_ctrl_c_and_sigterm_end_everybody_with_a_sentence(deployment) -> None:
    deployment.serve()
    deployment.rope("poet", round=1)  # it is in a round
    deployment.join()
    deployment.held("poet")
    numbers = (signal.SIGINT, signal.SIGTERM) * 2
    for name, number in zip((*NAMES, "server"), (*numbers, signal.SIGINT), strict=True):
        deployment.programs[name].send(number)
    assert deployment.ends(60) == dict.fromkeys(("server", *NAMES), 130)
    server = deployment.serve("--resume")
    deployment.wait(lambda: "resuming after" in server.text)
    server.send(signal.SIGTERM)
    assert server.end() == 130
    how = "Stopped. Finished rounds are saved. To resume, run the same command with --resume.\n"
    assert server.text.count(how) == 2
    assert server.text.endswith(how)
    for name, program in deployment.programs.items():
        assert "Traceback" not in program.text, name
        if name != "server":
            assert program.text.endswith(
                "Stopped. Progress is saved. To resume, run the same command.\n"
            )
