"""What the network may say to a SuperLink: its clients' calls, and nothing else by any trick."""

import http.client
import os
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra flower is not installed")
from door import Entrance, entrance

from coterie.network.keys import Keys, Kit

LARGEST = 40_000_000
CALLS = (
    "activate-node deactivate-node send-node-heartbeat pull-messages push-messages "
    "push-object pull-object confirm-message-received"
)
FLEET = {f"/v1/fleet/{call}" for call in CALLS.split()}
HIDDEN = b"POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entrance]:
    with entrance(tmp_path_factory.mktemp("a folder; of keys"), LARGEST) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_seen(request: pytest.FixtureRequest) -> None:
    if "entry" in request.fixturenames:
        request.getfixturevalue("entry").upstream.seen.clear()


def test_every_call_of_a_client_passes(entry: Entrance) -> None:
    for path in sorted(FLEET):
        assert entry.post(path, b"body") == (200, b"body")
    assert {(seen.method, seen.path) for seen in entry.upstream.seen} == {
        ("POST", p) for p in FLEET
    }


def test_a_large_body_passes_unchanged_both_ways(entry: Entrance) -> None:
    body = os.urandom(30_000_000)
    status, answer = entry.post("/v1/fleet/push-object", body)
    assert status == 200
    assert answer == body
    assert entry.upstream.seen[0].body == body


@pytest.mark.parametrize(
    ("call", "framing", "status"),
    [
        (b"push-object", b"Content-Length: %d" % (LARGEST + 1), b"413"),
        (b"pull-object", b"Content-Length: 65537", b"413"),
        (b"push-object", b"Transfer-Encoding: chunked", b"411"),
        (b"push-object", b"Content-Length: 10\r\nContent-Encoding: gzip", b"415"),
    ],
)
def test_a_body_that_is_too_large_or_of_unknown_length_is_refused(
    entry: Entrance, call: bytes, framing: bytes, status: bytes
) -> None:
    head = b"POST /v1/fleet/%s HTTP/1.1\r\nHost: x\r\n" % call
    assert entry.raw(head + framing + b"\r\n\r\n" + b"5\r\nhello").split()[1] == status
    assert not entry.upstream.seen


def test_only_the_headers_of_the_protocol_pass(entry: Entrance) -> None:
    names = "signature timestamp package-name package-version component-name"
    wanted = {f"flwr-{name}": f"value of {name}" for name in names.split()}
    wanted |= {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
    extra = ("X-Forwarded-For: 9.9.9.9", "X-Forwarded-Proto: http", "Forwarded: for=9.9.9.9")
    lines = [*(f"{name}: {value}" for name, value in wanted.items()), *extra, "Upgrade: websocket"]
    lines += [
        "Host: evil",
        "Flwr-Public-Key: another",
        "Content-Length: 0",
        "Flwr-Task-Token: x",
        "Authorization: x",
    ]
    request = "POST /v1/fleet/pull-object HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    assert entry.raw(request.encode()).startswith(b"HTTP/1.1 200 ")
    (seen,) = entry.upstream.seen
    key = b64encode(Kit.load(entry.folder / "anna.key").public).decode()  # whatever was sent
    own = {"host": f"localhost:{entry.upstream.port}", "content-length": "0"}
    assert seen.headers == {**wanted, **own, "flwr-public-key": key}


TARGETS = [
    *("/", "/docs", "/openapi.json", "/health", "/redoc", "/v1", "/v1/fleet", "/v1/fleet/", "*"),
    *("/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/get-fab"),
    "/fleet/get-run",
    *("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-object"),
    *("//v1/control/start-run", "//v1/fleet/get-run", "/v1//fleet/get-run", "/v1/fleet//get-run"),
    *("/v1/fleet/../control/start-run", "/v1/control/../fleet/get-run", "/v1/./fleet/get-run"),
    *("/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run"),
    *("/v1/fleet/%2E%2E%2Fcontrol%2Fstart-run", "/v1/control/%2e%2e/fleet/get-run"),
    *("/v1/control/start-run/..%2f..%2ffleet/get-run", "/v1/fleet%2fget-run"),
    *("/v1/fleet/pull%2dobject", "/v1/fleet/get-run%09"),
    *("/v1/fleet/%70ull-object", "/v1/fleet/get-run%00", "/v1/fleet/get-run%0a"),
    *("/v1/fleet/get-run%20", "/v1/fleet/%2fget-run"),
    *("/v1/fleet/get-run/", "/v1/fleet/get-run/../../control/start-run", "/v1/fleet/get-run/x"),
    *("/v1/fleet/get-run;/../../control/start-run", "/v1/fleet/get-run?a=b", "/v1/fleet/get-run?"),
    *("/v1/fleet/get-run#", "/v1/fleet/get-run%3f", "/v1/fleet/get-run%23", "/v1/fleet/get-run\\x"),
    *("/v1/fleet/..\\control\\start-run", "/v1/fleet/..%5ccontrol", "/v1/fleet/..;/control/x"),
    *("/V1/fleet/get-run", "/v1/Fleet/get-run", "/v1/fleet/Get-Run", "/v1/fleet/GET-RUN"),
    *("/v1/fleet/%252e%252e/control/start-run", "/v1/fleet/\xc0\xae\xc0\xae/control/start-run"),
    *("/%76%31/control/start-run", "v1/fleet/get-run", "../v1/control/start-run"),
    *("/../v1/control/x", "/./v1/fleet/get-run"),
    *("https://localhost/v1/control/start-run", "https://localhost//v1/fleet/get-run"),
    "https://other.example:1/v1/fleet/pull-object",
    *("http://127.0.0.1/v1/fleet/../control/x", "https:///v1/control/x", "localhost:80/v1/control"),
    *("/v1/fleet/get-run HTTP/1.1 /v1/control/x", "/v1/fleet/get-run\t/v1/control", "/@refused"),
]  # fmt: skip
TARGETS = [target.replace("get-run", "pull-object") for target in TARGETS]
TARGETS.append("/v1/fleet/get-run")


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_no_other_path_reaches_the_superlink(entry: Entrance, version: str) -> None:
    requests = [
        f"POST {target} {version}\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
        for target in TARGETS
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(entry.raw, (request.encode("latin-1") for request in requests)))
    for target, answer in zip(TARGETS, answers, strict=True):
        status = answer.split(b" ", 2)[1:2]
        assert status in ([b"404"], [b"400"], [b"405"]), (target, answer[:80])
    assert entry.upstream.seen == []


def test_only_post_reaches_the_superlink(entry: Entrance) -> None:
    methods = [
        "GET",
        "HEAD",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "post",
        "POSTX",
    ]
    for method in [*methods, "PRI", "PROPFIND"]:
        request = f"{method} /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        assert entry.raw(request.encode())[9:12] in (b"404", b"400", b"405"), method
    assert entry.raw(b"GET /v1/fleet/pull-object\r\n").split()[1:2] != [b"200"]  # HTTP/0.9
    assert entry.raw(b"POST /v1/fleet/pull-object\r\n\r\n").split()[1:2] != [b"200"]
    assert entry.upstream.seen == []


FRAMINGS = {
    "length and chunks": b"Content-Length: %(all)d\r\nTransfer-Encoding: chunked\r\n",
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: %(all)d\r\n",
    "a list of lengths": b"Content-Length: 5, %(all)d\r\n",
    "a length with a sign": b"Content-Length: +5\r\n",
    "a length past 64 bits": b"Content-Length: 18446744073709551621\r\n",
    "a negative length": b"Content-Length: -1\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n",
    "a tab": b"Transfer-Encoding:\tchunked\r\n",
    "a vertical tab": b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n",
    "another coding": b"Transfer-Encoding: chunked, identity\r\nContent-Length: 5\r\n",
    "a coding twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "a folded line": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n",
    "a bare line feed": b"X: y\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "a bare carriage return": b"X: y\rTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "an underscore": b"Transfer_Encoding: chunked\r\nContent-Length: 5\r\n",
    "no length": b"",
}


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_no_second_request_is_smuggled_in_a_body(entry: Entrance, version: bytes) -> None:
    body = b"0\r\n\r\n" + HIDDEN
    requests = [
        b"POST /v1/fleet/pull-object " + version + b"\r\nHost: x\r\nConnection: keep-alive\r\n"
        + framing.replace(b"%(all)d", b"%d" % len(body)) + b"\r\n" + body
        for framing in FRAMINGS.values()
    ]  # fmt: skip
    requests.append(requests[-1].replace(b"\r\nHost", b"\r\nHost: y\r\nHost"))
    requests.append(  # two requests, one after the other: only the second is refused
        b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" + HIDDEN
    )
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(entry.raw, requests))
    assert answers[-1].startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 404 " in answers[-1]
    assert {(seen.method, seen.path) for seen in entry.upstream.seen} <= {
        ("POST", "/v1/fleet/pull-object")
    }
    for seen in entry.upstream.seen:  # whatever passed is framed one way, by its length
        assert "transfer-encoding" not in seen.headers
        assert len(seen.body) == int(seen.headers.get("content-length", 0))


def test_a_refusal_ends_the_connection(entry: Entrance) -> None:
    with entry.connect() as connection:
        connection.sendall(b"GET /docs HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"connection: close" in answer.lower()


def test_the_log_is_of_who_came_and_what_was_refused_and_holds_nothing_sent(
    entry: Entrance, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coterie.door")
    entry.post("/v1/fleet/pull-object", b"secret body", flwr_signature="secret signature")
    entry.send("GET", "/docs", User_Agent="secret agent")
    entry.send("GET", "/" + "x" * 3000)
    assert "anna: refused with 404: '/docs'" in caplog.text
    assert "pull-object" not in caplog.text  # no line for what passes, of which there is much
    assert "secret" not in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_a_hundred_clients_behind_one_address_are_served(tmp_path: Path) -> None:
    with entrance(tmp_path, LARGEST) as entry:
        names = [f"c{number}" for number in range(100)]
        for name in names:
            entry.keys.add(name, tmp_path / f"{name}.key")
        time.sleep(1.5)  # the door looks each second

        def client(name: str) -> list[int]:
            context = entry.context(f"{name}.key")
            with ExitStack() as stack:
                line = http.client.HTTPSConnection("localhost", entry.port, context=context)
                stack.callback(line.close)
                found = []
                for _ in range(3):
                    line.request("POST", "/v1/fleet/pull-messages", name.encode())
                    answer = line.getresponse()
                    found.append(answer.status)
                    assert answer.read() == name.encode()
                return found

        with ThreadPoolExecutor(16) as pool:
            assert {status for found in pool.map(client, names) for status in found} == {200}


def test_a_superlink_of_another_authority_is_not_spoken_to(tmp_path: Path) -> None:
    with entrance(tmp_path, LARGEST, behind=Keys.create(tmp_path / "other")) as entry:
        assert entry.post("/v1/fleet/pull-object", b"secret")[0] == 502
        assert entry.upstream.seen == []
