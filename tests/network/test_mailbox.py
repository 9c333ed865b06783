"""A mailbox and its HTTPS server, by the requests that `network/protocol.py` describes."""

import hashlib
import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import mail
import pytest
from mail import (
    A_SESSION,
    LARGEST,
    NO_TICKET,
    ORDER,
    REPLY,
    Post,
    begin_upload,
    put,
    received,
    replies,
    send,
    upload_head,
    wait,
)
from ports import free_port

from coterie.deployment.mailbox import MailboxServing
from coterie.deployment.status import ServerWatch
from coterie.federation.sizes import MiB
from coterie.network import mailbox as mailbox_module
from coterie.network import server as server_module
from coterie.network.keys import Keys
from coterie.network.mailbox import Mailbox
from coterie.network.protocol import PROTOCOL, SESSION, VERSION, Offer
from coterie.runs import RunFolder

OTHER_SESSION = "f" * 32


@pytest.fixture
def post(post: Post) -> Post:
    """A mailbox to which anna has connected."""
    assert post.ping() == 204
    return post


def test_an_order_is_offered_and_its_reply_is_returned_once(post: Post) -> None:
    ticket = send(post)
    status, body = post.request("GET", "/order")
    assert status == 200
    digest = hashlib.sha256(ORDER).hexdigest()
    assert Offer.model_validate_json(body) == Offer(ticket=ticket, size=1000, digest=digest)
    assert post.request("GET", f"/orders/{ticket}") == (200, ORDER)
    assert received(post, ticket) == 0
    assert replies(post, ticket) == []
    assert put(post, ticket) == 204
    assert replies(post, NO_TICKET, ticket) == [(ticket, REPLY)]
    assert replies(post, ticket) == []
    assert not list(post.mailbox.files.folder.iterdir())


def test_a_request_for_an_order_waits_until_there_is_one(post: Post) -> None:
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(post.request, "GET", "/order")
        time.sleep(0.3)
        assert not response.done()
        assert send(post).encode() in response.result(10)[1]


def test_a_request_for_an_order_ends_after_a_time(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.2)
    assert post.request("GET", "/order") == (204, b"")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-", (200, ORDER)),
        ("bytes=1-", (206, ORDER[1:])),
        ("bytes=999-", (206, ORDER[999:])),
        ("bytes=1000-", (206, b"")),
        ("bytes=1001-", (416, b"")),
        ("bytes=-5", (416, b"")),
        ("bytes=5-2", (200, ORDER)),
        ("lines=1-", (200, ORDER)),
        ("bytes=" + 5000 * "9" + "-", (200, ORDER)),
    ],
)
def test_an_order_is_sent_from_the_start_of_a_range_on(header, expected, post: Post) -> None:
    assert post.request("GET", f"/orders/{send(post)}", Range=header) == expected


def test_an_upload_that_broke_off_continues_where_it_stopped(post: Post) -> None:
    ticket = send(post)
    for number in (1, 4000):
        begin_upload(post, ticket, number, start=0 if number == 1 else 1).close()
        assert received(post, ticket) == number
    assert put(post, ticket, start=4000) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]


def test_a_reply_with_a_wrong_digest_is_sent_again(post: Post) -> None:
    ticket = send(post)
    begin_upload(post, ticket, 4000).close()
    assert received(post, ticket) == 4000
    assert put(post, ticket, bytes(len(REPLY)), start=4000) == 422
    assert replies(post, ticket) == []
    assert received(post, ticket) == 0
    assert put(post, ticket) == 204
    assert replies(post, ticket) == [(ticket, REPLY)]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Range": ""}, 400),
        ({"Content_Range": "bytes 0-9999"}, 400),
        ({"Content_Range": "bytes */10000"}, 400),
        ({"Content_Range": "bytes 0-99/10000"}, 400),
        ({"Content_Range": "bytes 0-10000/10001"}, 400),
        ({"Content_Range": "bytes 0--1/0"}, 400),
        ({"Content_Range": "bytes 0-0/0"}, 400),
        ({"Content_Range": "bytes \xb2-9999/10000"}, 400),
        ({"Content_Range": "bytes 1-10000/10001"}, 416),
        ({"Content_Range": f"bytes 0-{LARGEST}/{LARGEST + 1}"}, 413),
        ({"Content_Encoding": "gzip"}, 400),
        ({"Content_Encoding": "identity"}, 400),
    ],
)
def test_an_upload_with_invalid_headers_stores_nothing(headers, status, post: Post) -> None:
    ticket = send(post)
    assert put(post, ticket, **headers) == status
    if status == 413:
        assert replies(post, ticket) == [(ticket, None)]  # there can be no other reply
    else:
        assert received(post, ticket) == 0
        assert put(post, ticket) == 204


@pytest.mark.parametrize(("size", "status"), [(MiB, 400), (MiB + 1, 413)])
def test_a_run_limits_the_size_of_replies(size, status, config, tmp_path) -> None:
    run = config(deployment={"largest_message": 1})
    keys, port = Keys.create(tmp_path / "keys"), free_port()
    keys.add("anna", tmp_path / "anna.key")
    serving = MailboxServing(ServerWatch(), keys=keys, address=f"127.0.0.1:{port}")
    with serving.link(RunFolder(tmp_path), run) as mailbox:
        assert isinstance(mailbox, Mailbox)
        server: Any = None
        post = Post(tmp_path, keys, mailbox, server, port)
        assert post.ping() == 204
        assert put(post, send(post), Content_Range=f"bytes 0-{size - 1}/{size}") == status


def test_an_upload_in_chunks_is_refused(post: Post) -> None:
    ticket = send(post)
    head = upload_head(ticket).replace(
        b"Content-Length: %d" % len(REPLY), b"Transfer-Encoding: chunked"
    )
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(REPLY), REPLY)
    assert post.raw(head + chunk).startswith(b"HTTP/1.1 400 ")
    assert received(post, ticket) == 0


def test_an_unknown_ticket_reveals_and_changes_nothing(post: Post) -> None:
    other = post.add("berta")
    wait(lambda: "berta" in post.listener.registered.values())
    with closing(http.client.HTTPSConnection("localhost", post.port, context=other.context())) as c:
        c.request("POST", "/session", headers={PROTOCOL: VERSION, SESSION: OTHER_SESSION})
        assert c.getresponse().read() == b""
    of_berta = post.mailbox.send("berta", ORDER, 0, 60)
    send(post)
    for ticket in (NO_TICKET, of_berta):
        assert post.request("GET", f"/orders/{ticket}") == (410, b"")
        assert post.request("GET", f"/replies/{ticket}") == (410, b"")
        assert post.request("DELETE", f"/orders/{ticket}") == (204, b"")
        assert put(post, ticket) == 410
        assert replies(post, ticket) == []
    path, session = f"/orders/{of_berta}", OTHER_SESSION
    assert post.request("GET", path, name="berta", Coterie_Session=session) == (200, ORDER)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/orders/", 404),
        ("GET", "/orders/..%2Fkeys", 404),
        ("GET", f"/orders/{'A' * 32}", 404),
        ("GET", f"/orders/{NO_TICKET}/", 404),
        ("HEAD", "/order", 405),
        ("POST", "/order", 405),
        ("PUT", f"/orders/{NO_TICKET}", 405),
        ("DELETE", f"/replies/{NO_TICKET}", 405),
        ("GET", "/session", 405),
        ("CONNECT", "localhost:22", 404),
        ("OPTIONS", "*", 404),
    ],
)
def test_other_paths_and_methods_do_nothing(method, path, status, post: Post) -> None:
    ticket = send(post)
    assert post.request(method, path)[0] == status
    assert received(post, ticket) == 0


@pytest.mark.parametrize(
    "headers",
    [{PROTOCOL: "0"}, {PROTOCOL: ""}, {SESSION: ""}, {SESSION: "A" * 32}, {SESSION: "0" * 31}],
)
def test_another_version_of_the_protocol_is_refused(headers, post: Post, caplog) -> None:
    for _ in range(3):
        assert post.request("POST", "/session", **headers) == (426, b"")
    assert caplog.messages == ["anna: refused a version of the protocol other than 1"]
    bare = b"POST /session HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    assert post.raw(bare).startswith(b"HTTP/1.1 426 ")


def in_session(post: Post, session: str) -> int:
    return post.request("POST", "/session", Coterie_Session=session)[0]


def test_a_second_process_is_refused_while_the_first_is_connected(post: Post) -> None:
    ticket = send(post)
    with post.connect() as first:
        assert mail.ping(first) == 204
        assert in_session(post, OTHER_SESSION) == 409
        assert mail.ping(first) == 204
        assert post.mailbox.present() == {"anna": A_SESSION}
    # The first process has died: the second one may take over, and the first one may not return.
    wait(lambda: in_session(post, OTHER_SESSION) == 204)
    assert post.mailbox.present() == {"anna": OTHER_SESSION}
    assert replies(post, ticket, ticket) == [(ticket, None)]
    assert in_session(post, A_SESSION) == 409
    assert post.mailbox.present() == {"anna": OTHER_SESSION}


def test_a_second_process_takes_over_when_the_first_is_absent(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(mailbox_module, "ABSENT_SECONDS", 0.5)
    with post.connect() as first, ThreadPoolExecutor(1) as pool:
        assert mail.ping(first) == 204
        waits = pool.submit(post.request, "GET", "/order")
        wait(lambda: in_session(post, OTHER_SESSION) == 204)
        assert waits.result(10) == (204, b"")
        assert mail.ping(first) == 409


def replaced(post: Post) -> None:
    send(post)


def declined(post: Post) -> None:
    order = post.mailbox.inboxes["anna"].order
    assert order is not None
    assert post.request("DELETE", f"/orders/{order.offer.ticket}") == (204, b"")


def left(post: Post) -> None:
    assert post.request("DELETE", "/session") == (204, b"")
    assert post.mailbox.present() == {}


def died(post: Post) -> None:
    assert in_session(post, OTHER_SESSION) == 204


@pytest.mark.parametrize("end", [replaced, declined, left, died])
def test_an_order_that_ends_without_a_reply_is_reported_once(end, post: Post) -> None:
    ticket = send(post)
    begin_upload(post, ticket, 100).close()
    end(post)
    post.mailbox.present()
    assert replies(post, ticket) == [(ticket, None)]
    assert replies(post, ticket) == []
    assert ticket not in {path.stem for path in post.mailbox.files.folder.iterdir()}


def test_an_order_expires_unless_it_was_downloaded(post: Post) -> None:
    ticket = send(post, seconds=-1)
    order = post.mailbox.inboxes["anna"].order
    assert order is not None
    assert post.request("GET", f"/orders/{ticket}") == (200, ORDER)
    wait(lambda: order.downloaded)
    post.mailbox.present()
    assert replies(post, ticket) == []
    late = send(post, seconds=-1)
    post.mailbox.present()
    assert replies(post, ticket, late, late) == [(ticket, None), (late, None)]
    assert post.request("GET", f"/orders/{late}") == (410, b"")


def test_an_upload_to_an_order_that_was_replaced_is_refused(post: Post) -> None:
    ticket = send(post)
    with begin_upload(post, ticket, 100) as connection:
        send(post)
        connection.sendall(REPLY[100:])
        assert connection.recv(1000).startswith(b"HTTP/1.1 410 ")
    assert replies(post, ticket) == [(ticket, None)]


def test_a_client_is_present_until_its_last_request_expires(post: Post, monkeypatch) -> None:
    monkeypatch.setattr(mailbox_module, "ABSENT_SECONDS", 1.0)
    ticket = send(post)
    with begin_upload(post, ticket, 1) as connection:
        for position in range(1, 16):  # every piece of a transfer is a sign
            connection.sendall(REPLY[position : position + 1])
            time.sleep(0.1)
        assert post.mailbox.present() == {"anna": A_SESSION}
    wait(lambda: not post.mailbox.present())
    assert post.ping() == 204
    assert post.mailbox.present() == {"anna": A_SESSION}
    assert received(post, ticket) == 16
