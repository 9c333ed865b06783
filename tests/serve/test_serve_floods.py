"""Connections and prompts of strangers cost little, and lock out no caller."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from serving import LIMITS, connected, served

from coterie.network import accepting
from coterie.serve.app import CHARACTERS
from coterie.serve.models import Models, ServedModel

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def address(models: Models) -> Iterator[str]:
    with served(models, ("key",)) as address:
        yield address


def is_closed(opened: socket.socket, seconds: float = 20) -> bool:
    """Return whether the server closes a connection within some seconds."""
    opened.settimeout(seconds)
    try:
        while opened.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def status(opened: socket.socket, request: bytes) -> bytes:
    """Send a request, and return the status of the reply."""
    opened.sendall(request)
    return opened.recv(65536)[9:12]


def test_idle_connections_make_way_for_requests(address: str, monkeypatch) -> None:
    """Check that only the oldest connections of the busiest address are closed."""
    monkeypatch.setattr(accepting, "PENDING", 5)
    with ExitStack() as stack:
        other = stack.enter_context(connected(address, "127.0.0.2"))
        idle = [stack.enter_context(connected(address)) for _ in range(20)]
        assert all(is_closed(each) for each in idle[:15])
        assert status(other, MODELS % b"key") == b"200"
        with connected(address) as opened:
            assert status(opened, MODELS % b"key") == b"200"
        assert not is_closed(idle[-1], seconds=0.1)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost:", PAGE, MODELS % b"wrong"]
)
def test_a_connection_without_a_valid_request_is_closed(sent, address, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "PENDING_SECONDS", 0.3)
    with connected(address) as stranger, connected(address) as caller:
        assert status(caller, MODELS % b"key") == b"200"
        stranger.sendall(sent)
        assert is_closed(stranger)
        assert not is_closed(caller, seconds=1)
        assert status(caller, MODELS % b"key") == b"200"


def test_idle_connections_of_callers_are_limited(address: str, monkeypatch) -> None:
    monkeypatch.setattr(accepting, "ADMITTED", 3)
    with ExitStack() as stack:
        other = stack.enter_context(connected(address, "127.0.0.2"))
        assert status(other, MODELS % b"key") == b"200"
        opened = [stack.enter_context(connected(address)) for _ in range(6)]
        assert [status(each, MODELS % b"key") for each in opened] == [b"200"] * 6
        assert all(is_closed(each) for each in opened[:4])
        assert not is_closed(opened[-1], seconds=0.1)
        assert status(other, MODELS % b"key") == b"200"


def test_a_long_prompt_is_refused_before_it_is_tokenised(server: httpx.Client, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the prompt was tokenised")

    monkeypatch.setattr(ServedModel, "text_prompt", refuse)
    monkeypatch.setattr(ServedModel, "chat_prompt", refuse)
    half = {"role": "user", "content": "a" * (LIMITS.prompt * CHARACTERS // 2 + 1)}
    empty = {"role": "user", "content": ""}
    bodies: list[Any] = [{"messages": [half, half]}, {"messages": [empty] * (LIMITS.prompt + 1)}]
    replies = [server.post(CHAT, json={"model": "anna", **body}) for body in bodies]
    long = {"model": "fedprompt:poet", "prompt": "a" * 10**6}
    for reply in (*replies, server.post(TEXT, json=long)):
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
