"""What a server leaves on its disk when it is stopped or killed while uploads wait in it."""

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
    """Every file below some folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def pieces(data: bytes) -> set[bytes]:
    """Of some bytes, wherever they begin."""
    return {data[at : at + PIECE] for at in range(len(data) - PIECE)}


def found(telling: set[bytes], where: dict[Path, bytes]) -> set[Path]:
    """Files that hold one of some pieces."""
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
    with Deployment(tmp_path / "us", run, taped=("server", *NAMES)) as here:
        here.make_keys()
        server = here.serve()
        ropes = [here.rope(name, round=1) for name in NAMES]
        here.join()
        here.held("poet")
        here.held("whaler")
        before = len(here.tape("poet"))
        ropes[0].unlink()
        here.wait(lambda: len(here.tape("poet")) > before)
        order, upload = here.tape("poet")[before - 1 : before + 1]
        here.wait(lambda: upload in here.tape("server"))  # it waits there for the whaler's
        children = server.family()[1:]
        assert children == []
        server.process.send_signal(number)
        server.end()
        assert stopped(children)
        whole = [upload[at : at + PIECE] for at in range(0, len(upload) - PIECE, PIECE)]
        telling = {piece for piece in whole if len(set(piece)) > PIECE // 3}  # not zeros
        telling -= pieces(order)  # what was not trained is the server's
        assert len(telling) > 100
        left = everything(here.server.path, here.folder / "keys", temporary)
        assert found(telling, everything(here.folder / "tape-server"))  # it would be seen
        assert found(telling, left) == set()
        readable = [path for path in here.server.path.rglob("*") if path.stat().st_mode & 0o077]
        assert readable == []
        assert everything(temporary) == {}
