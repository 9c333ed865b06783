"""The door starts and ends with the process that wants it, and says plainly why it cannot."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("aiohttp", reason="the extra flower is not installed")

from coterie.errors import CoterieError
from coterie.network.door import Settings
from coterie.network.door_process import DoorProcess, listen
from coterie.network.keys import Keys, Kit


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    keys, loopback = Keys.create(tmp_path / "keys"), Keys.create(tmp_path / "loopback")
    keys.add("anna", tmp_path / "anna.key")
    log = str(tmp_path / "door.log")
    return Settings(str(keys.folder), 1, str(loopback.ca), 10**6, 10**6, log)


def answered(port: int, kit: Path) -> int:
    with httpx.Client(verify=Kit.load(kit).context(), timeout=30) as client:
        return client.post(f"https://localhost:{port}/v1/fleet/pull-object").status_code


def test_it_ends_with_its_block(settings: Settings, tmp_path: Path) -> None:
    door = DoorProcess("127.0.0.1:0", settings)
    port = door.listening.getsockname()[1]
    with door:
        assert answered(port, tmp_path / "anna.key") == 502  # nothing is behind it
        assert os.getsid(door.process.pid) == door.process.pid  # Ctrl-C here is not for it
        door.ordered("anna")
        assert door.alive
    assert not door.alive
    assert door.process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        answered(port, tmp_path / "anna.key")
    assert "secret" not in (tmp_path / "door.log").read_text()


def test_it_ends_when_its_parent_is_killed(settings: Settings) -> None:
    program = (
        "import sys, time; from dataclasses import *; "
        "from coterie.network.door_process import DoorProcess, Settings\n"
        f"with DoorProcess('127.0.0.1:0', {settings!r}) as door:\n"
        "    print(door.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs([child], timeout=20)[1]


def test_an_address_in_use_is_a_sentence(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CoterieError, match=f"another program uses port {port}"):
            DoorProcess(f"127.0.0.1:{port}", settings)
    with pytest.raises(CoterieError, match="this machine does not have that address"):
        DoorProcess("192.0.2.1:9092", settings)


def test_a_key_of_another_certificate_is_a_sentence(settings: Settings, tmp_path: Path) -> None:
    other = Keys.create(tmp_path / "other")
    (tmp_path / "keys" / "server.key").write_bytes(other.key.read_bytes())
    with pytest.raises(CoterieError, match="do not belong together"):
        DoorProcess("127.0.0.1:0", settings)


@pytest.mark.parametrize(
    "address",
    [
        *("", "9092", ":9092", "0.0.0.0", "localhost:9092", "::1:9092", "[127.0.0.1]:80", "[::1]:"),
        *("1.2.3.4:99999", "1.2.3.4:80;", "1.2.3.4:80 ssl", "[fe80::1%eth0]:80", "unix:/tmp/x"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(CoterieError, match="takes an IP address and a port"):
        listen(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0"])
def test_addresses_of_both_kinds_are_listened_on(address: str) -> None:
    with listen(address) as listening:
        assert listening.getsockname()[0] == address.rpartition(":")[0].strip("[]")
