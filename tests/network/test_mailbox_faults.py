"""A mailbox and its HTTPS server under faults: stalls, full disks, malformed requests."""

import hashlib
import http.client
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import mail
import pytest
from mail import (
    A_SESSION,
    NO_TICKET,
    ORDER,
    REPLY,
    Post,
    begin_upload,
    is_closed,
    put,
    received,
    replies,
    send,
    wait,
)

from coterie.errors import CoterieError
from coterie.network import mailbox as mailbox_module
from coterie.network import order_files
from coterie.network import server as server_module
from coterie.network.mailbox import Mailbox
from coterie.network.protocol import DIGEST, PROTOCOL, SESSION, VERSION


@pytest.fixture
def post(post: Post) -> Post:
    """A mailbox to which anna has connected."""
    assert post.ping() == 204
    return post


def test_a_stalled_upload_is_given_up_and_can_be_continued(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    ticket = send(post)
    with begin_upload(post, ticket, 4000) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert put(post, ticket, start=4000) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]


def test_a_stalled_download_contains_only_bytes_of_the_order(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    order = os.urandom(30_000_000)
    ticket = send(post, order)
    with post.connect() as connection:
        connection.sendall(
            f"GET /orders/{ticket} HTTP/1.1\r\nHost: x\r\n{PROTOCOL}: {VERSION}\r\n"
            f"{SESSION}: {A_SESSION}\r\n\r\n".encode()
        )
        time.sleep(0.4)
        data = b""
        with suppress(OSError):
            while piece := connection.recv(1 << 20):
                data += piece
    body = data.partition(b"\r\n\r\n")[2]
    assert 0 < len(body) < len(order)
    assert order.startswith(body)
    status, rest = post.request("GET", f"/orders/{ticket}", Range=f"bytes={len(body)}-")
    assert (status, body + rest) == (206, order)


def test_a_new_upload_ends_an_older_one(post: Post) -> None:
    ticket = send(post)
    with begin_upload(post, ticket, 4000) as broken:
        assert received(post, ticket) == 4000
        assert is_closed(broken)
        assert put(post, ticket, start=4000) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]


def test_uploads_at_the_same_time_are_not_mixed(post: Post) -> None:
    ticket = send(post)
    with begin_upload(post, ticket, 0), ThreadPoolExecutor(3) as pool:
        statuses = [s.result(20) for s in [pool.submit(try_put, post, ticket) for _ in range(3)]]
    assert 422 not in statuses
    assert replies(post, ticket) == [(ticket, REPLY)]


def try_put(post: Post, ticket: str) -> int:
    """Upload until the reply is complete or the server has ended the upload."""
    with suppress(OSError, http.client.HTTPException):
        return put(post, ticket)
    return 0


def test_an_order_whose_file_is_gone_is_withdrawn(post: Post) -> None:
    ticket = send(post)
    (post.mailbox.files.folder / ticket).unlink()
    assert post.request("GET", f"/orders/{ticket}") == (410, b"")
    assert replies(post, ticket) == [(ticket, None)]


def test_an_order_that_cannot_be_read_is_reported_and_stays(post: Post, caplog) -> None:
    ticket = send(post)
    file = post.mailbox.files.folder / ticket
    file.unlink()
    file.mkdir()  # opening a folder as a file fails even for root
    assert post.request("GET", f"/orders/{ticket}") == (500, b"")
    assert caplog.messages == ["anna: could not read the order: Is a directory"]
    file.rmdir()
    file.write_bytes(ORDER)
    assert post.request("GET", f"/orders/{ticket}") == (200, ORDER)
    assert replies(post, ticket) == []


def resident() -> int:
    """Return the number of bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_a_large_reply_is_not_held_in_memory(tmp_path: Path) -> None:
    piece, number = os.urandom(1 << 20), 300
    total, whole = number << 20, hashlib.sha256()
    for _ in range(number):
        whole.update(piece)
    with mail.post(tmp_path, total) as post:
        assert post.ping() == 204
        ticket, before, highest = send(post), resident(), 0
        with post.connect() as connection:
            connection.sendall(
                f"PUT /replies/{ticket} HTTP/1.1\r\nHost: x\r\n{PROTOCOL}: {VERSION}\r\n"
                f"{SESSION}: {A_SESSION}\r\n{DIGEST}: {whole.hexdigest()}\r\n"
                f"Content-Length: {total}\r\n"
                f"Content-Range: bytes 0-{total - 1}/{total}\r\n\r\n".encode()
            )
            for _ in range(number):
                connection.sendall(piece)
                highest = max(highest, resident())
            connection.settimeout(60)
            assert connection.recv(1000).startswith(b"HTTP/1.1 204 ")
        assert highest - before < 50 << 20
        [(_, reply)] = replies(post, ticket)
    assert reply == number * piece


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_reply_to_a_full_disk_is_sent_again(post: Post, caplog, monkeypatch) -> None:
    ticket = send(post)
    with monkeypatch.context() as full:
        full.setattr(order_files, "open_regular", lambda *_: os.open("/dev/full", os.O_RDWR))
        assert put(post, ticket) == put(post, ticket) == 507
    assert caplog.messages == ["anna: could not store the reply: No space left on device"]
    assert received(post, ticket) == 0
    assert put(post, ticket) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_an_order_for_which_the_disk_has_no_space_is_an_error(post: Post, monkeypatch) -> None:
    earlier = send(post)
    monkeypatch.setattr(order_files.secrets, "token_hex", lambda _: NO_TICKET)
    (post.mailbox.files.folder / NO_TICKET).symlink_to("/dev/full")
    with pytest.raises(CoterieError, match=r"No space left on device\. Correct"):
        send(post)
    assert put(post, earlier) == 204


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mailbox"
    file.write_bytes(b"")
    with pytest.raises(CoterieError, match=r"Could not use the folder .*mailbox: File exists"):
        Mailbox(file)
    with pytest.raises(CoterieError, match="No such file or directory"):
        Mailbox(tmp_path / "missing" / "mailbox")


def test_a_folder_that_became_read_only_loses_no_reply(post: Post, monkeypatch) -> None:
    first = send(post)
    with monkeypatch.context() as patch:

        def unlink(self: Path, missing_ok: bool = False) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        patch.setattr(Path, "unlink", unlink)
        assert put(post, first) == 204
        assert replies(post, first) == [(first, REPLY)]
        second = send(post)
        third = send(post)
        post.mailbox.present()
        assert replies(post, second) == [(second, None)]
    assert put(post, third) == 204


def test_an_order_in_a_read_only_folder_is_one_sentence(post: Post, monkeypatch) -> None:
    def fail(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(CoterieError) as error:
        send(post)
    assert str(error.value) == (
        f"Could not write an order to {post.mailbox.files.folder}: Read-only file system. Correct "
        "this, and continue with --resume."
    )


def test_files_of_an_earlier_process_are_deleted(tmp_path: Path) -> None:
    Mailbox(tmp_path / "mailbox").files.write(ORDER, 60)
    assert list((tmp_path / "mailbox").iterdir())
    Mailbox(tmp_path / "mailbox")
    assert not list((tmp_path / "mailbox").iterdir())


def test_malformed_requests_of_a_client_do_not_disturb_others(post: Post) -> None:
    head = f"{PROTOCOL}: {VERSION}\r\n{SESSION}: {A_SESSION}\r\n".encode()
    post.add("berta")
    wait(lambda: "berta" in post.listener.registered.values())
    for request in (
        b"\x00" * 1000 + b"\r\n\r\n",
        b"GET /order HTTP/9.9\r\n\r\n",
        b"GET /order\r\n" + 100_000 * b"x" + b"\r\n\r\n",
        b"PUT /replies/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /session HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /session HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n%s\r\nzz\r\n" % head,
        b"POST /session HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n%s\r\n"
        % head,
    ):
        assert b" 500 " not in post.raw(request)
        assert post.ping(post.context("berta")) == 204
    assert set(post.mailbox.present()) == {"anna", "berta"}


def test_a_connection_that_ends_in_the_middle_of_a_request_is_forgotten(post: Post) -> None:
    for number in range(1, len(mail.PING), 7):
        with post.connect() as connection:
            connection.sendall(mail.PING[:number])
    wait(lambda: not post.listener.connected("anna"))
    assert post.ping() == 204


def test_a_server_that_has_failed_ends_the_run_with_an_error(post: Post, monkeypatch) -> None:
    def read_keys() -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(post.listener, "read_keys", read_keys)
    wait(lambda: post.mailbox.failure)
    with pytest.raises(CoterieError, match=r"the disk is gone.*restart the server with --resume"):
        post.mailbox.wait()


def test_waiting_ends_when_a_reply_arrives(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "WAIT_SECONDS", 60)
    ticket = send(post)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post.mailbox.wait)
        assert put(post, ticket) == 204
        waits.result(10)


def test_after_a_reply_the_next_wait_ends_at_once(post: Post, monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(post.mailbox.lock, "wait", waits.append)
    ticket = send(post)
    post.mailbox.wait()
    assert waits == [mailbox_module.WAIT_SECONDS]
    assert put(post, ticket) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]
    post.mailbox.wait()  # the reply may be a round's last: nothing more would arrive
    assert waits == [mailbox_module.WAIT_SECONDS]
    post.mailbox.wait()
    assert waits == 2 * [mailbox_module.WAIT_SECONDS]
