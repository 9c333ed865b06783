"""A client and a mailbox's server over links that break, and over restarts of the server."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import mail
import pytest
from lossy import LossyProxy
from mail import LARGEST, Idle, Post, replies, running, wait

from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.errors import CoterieError
from coterie.messages import MessageError
from coterie.messages.envelope import Kind, Order, seal
from coterie.network import client as client_module
from coterie.network import faults, link, order_files
from coterie.network import mailbox as mailbox_module
from coterie.network import server as server_module
from coterie.network.address import listen
from coterie.network.client import Connection, first_order
from coterie.network.mailbox import Mailbox
from coterie.network.server import MailboxServer

LONGEST_PAUSE = client_module.LONGEST_PAUSE
ORDER, REPLY = os.urandom(4_500_000), os.urandom(5_500_000)


@dataclass
class Echo:
    """A worker that gives each order the same reply."""

    reply: bytes = REPLY
    orders: list[bytes] = field(default_factory=list)
    finished: bool = False
    released: threading.Event | None = None
    """An event that the worker waits for before its reply."""

    def answer(self, data: bytes) -> bytes:
        self.orders.append(data)
        if self.released is not None:
            assert self.released.wait(30)
        return self.reply


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients notice soon that they are to stop, and try again soon after a fault."""
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(client_module, "LONGEST_PAUSE", 0.4)


def reply_to(mailbox: Mailbox, ticket: str, seconds: float = 60) -> bytes | None:
    """Wait for the reply to an order, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _, reply in mailbox.replies([ticket]):
            return reply
        mailbox.wait()
    raise AssertionError("no reply has arrived")


def is_present(mailbox: Mailbox) -> bool:
    return "anna" in mailbox.present()


@contextmanager
def connected(
    post: Post, worker: link.Worker, proxy: LossyProxy | None = None
) -> Iterator[list[tuple[str, object]]]:
    """Run a client in a thread, and yield its events once it is connected."""
    address = post.address if proxy is None else proxy.address
    with running(address, post.credentials(), worker) as events:
        wait(lambda: is_present(post.mailbox))
        yield events


@pytest.mark.parametrize("fault", ["reset", "close", "corrupt", "stall"])
def test_a_large_transfer_arrives_over_a_breaking_link(fault, post: Post, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "STALL_SECONDS", 0.5)
    worker = Echo()
    with (
        LossyProxy(post.port, fault, limit=2_000_000) as proxy,
        connected(post, worker, proxy) as events,
    ):
        assert reply_to(post.mailbox, post.mailbox.send("anna", ORDER, 0, 60)) == REPLY
    lost = f"the connection to {proxy.address} was interrupted"
    assert set(events) == {("connected", proxy.address), ("away", lost)}
    assert proxy.faults >= 4  # 10 MB do not fit into 4 connections
    assert worker.orders == [ORDER]  # it is executed once


def test_a_transfer_arrives_over_a_slow_link(post: Post) -> None:
    worker = Echo(REPLY[:500_000])
    with LossyProxy(post.port, delay=0.05) as proxy, connected(post, worker, proxy) as events:
        ticket = post.mailbox.send("anna", ORDER[:500_000], 0, 60)
        assert reply_to(post.mailbox, ticket) == worker.reply
    assert events == [("connected", proxy.address)]


def test_requests_share_connections(post: Post) -> None:
    with LossyProxy(post.port) as proxy, running(proxy.address, post.credentials(), Echo(b"reply")):
        wait(lambda: is_present(post.mailbox))
        for number in range(3):
            assert reply_to(post.mailbox, post.mailbox.send("anna", b"order", number, 60))
            time.sleep(0.4)  # a request for an order ends without one
    assert proxy.accepted <= 2


def test_a_client_is_back_soon_after_the_server_has_restarted(tmp_path: Path) -> None:
    assert LONGEST_PAUSE < 5
    worker = Echo(b"reply")
    with mail.post(tmp_path) as post:
        client = connected(post, worker)
        events = client.__enter__()
        assert reply_to(post.mailbox, post.mailbox.send("anna", b"order", 0, 60)) == b"reply"
    try:
        wait(lambda: ("away", f"{post.address} is unreachable") in events)
        time.sleep(1)  # until the pauses are at their longest
        mailbox = Mailbox(tmp_path / "mailbox")
        with MailboxServer(mailbox, post.keys, listen(f"127.0.0.1:{post.port}"), LARGEST):
            wait(lambda: is_present(mailbox), 5)
            assert reply_to(mailbox, mailbox.send("anna", b"again", 0, 60)) == b"reply"
            assert [events[0], events[-1]] == 2 * [("connected", post.address)]
    finally:
        client.__exit__(None, None, None)
    assert worker.orders == [b"order", b"again"]


def test_a_reply_is_sent_after_a_restart_on_request_only(tmp_path: Path) -> None:
    released = threading.Event()
    worker = Echo(b"reply", released=released)
    with mail.post(tmp_path) as post:
        client = connected(post, worker)
        client.__enter__()
        post.mailbox.send("anna", b"order", 0, 60)
        wait(lambda: worker.orders)
    try:
        mailbox = Mailbox(tmp_path / "mailbox")
        with MailboxServer(mailbox, post.keys, listen(f"127.0.0.1:{post.port}"), LARGEST):
            released.set()
            wait(lambda: is_present(mailbox))
            assert reply_to(mailbox, mailbox.send("anna", b"again", 0, 60)) == b"reply"
    finally:
        client.__exit__(None, None, None)
    assert worker.orders == [b"order", b"again"]


def test_an_order_that_is_no_message_is_declined_once(post: Post, tmp_path, caplog) -> None:
    with connected(post, Worker(Site("anna", {}, tmp_path / "out"))) as events:
        for data in (b"", b"no order", seal(order("join"))[:-1], os.urandom(300_000)):
            ticket = post.mailbox.send("anna", data, 0, 60)
            assert reply_to(post.mailbox, ticket) is None
            assert replies(post, ticket) == []
    assert caplog.text.count("rejected a message from the server") == 4
    assert events == [("connected", post.address)]


def test_declining_survives_a_link_that_breaks(post: Post) -> None:
    declined = 0

    class Refusing(Echo):
        def answer(self, data: bytes) -> bytes:
            nonlocal declined
            declined += 1
            if declined == 1:
                proxy.__exit__(None, None, None)
            raise MessageError("not an order")

    with LossyProxy(post.port) as proxy, connected(post, Refusing(), proxy):
        ticket = post.mailbox.send("anna", b"order", 0, 60)
        wait(lambda: declined)
        assert replies(post, ticket) == []
        with LossyProxy(post.port, port=proxy.port):
            assert reply_to(post.mailbox, ticket) is None


def test_a_reply_that_is_too_large_is_not_computed_again(tmp_path: Path) -> None:
    worker = Echo(b"reply " * 100)
    with mail.post(tmp_path, largest=100) as post, connected(post, worker):
        assert reply_to(post.mailbox, post.mailbox.send("anna", b"order", 0, 60)) is None
        time.sleep(0.5)
        assert worker.orders == [b"order"]
        worker.reply = b"smaller"
        assert reply_to(post.mailbox, post.mailbox.send("anna", b"next", 1, 60)) == b"smaller"


def test_an_order_replaced_during_its_execution_is_followed_by_the_next(post: Post) -> None:
    worker = Echo(b"reply", released=threading.Event())
    with connected(post, worker):
        first = post.mailbox.send("anna", b"first", 0, 60)
        wait(lambda: worker.orders)
        second = post.mailbox.send("anna", b"second", 0, 60)
        assert worker.released is not None
        worker.released.set()
        assert reply_to(post.mailbox, second) == b"reply"
        assert replies(post, first) == [(first, None)]
    assert worker.orders == [b"first", b"second"]


def test_a_client_is_present_while_it_trains(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(mailbox_module, "ABSENT_SECONDS", 1.0)
    worker = Echo(b"reply", released=threading.Event())
    assert worker.released is not None
    with connected(post, worker):
        ticket = post.mailbox.send("anna", b"order", 0, 60)
        wait(lambda: worker.orders)
        session = post.mailbox.present()
        for _ in range(15):
            time.sleep(0.1)
            assert post.mailbox.present() == session
        worker.released.set()
        assert reply_to(post.mailbox, ticket) == b"reply"
        assert post.mailbox.present() == session
    assert post.mailbox.present() == {}  # it has disconnected


def test_no_thread_uses_or_closes_a_connection_of_another_thread(post: Post, monkeypatch) -> None:
    threads: dict[httpx.Client, set[int]] = {}

    def noted(client: httpx.Client) -> None:
        threads.setdefault(client, set()).add(threading.get_ident())

    stream, close = httpx.Client.stream, httpx.Client.close
    monkeypatch.setattr(httpx.Client, "stream", lambda c, *a, **k: noted(c) or stream(c, *a, **k))
    monkeypatch.setattr(httpx.Client, "close", lambda c: noted(c) or close(c))
    monkeypatch.setattr(client_module, "HEARTBEAT_SECONDS", 0.01)
    with Connection(post.address, post.credentials()) as connection:
        for count in (2, 4, 6):
            connection.connect()
            assert connection.next_order() is None
            wait(lambda count=count: len(threads) == count)  # heartbeats over the new connection
    assert all(len(users) == 1 for users in threads.values())
    wait(lambda: all(client.is_closed for client in threads))


def test_a_client_ends_once_its_last_reply_was_sent(post: Post) -> None:
    class Last(Echo):
        def answer(self, data: bytes) -> bytes:
            self.finished = True
            return super().answer(data)

    with LossyProxy(post.port, limit=2_000_000) as proxy, connected(post, Last(), proxy):
        assert reply_to(post.mailbox, post.mailbox.send("anna", b"order", 0, 60)) == REPLY
        wait(lambda: not is_present(post.mailbox))


def order(kind: Kind) -> Order:
    return Order(run="0123456789abcdef", client="anna", kind=kind, turn=0)


def test_the_first_order_to_join_is_returned_and_not_replied_to(post: Post) -> None:
    orders: list[Order] = []
    thread = threading.Thread(
        target=lambda: orders.append(first_order(post.address, post.credentials(), 20))
    )
    thread.start()
    wait(lambda: is_present(post.mailbox))
    assert reply_to(post.mailbox, post.mailbox.send("anna", seal(order("step")), 0, 60)) is None
    join = post.mailbox.send("anna", seal(order("join")), 0, 60)
    thread.join(20)
    assert orders == [order("join")]
    assert reply_to(post.mailbox, join) is None
    assert post.mailbox.present() == {}


def test_a_server_that_asks_for_nothing_is_reported(post: Post) -> None:
    with pytest.raises(CoterieError, match="did not ask this client to join a run"):
        first_order(post.address, post.credentials(), 0.5)


def test_the_order_is_checked_against_its_digest(post: Post) -> None:
    with Connection(post.address, post.credentials()) as connection:
        connection._request("POST", "/session")
        ticket = post.mailbox.send("anna", b"order", 0, 60)
        (post.mailbox.files.folder / ticket).write_bytes(b"ORDER")
        with pytest.raises(client_module.httpx.RemoteProtocolError, match="arrived damaged"):
            connection.next_order()
        (post.mailbox.files.folder / ticket).write_bytes(b"order")
        assert connection.next_order() == b"order"


def test_a_renewed_key_file_is_used_without_a_restart(post: Post, tmp_path) -> None:
    anna = post.credentials()
    with connected(post, Idle()) as events:
        new = post.keys.renew("anna", tmp_path / "new.key")
        closed = "closed the connection; if this repeats"
        wait(lambda: any(closed in str(value) for _, value in events))
        new.replace(anna.path)
        wait(lambda: events[-1] == ("connected", post.address) and len(events) > 2)


@pytest.mark.parametrize("again", [False, True])
def test_a_client_refused_for_long_ends_with_an_error(again, post: Post, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 2.5)
    with connected(post, Idle()) as events:
        certificate = post.folder / "keys" / "clients" / "anna.pem"
        key = certificate.read_bytes()
        post.keys.remove("anna")
        wait(lambda: any("removed or renewed this key" in str(value) for _, value in events))
        if again:  # it is accepted again before the time is over
            certificate.write_bytes(key)
            wait(lambda: events[-1] == ("connected", post.address))
            time.sleep(3)
            assert events[-1] == ("connected", post.address)
        else:
            wait(lambda: str(events[-1][1]).endswith("ask for a new key file."), 20)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_reply_that_cannot_be_stored_is_reported_once(post: Post, monkeypatch) -> None:
    online = ("connected", post.address)
    full = f"{post.address} could not store this client's reply; its disk may be full"
    with running(post.address, post.credentials(), Echo(mail.REPLY)) as events:
        wait(lambda: events == [online])
        monkeypatch.setattr(order_files.secrets, "token_hex", lambda _: "0" * 32)
        file = post.mailbox.files.folder / f"{'0' * 32}.reply"
        file.symlink_to("/dev/full")
        ticket = mail.send(post)
        wait(lambda: len(events) == 2)
        time.sleep(1)
        assert events == [online, ("away", full)]
        file.unlink()
        wait(lambda: events[2:] == [online])
    assert mail.replies(post, ticket) == [(ticket, mail.REPLY)]


def test_a_second_process_with_a_key_waits_for_the_first(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 0.1)
    with connected(post, Idle()):
        session = post.mailbox.present()
        with running(post.address, post.credentials()) as second:
            sentence = f"{post.address} {faults.STATUS[409]}"
            wait(lambda: ("away", sentence) in second)
            time.sleep(0.5)
            assert second == [("away", sentence)]
            assert post.mailbox.present() == session
