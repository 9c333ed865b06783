"""Whom the door turns away before it reads a request, and what the others may cost at most."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra flower is not installed")
from door import Entrance, entrance

from coterie.network import certificates
from coterie.network import door as module
from coterie.network.keys import Keys, Kit

LARGEST = 40_000_000


def handshake(entry: Entrance, context: ssl.SSLContext) -> bytes:
    """What a stranger gets to a request: nothing, or an OSError."""
    with entry.connect(context) as connection:
        connection.sendall(
            b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        )
        return connection.recv(100)


def turned_away(entry: Entrance, context: ssl.SSLContext) -> bool:
    """Whether the server hangs up before it reads a request."""
    before = len(entry.upstream.seen), sum(entry.door.refusals.values())
    answer = b""
    with suppress(OSError):
        answer = handshake(entry, context)
    for _ in range(100):
        if sum(entry.door.refusals.values()) > before[1]:
            break
        time.sleep(0.05)
    else:
        return False
    entry.door.refusals.clear()
    return not answer and len(entry.upstream.seen) == before[0]


def strangers(entry: Entrance) -> dict[str, ssl.SSLContext]:
    """Contexts that trust the server, and are not a registered client's."""
    bare = ssl.create_default_context(cafile=entry.keys.ca)
    found = {"no certificate": bare}
    other = Keys.create(entry.folder / "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        other.add("anna", entry.folder / "elsewhere.key")  # of the same name
        patch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
        entry.keys.add("late", entry.folder / "late.key")
    for name in ("elsewhere", "late"):
        kit = replace(Kit.load(entry.folder / f"{name}.key"), ca=entry.keys.ca.read_bytes())
        found[name] = kit.context()
    server = ssl.create_default_context(cafile=entry.keys.ca)
    server.load_cert_chain(entry.keys.certificate, entry.keys.key)  # of this very authority
    found["the server's own certificate"] = server
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2):
        old = entry.context()
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = version
        found[version.name] = old
    return found


def test_whoever_has_no_registered_certificate_is_turned_away_in_the_handshake(
    tmp_path: Path,
) -> None:
    with entrance(tmp_path, LARGEST) as entry:
        for name, context in strangers(entry).items():
            assert turned_away(entry, context), name
        assert handshake(entry, entry.context()).startswith(b"HTTP/1.1 200")


def test_bytes_that_are_no_tls_are_not_answered(tmp_path: Path) -> None:
    request = b"POST /v1/fleet/pull-object HTTP/1.1\r\n\r\n"
    with entrance(tmp_path, LARGEST) as entry:
        for data in (request, b"\x16\x03" + os.urandom(999)):
            with socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain:
                plain.sendall(data)
                plain.shutdown(socket.SHUT_WR)
                with suppress(OSError):
                    assert b"HTTP" not in plain.recv(4096)
        assert entry.upstream.seen == []


def wait(what: Callable[[], object]) -> None:
    """Until something holds, for ten seconds at most."""
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_that_is_removed_is_cut_off_at_once_and_a_renewed_one_let_in(
    tmp_path: Path,
) -> None:
    with entrance(tmp_path, LARGEST) as entry, entry.connect() as connection:
        old = entry.context()
        wait(lambda: entry.door.connections)
        entry.keys.renew("anna", tmp_path / "new.key")
        connection.settimeout(10)
        with suppress(OSError):
            assert connection.recv(1) == b""
        assert turned_away(entry, old)
        assert handshake(entry, entry.context("new.key")).startswith(b"HTTP/1.1 200")
        entry.keys.remove("anna")
        wait(lambda: not entry.door.registered)
        assert turned_away(entry, entry.context("new.key"))


def test_a_renewed_certificate_of_the_server_is_shown_without_a_restart(tmp_path: Path) -> None:
    def shown(entry: Entrance) -> bytes | None:
        with entry.connect() as connection:
            return connection.getpeercert(binary_form=True)

    with entrance(tmp_path, LARGEST) as entry:
        before = shown(entry)
        entry.keys.certify(["new.example.org"])
        wait(lambda: shown(entry) != before)


def test_what_a_client_leaves_at_the_superlink_is_bounded_until_its_next_order(
    tmp_path: Path,
) -> None:
    with entrance(tmp_path, LARGEST, order=1000) as entry:
        assert entry.post("/v1/fleet/push-object", bytes(600))[0] == 200
        assert entry.post("/v1/fleet/push-messages", bytes(600))[0] == 429
        assert entry.post("/v1/fleet/pull-object", bytes(600))[0] == 200  # of which nothing is kept
        entry.door.ordered("anna")
        assert entry.post("/v1/fleet/push-object", bytes(600))[0] == 200
        entry.door.ordered("nobody")


def test_pushes_that_wait_side_by_side_share_that_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BURST", 1.0)
    monkeypatch.setattr(module, "RATE", 4.0)
    with entrance(tmp_path, LARGEST, order=1000) as entry, ThreadPoolExecutor(4) as pool:
        body = bytes(600)
        sent = [pool.submit(entry.post, "/v1/fleet/push-object", body) for _ in range(4)]
        assert sorted(each.result()[0] for each in sent) == [200, 429, 429, 429]


def test_requests_past_the_rate_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST", 3.0)
    monkeypatch.setattr(module, "RATE", 4.0)
    with entrance(tmp_path, LARGEST) as entry:
        began = time.monotonic()
        assert {entry.post("/v1/fleet/pull-object")[0] for _ in range(7)} == {200}
        assert time.monotonic() - began > 0.6  # the fourth to seventh, at four a second
        assert entry.door.visitors["anna"].tokens < 3


@pytest.mark.parametrize("sent", [b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost:", b""])
def test_a_connection_on_which_no_request_comes_to_its_end_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.5)
    with entrance(tmp_path, LARGEST) as entry, entry.connect() as connection:
        connection.sendall(sent)
        connection.settimeout(10)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_body_that_stalls_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.5)
    with entrance(tmp_path, LARGEST) as entry:
        head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        for length in (10, 10_000_000):
            with entry.connect() as connection:
                connection.sendall(head % length + b"half")
                connection.settimeout(10)
                with suppress(ConnectionResetError):
                    assert not connection.recv(100).startswith(b"HTTP/1.1 200")
        assert b"half" not in [seen.body for seen in entry.upstream.seen[1:]]
        assert entry.post("/v1/fleet/push-object")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False], ids=["slowly", "not at all"])
def test_an_answer_that_is_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2.0)
    size = 20_000_000
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with entrance(tmp_path, LARGEST) as entry, entry.connect() as connection:
        connection.sendall(head % size + bytes(size))
        wait(lambda: entry.upstream.seen)
        read = 0
        end = time.monotonic() + 5
        with suppress(OSError):
            while reads and time.monotonic() < end:
                read += len(connection.recv(1000))
                time.sleep(0.05)
        wait(lambda: all(each.idle for each in entry.door.connections.values()))
        assert read < size
        assert entry.post("/v1/fleet/pull-object")[0] == 200


def test_a_handshake_that_does_not_go_on_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES", 5)
    with entrance(tmp_path, LARGEST) as entry, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", entry.port), timeout=20))
        assert entry.post("/v1/fleet/pull-object")[0] == 200
        assert len(entry.door.handshakes) <= 5


def test_an_address_that_fails_again_and_again_is_not_listened_to_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSALS", 3)
    with entrance(tmp_path, LARGEST) as entry:
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain:
                plain.sendall(b"hello\r\n\r\n")
                with suppress(OSError):
                    plain.recv(10)
        wait(lambda: entry.door.refusals["127.0.0.1"] >= 3)
        with pytest.raises(OSError):  # noqa: PT011  (reset, or the end of the stream)
            entry.connect()
        entry.door.refusals.clear()  # a minute later
        assert entry.post("/v1/fleet/pull-object")[0] == 200


def test_connections_of_one_client_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    with entrance(tmp_path, LARGEST) as entry, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(entry.connect())
        wait(lambda: len(entry.door.connections) == 2)
        third = stack.enter_context(entry.connect())
        third.settimeout(10)
        with suppress(ConnectionResetError):
            assert third.recv(1) == b""
