"""A server that is stopped or killed while uploads wait leaves no readable part of them."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
import sites
from every_method import some
from sites import Deployment, stopped

from coterie.bases import EMBEDDED

NAMES = ("poet", "whaler")
PIECE = 64


def everything(*folders: Path) -> dict[Path, bytes]:
    """Return the contents of every file below some folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def pieces(data: bytes) -> set[bytes]:
    """Return the pieces of some bytes at every offset."""
    return {data[at : at + PIECE] for at in range(len(data) - PIECE)}


def holding(telling: set[bytes], where: dict[Path, bytes]) -> set[Path]:
    """Return the files that contain any of some pieces."""
    return {path for path, content in where.items() if not telling.isdisjoint(pieces(content))}


@pytest.mark.parametrize(
    "number", some((), [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], {signal.SIGKILL})
)
def test_no_upload_and_no_readable_file_is_left(number, values, tmp_path, monkeypatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setitem(sites.ENVIRONMENT, "TMPDIR", str(temporary))
    clients = [{"name": name, "path": f"{name}.txt"} for name in NAMES]
    run = values(data_root=str(EMBEDDED / "demo-writers"), clients=clients)
    with Deployment(tmp_path / "us", run, taped=("server", *NAMES)) as deployment:
        server = deployment.serve()
        ropes = [deployment.rope(name, round=1) for name in NAMES]
        deployment.join()
        deployment.held("poet")
        deployment.held("whaler")
        before = len(deployment.tape("poet"))
        ropes[0].unlink()
        deployment.wait(lambda: len(deployment.tape("poet")) > before)
        order, upload = deployment.tape("poet")[before - 1 : before + 1]
        deployment.wait(
            lambda: upload in deployment.tape("server")
        )  # it waits there for the whaler's
        children = server.family()[1:]
        assert children == []
        server.process.send_signal(number)
        server.end()
        assert stopped(children)
        whole = [upload[at : at + PIECE] for at in range(0, len(upload) - PIECE, PIECE)]
        telling = {piece for piece in whole if len(set(piece)) > PIECE // 3}  # not zeros
        telling -= pieces(order)  # what was not trained is the server's
        assert len(telling) > 100
        left = everything(deployment.server.path, deployment.folder / "keys", temporary)
        assert holding(telling, everything(deployment.folder / "tape-server"))  # it would be seen
        assert holding(telling, left) == set()
        readable = [
            path for path in deployment.server.path.rglob("*") if path.stat().st_mode & 0o077
        ]
        assert readable == []
        assert everything(temporary) == {}
