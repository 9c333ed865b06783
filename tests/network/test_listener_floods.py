"""Floods of connections from strangers cost bounded memory and lock out no registered client."""

import errno
import gc
import socket
import ssl
import subprocess
import sys
import time
from asyncio.selector_events import BaseSelectorEventLoop
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from mail import A_SESSION, Post, is_closed, ping, post, wait

from coterie.network import accepting
from coterie.network import listener as module

MiB = 2**20
STRANGERS = """
import socket, ssl, sys, threading

address, kind = ("127.0.0.1", int(sys.argv[1])), sys.argv[2]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    context.wrap_bio(incoming, outgoing).do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
kept = []

def connect():
    while True:
        try:
            plain = socket.create_connection(address, timeout=5)
            if kind == "half-open":
                kept.append(plain)
                del kept[:-1000]
            elif kind == "half a hello":
                plain.sendall(hello[:100])
                kept.append(plain)
                del kept[:-1000]
            elif kind == "hello":
                plain.sendall(hello)
                plain.close()
            elif kind == "no TLS":
                plain.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
                plain.close()
            else:
                with plain, context.wrap_socket(plain) as connection:
                    connection.recv(1)
        except OSError:
            pass

for _ in range(8):
    threading.Thread(target=connect).start()
"""
"""A program that connects to a port without pause, from 127.0.0.1 and without a certificate."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Post]:
    with post(tmp_path) as running:
        yield running


@contextmanager
def flood(server: Post, kind: str) -> Iterator[None]:
    """Open connections to the server without pause until the block ends."""
    with subprocess.Popen([sys.executable, "-c", STRANGERS, str(server.port), kind]) as strangers:
        try:
            wait(lambda: server.listener.pending or server.listener.refusals)
            time.sleep(2)
            yield
        finally:
            strangers.kill()


def connected(server: Post, source: str) -> ssl.SSLSocket:
    """Return a connection that has answered a request, after attempts for up to two minutes."""
    context, end = server.context(), time.monotonic() + 120
    while True:
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(server.connect(context, source))
                assert ping(connection) == 204
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
            else:
                stack.pop_all()
                return connection


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half-open", "half a hello", "hello", "no TLS", "no certificate"])
def test_a_flood_locks_out_no_client_and_costs_bounded_memory(server: Post, caplog, kind) -> None:
    before = psutil.Process().memory_info().rss
    with server.connect() as established:
        assert ping(established) == 204
        with flood(server, kind):
            for source in ("127.0.0.2", "127.0.0.1", "127.0.0.2", "127.0.0.1"):
                connected(server, source).close()
                assert ping(established) == 204
                assert len(server.listener.pending) <= accepting.PENDING
            grown = psutil.Process().memory_info().rss - before
        assert grown < 400 * MiB
        assert ping(established) == 204
    refusals = [m for m in caplog.messages if m.startswith("refused a connection")]
    assert len(refusals) <= module.LOGGED_REFUSALS * 2  # the flood may last into a second minute
    wait(lambda: not server.listener.pending, seconds=60)


def plain_text(server: Post) -> None:
    with server.plain() as plain:
        plain.sendall(b"hello\r\n\r\n")
        assert is_closed(plain)


def no_certificate(server: Post) -> None:
    assert server.is_refused(ssl.create_default_context(cafile=server.keys.ca))


def no_bytes(server: Post) -> None:
    server.plain().close()


def timeout(server: Post) -> None:
    with server.plain() as plain:
        assert is_closed(plain)


@pytest.mark.parametrize("attempt", [plain_text, no_certificate, no_bytes, timeout])
def test_a_refused_connection_leaves_no_garbage(server: Post, monkeypatch, attempt) -> None:
    monkeypatch.setattr(module, "PENDING_SECONDS", 0.2)
    monkeypatch.setattr(module, "REPORT_SECONDS", 10**9)

    def alive() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is SSLProtocol}

    gc.collect()
    earlier = alive()  # of other tests' servers
    gc.disable()  # each connection has buffers of 256 KiB, which a flood multiplies
    try:
        for _ in range(5):
            attempt(server)
        wait(lambda: server.listener.refusals.total() == 5 and not server.listener.pending)
        wait(lambda: alive() <= earlier)
    finally:
        gc.enable()


def test_half_open_connections_make_way_for_new_ones(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "PENDING", 5)
    with ExitStack() as stack:
        opened = [stack.enter_context(server.plain()) for _ in range(20)]
        wait(lambda: is_closed(opened[14], seconds=0.1))
        assert all(is_closed(plain) for plain in opened[:15])
        assert server.ping() == 204
        assert len(server.listener.pending) <= 5
        assert not any(is_closed(plain, seconds=0.1) for plain in opened[16:])


def test_half_open_connections_of_an_address_end_no_others(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "PENDING", 5)
    with server.plain("127.0.0.2") as other, ExitStack() as stack:
        wait(lambda: server.listener.pending)
        for _ in range(20):
            stack.enter_context(server.plain())
        wait(lambda: len(server.listener.pending) == 5)
        assert not is_closed(other, seconds=0.5)
        tls = server.context().wrap_socket(other, server_hostname="localhost")
        tls.settimeout(20)
        assert ping(tls) == 204
        tls.close()


def test_a_flood_from_many_addresses_is_bounded(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "PENDING", 20)
    with ExitStack() as stack:
        for number in range(1, 101):
            stack.enter_context(server.plain(f"127.0.1.{number}"))
        assert server.ping() == 204
        assert len(server.listener.pending) <= 20


def test_failed_handshakes_slow_down_only_their_own_address(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(module, "FAILURES_PER_SECOND", 2)
    with server.connect() as established:
        assert ping(established) == 204
        began = time.monotonic()
        with ExitStack() as stack:
            for _ in range(10):
                plain = stack.enter_context(server.plain("127.0.0.2"))
                plain.sendall(b"hello\r\n\r\n")
                assert is_closed(plain)
                assert ping(established) == 204
                assert server.ping(source="127.0.0.3") == 204
        assert time.monotonic() - began > 3  # at most two in each second
        assert server.ping(source="127.0.0.2") == 204


def test_a_server_out_of_file_descriptors_accepts_later(server: Post, monkeypatch, caplog) -> None:
    accept, faulty = BaseSelectorEventLoop.sock_accept, [True]

    async def sock_accept(
        self: BaseSelectorEventLoop, listening: socket.socket
    ) -> tuple[socket.socket, object]:
        if faulty:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self, listening)

    with server.connect() as established:
        assert ping(established) == 204
        monkeypatch.setattr(BaseSelectorEventLoop, "sock_accept", sock_accept)
        server.plain().close()  # the call in progress is the original function
        wait(lambda: caplog.text.count("could not accept a connection") > 1)
        assert ping(established) == 204
        faulty.clear()
        assert server.ping() == 204


def test_a_hundred_clients_behind_one_address_are_served(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(100)]
    with (
        post(tmp_path, clients=names) as server,
        ExitStack() as stack,
        ThreadPoolExecutor(16) as pool,
    ):

        def client(name: str) -> ssl.SSLSocket:
            connection = server.connect(server.context(name))
            assert [ping(connection) for _ in range(3)] == [204] * 3
            return connection

        connections = [stack.enter_context(each) for each in pool.map(client, names)]
        assert server.mailbox.present() == dict.fromkeys(names, A_SESSION)
        assert sorted(c.client for c in server.listener.connections.values()) == sorted(names)
        assert list(pool.map(ping, connections)) == [204] * 100
