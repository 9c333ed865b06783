"""What the network may say to a SuperLink: its clients' calls, and nothing else by any trick."""

import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from door import Door, door, make_keys

from coterie.engines.flower import proxy as module
from coterie.engines.flower.proxy import PLACES, ProxyFiles

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") or shutil.which("nginx", path=PLACES)),
    reason="nginx is not installed",
)

SITE = Path(__file__).parents[2] / "deploy" / "nginx-site.conf"
LARGEST = 40_000_000
CALLS = (
    "activate-node deactivate-node send-node-heartbeat pull-messages push-messages "
    "push-object pull-object confirm-message-received"
)
FLEET = {f"/v1/fleet/{call}" for call in CALLS.split()}
HIDDEN = b"POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def site_as_template() -> str:
    """The site file in the place of Coterie's own, its values made the words to fill in."""
    text = SITE.read_text(encoding="utf-8")
    for value, word in (
        ("listen 9092 ssl;", "listen @ADDRESS@ ssl;"),
        ("listen [::]:9092 ssl;", ""),
        ("127.0.0.1:9091", "127.0.0.1:@SUPERLINK@"),
        ("/etc/coterie/keys/server.pem", "@CERTIFICATE@"),
        ("/etc/coterie/keys/server.key", "@KEY@"),
        ("/etc/coterie/keys/ca.pem", "@CA@"),
        ("64m", "@LARGEST@"),
        ("/var/log/nginx/coterie.log", "access.log"),
        ("/var/log/nginx/coterie-errors.log", "error.log"),
    ):
        assert value in text
        text = text.replace(value, word)
    paths = "".join(
        f"{kind}_temp_path spool/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
    )
    return f"@USER@ daemon off; pid nginx.pid; events {{}} http {{ {paths}\n{text}\n}}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ProxyFiles:
    return make_keys(tmp_path_factory.mktemp("proxy") / "keys")


@pytest.fixture(scope="module", params=["of a run", "as a site"])
def entry(
    request: pytest.FixtureRequest, keys: ProxyFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("a folder; of nginx")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # only until nginx has read its configuration
            if request.param == "as a site":
                template = folder / "site.conf"
                template.write_text(site_as_template(), encoding="utf-8")
                patch.setattr(module, "TEMPLATE", template)
            made = stack.enter_context(door(folder, keys, keys, LARGEST))
        yield made


@pytest.fixture(autouse=True)
def _nothing_seen(request: pytest.FixtureRequest) -> None:
    if "entry" in request.fixturenames:
        request.getfixturevalue("entry").upstream.seen.clear()


def test_every_call_of_a_client_passes(entry: Door) -> None:
    for path in sorted(FLEET):
        assert entry.post(path, b"body") == (200, b"body")
    assert {(seen.method, seen.path) for seen in entry.upstream.seen} == {
        ("POST", p) for p in FLEET
    }


def test_a_large_body_passes_unchanged_both_ways(entry: Door) -> None:
    body = os.urandom(30_000_000)
    status, answer = entry.post("/v1/fleet/push-object", body)
    assert status == 200
    assert answer == body
    assert entry.upstream.seen[0].body == body
    pieces = iter([body[:10], body[10:5_000_000], b"end"])
    whole = body[:5_000_000] + b"end"
    sent = entry.send("POST", "/v1/fleet/push-object", pieces, Transfer_Encoding="chunked")
    assert sent == (200, whole)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_at_the_door(entry: Door, chunked: bool) -> None:
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n"
    if chunked:
        size = LARGEST + 1
        request = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % size + bytes(100)
    else:
        request = head + b"Content-Length: %d\r\n\r\n" % (LARGEST + 1) + bytes(100)
    assert entry.raw(request).startswith(b"HTTP/1.1 413 ")
    assert not entry.upstream.seen


def test_only_the_headers_of_the_protocol_pass(entry: Door) -> None:
    names = "public-key signature timestamp package-name package-version component-name"
    wanted = {f"flwr-{name}": f"value of {name}" for name in names.split()}
    wanted |= {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
    extra = ("X-Forwarded-For: 9.9.9.9", "X-Forwarded-Proto: http", "Forwarded: for=9.9.9.9")
    lines = [*(f"{name}: {value}" for name, value in wanted.items()), *extra, "Upgrade: websocket"]
    lines += ["Host: evil", "Content-Length: 0", "Flwr-Task-Token: x", "Authorization: x"]
    request = "POST /v1/fleet/pull-object HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    assert entry.raw(request.encode()).startswith(b"HTTP/1.1 200 ")
    (seen,) = entry.upstream.seen
    assert seen.headers == {**wanted, "host": "localhost", "content-length": "0"}


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
    *("http://127.0.0.1/v1/fleet/../control/x", "https:///v1/control/x", "localhost:80/v1/control"),
    *("/v1/fleet/get-run HTTP/1.1 /v1/control/x", "/v1/fleet/get-run\t/v1/control", "/@refused"),
]  # fmt: skip
TARGETS = [target.replace("get-run", "pull-object") for target in TARGETS]
TARGETS.append("/v1/fleet/get-run")


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_no_other_path_reaches_the_superlink(entry: Door, version: str) -> None:
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


def test_only_post_reaches_the_superlink(entry: Door) -> None:
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


def test_a_whole_address_as_target_is_passed_on_as_its_path(entry: Door) -> None:
    target = b"https://other.example:1/v1/fleet/pull-object"
    answer = entry.raw(b"POST " + target + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [seen.path for seen in entry.upstream.seen] == ["/v1/fleet/pull-object"]


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
def test_no_second_request_is_smuggled_in_a_body(entry: Door, version: bytes) -> None:
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


def test_a_refusal_ends_the_connection_and_tells_no_version(entry: Door) -> None:
    head, _, page = entry.raw(b"GET /docs HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
    lines = head.decode().splitlines()
    assert "Connection: close" in lines
    assert "Server: nginx" in lines
    assert b"nginx/" not in page


def test_a_log_line_is_short_and_holds_nothing_of_what_was_sent(entry: Door) -> None:
    entry.post("/v1/fleet/pull-object", b"secret body", flwr_signature="secret signature")
    entry.send("GET", "/docs?secret=query", User_Agent="secret agent")
    entry.send("GET", "/" + "x" * 3000)
    text = ""
    for _ in range(100):  # a line is written just after its answer
        text = (entry.proxy.folder / "access.log").read_text()
        if "xxxx" in text:
            break
        time.sleep(0.05)
    assert "127.0.0.1 POST /v1/fleet/pull-object 200 " in text
    assert "127.0.0.1 GET /docs 404 " in text
    assert "secret" not in text
    assert all(len(line) < 250 for line in text.splitlines())
    assert "secret" not in (entry.proxy.folder / "error.log").read_text()


def test_old_tls_is_refused(entry: Door) -> None:
    old = ssl.create_default_context(cafile=entry.proxy.keys.ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain,
        pytest.raises(OSError),  # noqa: PT011  (an SSLError, or a reset)
    ):
        old.wrap_socket(plain, server_hostname="localhost")
    assert entry.connect().version() == "TLSv1.3"


def test_a_hundred_clients_behind_one_address_are_served(entry: Door) -> None:
    def client(number: int) -> list[int]:
        return [entry.post("/v1/fleet/pull-messages", b"%d" % number)[0] for _ in range(3)]

    with ThreadPoolExecutor(16) as pool:
        assert {status for found in pool.map(client, range(100)) for status in found} == {200}


def test_a_superlink_of_another_authority_is_not_spoken_to(
    keys: ProxyFiles, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    with door(tmp_path / "run", keys, other, 1000) as entry:
        assert entry.post("/v1/fleet/pull-object", b"secret")[0] == 502
        assert entry.upstream.seen == []


def test_a_flood_from_one_address_is_told_to_come_back(
    keys: ProxyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = module.TEMPLATE.read_text(encoding="utf-8")
    template = tmp_path / "slow.conf"
    template.write_text(
        text.replace("rate=500r/s", "rate=1r/m").replace("burst=4000", "burst=2"), encoding="utf-8"
    )
    monkeypatch.setattr(module, "TEMPLATE", template)
    with door(tmp_path / "run", keys, keys, 1000) as entry:
        statuses = [entry.post("/v1/fleet/pull-object")[0] for _ in range(6)]
    assert statuses == [200, 200, 200, 503, 503, 503]
    assert len(entry.upstream.seen) == 3
