"""nginx starts and ends with the process that wants it, and says plainly why it cannot."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from door import door, free_port, make_keys

from coterie.engines.flower import proxy as module
from coterie.engines.flower.proxy import PLACES, Proxy, ProxyFiles, write_proxy_config
from coterie.errors import CoterieError

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") or shutil.which("nginx", path=PLACES)),
    reason="nginx is not installed",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ProxyFiles:
    return make_keys(tmp_path_factory.mktemp("proxy") / "keys")


def test_nginx_ends_with_its_block_and_keeps_to_its_folder(
    keys: ProxyFiles, tmp_path: Path
) -> None:
    with door(tmp_path / "run", keys, keys, 10**6) as entry:
        assert entry.proxy.alive
        assert entry.post("/v1/fleet/push-object", bytes(500_000))[0] == 200
        pids = processes(entry.proxy.folder)
        assert len(pids) == 3
        assert os.getsid(pids[0]) == pids[0]  # Ctrl-C at our terminal is not for it
        inside = {path.name for path in entry.proxy.folder.iterdir()}
        assert inside == {"nginx.conf", "nginx.pid", "access.log", "error.log", "spool"}
    assert not entry.proxy.alive
    assert gone(pids)
    with pytest.raises(ConnectionRefusedError):
        entry.connect()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_nginx_ends_when_its_parent_is_killed(keys: ProxyFiles, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; "
        "from coterie.engines.flower.proxy import Proxy; "
        "folder, ca, certificate, key = map(Path, sys.argv[2:])\n"
        "with Proxy(folder, sys.argv[1], 1, ca, certificate, key, 1):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    folder = tmp_path / "run"
    files = map(str, (folder, keys.ca, keys.certificate, keys.key))
    command = [sys.executable, "-c", program, f"127.0.0.1:{free_port()}", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        pids = processes(folder)
        assert len(pids) == 3
        parent.send_signal(signal.SIGKILL)
    assert gone(pids)


def processes(folder: Path) -> list[int]:
    """nginx's master and its two workers."""
    master = int((folder / "nginx.pid").read_text())
    children = Path(f"/proc/{master}/task/{master}/children")
    for _ in range(100):
        if len(children.read_text().split()) == 2:
            break
        time.sleep(0.05)
    return [master, *map(int, children.read_text().split())]


def gone(pids: list[int]) -> bool:
    """Whether processes end within some seconds."""

    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    for _ in range(200):
        if not any(map(running, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def made(keys: ProxyFiles, tmp_path: Path) -> Callable[..., Proxy]:
    def make(address: str = "127.0.0.1:1", key: Path = keys.key) -> Proxy:
        return Proxy(tmp_path / "run", address, 1, keys.ca, keys.certificate, key, 1)

    return make


def test_an_address_in_use_is_a_sentence(made: Callable[..., Proxy]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = made(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(CoterieError, match="Address already in use"), proxy:
            pass
        assert not proxy.alive


def test_a_key_of_another_certificate_is_a_sentence(
    made: Callable[..., Proxy], tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    with pytest.raises(CoterieError, match="key values mismatch"), made(key=other.key):
        pass
    with pytest.raises(CoterieError, match="No such file"), made(key=tmp_path / "none.key"):
        pass


def test_a_machine_without_nginx_is_told_to_install_it(
    made: Callable[..., Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "PLACES", str(tmp_path))
    with pytest.raises(CoterieError, match="apt install nginx-light"), made():
        pass


@pytest.mark.parametrize(
    "address",
    [
        *("", "9092", ":9092", "0.0.0.0", "localhost:9092", "::1:9092", "[127.0.0.1]:80", "[::1]:"),
        *("1.2.3.4:99999", "1.2.3.4:80;", "1.2.3.4:80 ssl", "[fe80::1%eth0]:80", "unix:/tmp/x"),
    ],
)
def test_what_is_no_address_is_refused(keys: ProxyFiles, tmp_path: Path, address: str) -> None:
    with pytest.raises(CoterieError, match="takes an IP address and a port"):
        write_proxy_config(tmp_path, address, 1, keys, 1)


@pytest.mark.parametrize("address", ["0.0.0.0:9092", "[::]:9092", "127.0.0.1:9092", "[::1]:9092"])
def test_addresses_stand_in_the_configuration(
    keys: ProxyFiles, tmp_path: Path, address: str
) -> None:
    text = write_proxy_config(tmp_path, address, 9091, keys, 123).read_text()
    assert f"listen {address} ssl;" in text
    assert "server 127.0.0.1:9091;" in text
    assert "client_max_body_size 123;" in text


def test_a_path_that_nginx_would_misread_is_refused(keys: ProxyFiles, tmp_path: Path) -> None:
    for name in ('a"; evil "', "a$host", "a\\", "a\nb"):
        files = ProxyFiles(tmp_path / name, keys.certificate, keys.key)
        with pytest.raises(CoterieError, match="path of plain characters"):
            write_proxy_config(tmp_path, "127.0.0.1:1", 1, files, 1)
