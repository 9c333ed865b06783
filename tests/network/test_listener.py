"""The server's address, changes of its keys, its connections, and its log of refusals."""

import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from mail import Post, is_closed, ping, post, wait

from coterie.errors import CoterieError
from coterie.network import accepting
from coterie.network import listener as module
from coterie.network.accepting import source_of
from coterie.network.address import listen
from coterie.network.keys import Keys
from coterie.network.mailbox import Mailbox
from coterie.network.server import MailboxServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Post]:
    with post(tmp_path, clients=("anna", "bob")) as running:
        yield running


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0"])
def test_a_server_listens_on_addresses_of_both_versions(address: str) -> None:
    host = address.rpartition(":")[0].strip("[]")
    with listen(address) as listening:
        assert listening.getsockname()[0] == host
        port = listening.getsockname()[1]
        local = "::1" if ":" in host else "127.0.0.1"
        socket.create_connection((local, port), timeout=10).close()


@pytest.mark.parametrize(
    "address",
    [
        *("", "9092", ":9092", "0.0.0.0", "localhost:9092", "::1:9092", "[127.0.0.1]:80", "[::1]:"),
        *("1.2.3.4:99999", "1.2.3.4:80;", "1.2.3.4:80 ssl", "[fe80::1%eth0]:80", "unix:/tmp/x"),
        *("1.2.3.4:-1", "1.2.3.4:+80", "1.2.3.4:٨٠", "1.2.3.4: 80", "[[::1]]:80", "[::1:80"),
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(CoterieError, match="takes an IP address and a port") as raised:
        listen(address)
    assert repr(address) in str(raised.value)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_whoever_has_a_network_of_ipv6_counts_as_one_address(address, source) -> None:
    assert source_of(address) == source


def test_a_used_port_and_an_address_of_another_machine_are_refused() -> None:
    with listen("127.0.0.1:0") as server:
        port = server.getsockname()[1]
        with pytest.raises(CoterieError, match=f"another program uses port {port}"):
            listen(f"127.0.0.1:{port}")
    with pytest.raises(CoterieError, match="this machine does not have that address"):
        listen("192.0.2.1:9092")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every port")
def test_a_port_below_1024_needs_permission() -> None:
    with pytest.raises(CoterieError, match="choose a port above 1023"):
        listen("127.0.0.1:1")


def test_a_server_does_not_start_with_the_key_of_another_certificate(tmp_path: Path) -> None:
    keys, other = Keys.create(tmp_path / "keys"), Keys.create(tmp_path / "other")
    shutil.copy(other.key, keys.key)
    with listen("127.0.0.1:0") as listening, pytest.raises(CoterieError, match="do not match"):
        MailboxServer(Mailbox(tmp_path / "mailbox"), keys, listening, 1000)


def test_a_stopped_server_closes_its_connections_and_its_port(tmp_path: Path) -> None:
    with post(tmp_path) as server:
        connection = server.connect()
        assert ping(connection) == 204
    assert is_closed(connection)
    with listen(f"127.0.0.1:{server.port}"):
        pass
    connection.close()


def test_a_client_that_is_added_while_the_server_runs_can_connect(server: Post) -> None:
    carol = server.add("carol").context()
    wait(lambda: not server.is_refused(carol))
    assert server.ping(carol) == 204


def test_a_removed_client_is_disconnected_and_refused(server: Post) -> None:
    with server.connect() as anna, server.connect(server.context("bob")) as bob:
        assert ping(anna) == ping(bob) == 204
        server.keys.remove("anna")
        assert is_closed(anna)
        assert server.is_refused(server.context())
        assert ping(bob) == 204
        assert server.ping(server.context("bob")) == 204


def test_a_request_in_progress_ends_when_its_client_is_removed(server: Post) -> None:
    with server.connect() as anna:
        assert ping(anna) == 204
        anna.sendall(
            b"GET /order HTTP/1.1\r\nHost: x\r\nCoterie-Protocol: 1\r\nCoterie-Session: %b\r\n\r\n"
            % server.mailbox.present()["anna"].encode()
        )
        wait(lambda: any(c.requests for c in server.listener.connections.values()))
        server.keys.remove("anna")
        assert is_closed(anna)


def test_a_renewed_key_replaces_the_old_one(server: Post) -> None:
    with server.connect() as connection:
        assert ping(connection) == 204
        server.keys.renew("anna", server.folder / "new.key")
        assert is_closed(connection)
        assert server.is_refused(server.context())
        assert server.ping(server.context("new")) == 204


def test_a_renewed_certificate_of_the_server_takes_effect_without_a_restart(server: Post) -> None:
    def certificate() -> bytes | None:
        with server.connect() as connection:
            return connection.getpeercert(binary_form=True)

    with server.connect() as connection:
        before = certificate()
        server.keys.certify(["new.example.org"])
        wait(lambda: certificate() != before)
        assert ping(connection) == 204  # an open connection stays open


def damage_the_certificate(keys: Keys) -> None:
    keys.certificate.write_bytes(b"damaged")


def exchange_the_certificate(keys: Keys) -> None:
    shutil.copy(Keys.create(keys.folder.with_name("other")).certificate, keys.certificate)


def move_away(keys: Keys) -> None:
    keys.folder.rename(keys.folder.with_name("moved"))


@pytest.mark.parametrize("damage", [damage_the_certificate, exchange_the_certificate, move_away])
def test_a_damaged_key_folder_leaves_the_previous_keys_in_force(
    server: Post, caplog, damage
) -> None:
    with server.connect() as connection:
        assert ping(connection) == 204
        damage(server.keys)
        wait(lambda: "could not read the keys" in caplog.text)
        assert ping(connection) == 204
        assert server.ping() == 204
        assert server.ping(server.context("bob")) == 204


@pytest.mark.parametrize("damage", [damage_the_certificate, exchange_the_certificate])
def test_a_client_is_removed_despite_a_damaged_certificate(server: Post, caplog, damage) -> None:
    damage(server.keys)
    wait(lambda: "could not read the keys" in caplog.text)
    with server.connect() as connection:
        assert ping(connection) == 204
        server.keys.remove("anna")
        assert is_closed(connection, 2)
    assert server.is_refused(server.context())
    assert server.ping(server.context("bob")) == 204


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"damaged"), unreadable])
def test_a_damaged_file_excludes_only_its_client(server: Post, caplog, damage) -> None:
    file = server.keys.folder / "clients" / "bob.pem"
    with server.connect(server.context("bob")) as bob, server.connect() as anna:
        assert ping(bob) == ping(anna) == 204
        damage(file)
        assert is_closed(bob, 2)
        assert ping(anna) == 204
        server.add("carol")
        wait(lambda: "carol" in server.listener.registered.values(), 2)
        assert server.ping(server.context("carol")) == 204
        assert server.is_refused(server.context("bob"))
        server.keys.remove("anna")
        assert is_closed(anna, 2)
    [fault] = [message for message in caplog.messages if "bob.pem is ignored" in message]
    assert f"replace it with `coterie keys renew bob --keys {server.keys.folder}`" in fault


def test_a_damaged_file_is_replaced_by_the_command_that_the_log_names(server: Post) -> None:
    (server.keys.folder / "clients" / "bob.pem").write_bytes(b"damaged")
    wait(lambda: server.is_refused(server.context("bob")))
    server.keys.renew("bob", server.folder / "new.key")
    wait(lambda: not server.is_refused(server.context("new")))


@pytest.mark.parametrize("sent", [b"", b"POST /session HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_complete_request_is_closed(server: Post, monkeypatch, sent) -> None:
    monkeypatch.setattr(accepting, "IDLE_SECONDS", 0.5)
    with server.connect() as connection:
        connection.sendall(sent)
        assert is_closed(connection)
    wait(lambda: not server.listener.connections)


def test_a_connection_is_closed_some_time_after_its_last_request(server: Post, monkeypatch) -> None:
    with server.connect() as connection:
        assert ping(connection) == 204
        assert not is_closed(connection, seconds=1.5)
        monkeypatch.setattr(accepting, "IDLE_SECONDS", 0.5)
        assert is_closed(connection)
        assert server.ping() == 204


def test_a_connection_that_waits_for_an_order_is_not_idle(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "IDLE_SECONDS", 0.1)
    with server.connect() as connection:
        assert ping(connection) == 204
        connection.sendall(
            b"GET /order HTTP/1.1\r\nHost: x\r\nCoterie-Protocol: 1\r\nCoterie-Session: %b\r\n\r\n"
            % server.mailbox.present()["anna"].encode()
        )
        assert not is_closed(connection, seconds=2.5)
        server.mailbox.send("anna", b"order", 0, 60)
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_the_open_connections_of_a_client_are_limited(server: Post, monkeypatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    with ExitStack() as stack:
        first, second = (stack.enter_context(server.connect()) for _ in range(2))
        assert ping(first) == ping(second) == 204
        assert is_closed(stack.enter_context(server.connect()))
        assert server.ping(server.context("bob")) == 204  # the limit is each client's own
        assert ping(first) == ping(second) == 204
        first.close()
        wait(lambda: len(server.listener.connected("anna")) == 1)
        assert server.ping() == 204


def test_a_refusal_is_logged_with_its_address_and_reason(server: Post, caplog) -> None:
    Keys.create(server.folder / "others").add("eve", server.folder / "eve.key")
    stranger = ssl.create_default_context(cafile=server.keys.ca)
    assert server.is_refused(stranger, "127.0.0.2")
    stranger.load_cert_chain(server.folder / "eve.key")
    assert server.is_refused(stranger, "127.0.0.3")
    with server.plain("127.0.0.4") as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_closed(plain)
    server.plain("127.0.0.5").close()
    wait(lambda: "127.0.0.5" in caplog.text)
    refused = [m for m in caplog.messages if m.startswith("refused")]
    assert refused == [
        "refused a connection from 127.0.0.2: no client certificate",
        "refused a connection from 127.0.0.3: the certificate is not registered; the client was "
        "removed, or has an old key",
        "refused a connection from 127.0.0.4: http request",
        "refused a connection from 127.0.0.5: connection closed",
    ]


def test_refusals_of_an_address_are_counted_each_minute(server: Post, caplog, monkeypatch) -> None:
    for _ in range(9):
        server.plain("127.0.0.2").close()
    server.plain("127.0.0.3").close()
    wait(lambda: server.listener.refusals == {"127.0.0.2": 9, "127.0.0.3": 1})
    lines = [re.sub(":.*", "", m) for m in caplog.messages if m.startswith("refused")]
    single = "refused a connection from "
    assert sorted(lines) == [f"{single}127.0.0.2"] * 3 + [f"{single}127.0.0.3"]
    caplog.clear()
    monkeypatch.setattr(module, "REPORT_SECONDS", 1)
    wait(lambda: caplog.messages)
    monkeypatch.undo()
    assert caplog.messages == ["refused 9 connections from 127.0.0.2 in a minute"]
    caplog.clear()
    server.plain("127.0.0.2").close()  # the next minute begins at zero
    wait(lambda: caplog.messages == ["refused a connection from 127.0.0.2: connection closed"])


@pytest.mark.parametrize("name", ["clients/eve.pem", "server.pem", "server.key"])
def test_a_pipe_among_the_keys_does_not_stop_the_server(name: str, server: Post, caplog) -> None:
    path = server.keys.folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name == "server.key":
        server.keys.remove("bob")  # so that the keys are read again
    try:
        wait(lambda: "It is not a file" in caplog.text)
        assert server.ping() == 204
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # for a thread that waits
