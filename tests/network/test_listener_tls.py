"""Connections that imitate a client end in the TLS handshake, and nothing they send is parsed."""

import random
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from aiohttp.web_protocol import RequestHandler
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from mail import PING, Post, ping, post, upload_head, wait

from coterie.network import certificates
from coterie.network import listener as module
from coterie.network.certificates import client_certificate, pem, private_key, private_pem
from coterie.network.keys import Credentials, Keys

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
NOW, DAY = datetime.now(UTC), timedelta(days=1)
ANNA, BOB, AUTHORITY = "Coterie client anna", "Coterie client bob", "Coterie certificate authority"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FAILURES_PER_SECOND", 10**9)
        patch.setattr(module, "REPORT_SECONDS", 10**9)
        with post(tmp_path_factory.mktemp("mail")) as running:
            yield running


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The decrypted bytes that reach the HTTP server."""
    received: list[bytes] = []
    receive = RequestHandler.data_received

    def data_received(self: RequestHandler, data: bytes) -> None:
        received.append(data)
        receive(self, data)

    monkeypatch.setattr(RequestHandler, "data_received", data_received)
    return received


def is_refused(server: Post, parsed: list[bytes], attempt: Callable[[], object]) -> bool:
    """Return whether an attempt ends in a failed handshake, without any parsed bytes."""
    failed, made = server.listener.refusals.total(), len(server.listener.connections)
    attempt()
    wait(lambda: server.listener.refusals.total() > failed and not server.listener.pending)
    return (
        server.listener.refusals.total() == failed + 1
        and len(server.listener.connections) <= made
        and not parsed
    )


def strangers(server: Post) -> dict[str, ssl.SSLContext]:
    """Return TLS settings that trust the server, without a registered certificate."""
    contexts = {"no certificate": ssl.create_default_context(cafile=server.keys.ca)}
    Keys.create(server.folder / "elsewhere").add("anna", server.folder / "elsewhere.key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
        server.keys.add("late", server.folder / "late.key")
    fingerprint = server.keys.clients()["late"].certificate.fingerprint(hashes.SHA256())
    wait(lambda: fingerprint in server.listener.registered)
    for name in ("elsewhere", "late"):
        credentials = Credentials.load(server.folder / f"{name}.key")
        contexts[name] = replace(credentials, ca=server.keys.ca.read_bytes()).context()
    own = ssl.create_default_context(cafile=server.keys.ca)
    own.load_cert_chain(server.keys.certificate, server.keys.key)
    contexts["the server's certificate"] = own
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2):
        context = server.context()
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = version
        contexts[version.name] = context
    return contexts


def test_connections_without_a_registered_certificate_are_refused(server: Post, parsed) -> None:
    for name, context in strangers(server).items():
        assert is_refused(server, parsed, lambda c=context: server.is_refused(c)), name
    assert server.ping() == 204
    assert b"".join(parsed) == PING


def certificate(
    key: Private,
    name: str = ANNA,
    issuer: tuple[str, Private] | None = None,
    begins: datetime = NOW - DAY,
    authority: bool = False,
) -> bytes:
    """Return a certificate (PEM), signed by an issuer (a name and a key) or by itself."""
    above, signing = issuer or (name, key)
    builder = x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, above)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=begins,
        not_valid_after=begins + 2 * DAY,
    ).add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    hashed = None if isinstance(signing, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return pem(builder.sign(signing, hashed))


def impostors(
    anna: Credentials, registered: bytes, authority: ec.EllipticCurvePrivateKey
) -> dict[str, tuple[Private, bytes]]:
    """Return private keys, and the certificates that an impostor presents with each."""
    own, other = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    edward = ed25519.Ed25519PrivateKey.generate()
    small, large = (rsa.generate_private_key(65537, bits) for bits in (1024, 4096))
    return {
        "anna's name": (own, certificate(own)),
        "anna's name, as in a key file": (own, pem(client_certificate("anna", own))),
        "anna's key in another certificate": (anna.key, certificate(anna.key)),
        "anna's key under another name": (anna.key, certificate(anna.key, BOB)),
        "anna's key, not valid yet": (anna.key, certificate(anna.key, begins=NOW + DAY)),
        "signed by anna": (own, certificate(own, BOB, (ANNA, anna.key)) + registered),
        "anna's certificate as a second one": (own, certificate(own) + registered),
        "anna as the issuer": (own, certificate(own, issuer=(ANNA, other)) + registered),
        "signed by an authority of the same name": (
            own,
            certificate(own, issuer=(AUTHORITY, other))
            + certificate(other, AUTHORITY, authority=True),
        ),
        "signed by the authority": (own, certificate(own, issuer=(AUTHORITY, authority))),
        "an authority": (own, certificate(own, authority=True)),
        "Ed25519": (edward, certificate(edward)),
        "RSA of 1,024 bits": (small, certificate(small)),
        "RSA of 4,096 bits": (large, certificate(large)),
        "a long chain": (own, certificate(own) + 60 * certificate(other, AUTHORITY)),
    }


def test_certificates_that_resemble_a_registered_one_are_refused(server: Post, parsed) -> None:
    registered = pem(server.keys.clients()["anna"].certificate)
    authority = private_key((server.keys.folder / "ca.key").read_bytes())
    cases = impostors(server.credentials(), registered, authority)
    for name, (key, presented) in cases.items():
        private = private_pem(key)  # pyright: ignore[reportArgumentType]
        (server.folder / "impostor.pem").write_bytes(presented + private)
        context = ssl.create_default_context(cafile=server.keys.ca)
        context.set_ciphers("ALL:@SECLEVEL=0")  # the server decides
        context.load_cert_chain(server.folder / "impostor.pem")
        assert is_refused(server, parsed, lambda c=context: server.is_refused(c)), name
    assert server.ping() == 204


def test_a_tls_session_is_not_resumed_without_a_certificate(server: Post) -> None:
    context = server.context()
    with server.connect(context) as connection:
        assert ping(connection) == 204
        session = connection.session
    plain = server.plain()
    with context.wrap_socket(plain, server_hostname="localhost", session=session) as again:
        assert not again.session_reused


def flights(server: Post) -> tuple[bytes, bytes]:
    """Return the two messages that anna's TLS sends in a handshake.

    The first is her ClientHello; the second contains her certificate and signature.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = server.context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with server.plain() as plain:
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        first = outgoing.read()
        plain.sendall(first)
        while True:
            incoming.write(plain.recv(65536))
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                break
    wait(lambda: not server.listener.pending)
    return first, outgoing.read()


def record(kind: int, body: bytes, length: int | None = None) -> bytes:
    """Return a TLS record."""
    size = len(body) if length is None else length
    return bytes([kind, 3, 3]) + size.to_bytes(2, "big") + body


def broken(hello: bytes) -> dict[str, bytes]:
    """Return bytes that are not a handshake, or only begin like one."""
    return {
        "HTTP": PING,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "nothing": b"",
        "random bytes": b"\x16\x03" + random.Random(0).randbytes(999),
        "a line of the PROXY protocol": b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n" + hello,
        "a hello of SSL 2": bytes.fromhex("802e0100020015000000100100800200800300800400800500"),
        "half a hello": hello[: len(hello) // 2],
        "a hello twice": hello + hello,
        "a hello, then a request in the clear": hello + record(23, PING),
        "a request in a record": record(23, PING),
        "a heartbeat": record(24, b"\x01\x40\x00"),
        "a thousand warnings": record(21, b"\x01\x00") * 1000 + hello,
        "a record that is too long": record(22, bytes(20_000), 20_000),
        "empty records": record(22, b"") * 1000 + hello,
        "a hello of 15 MiB": record(22, b"\x01\xf0\x00\x00" + bytes(16_000))
        + record(22, bytes(16_000)) * 20,
    }


def response(server: Post, *messages: bytes) -> bytes:
    """Return everything that the server sends in response to bytes, until it disconnects."""
    received = b""
    with server.plain() as plain, suppress(ConnectionError):
        for message in messages[:-1]:
            plain.sendall(message)
            received += plain.recv(65536)
        plain.sendall(messages[-1])
        with suppress(OSError):  # the server may have disconnected
            plain.shutdown(1)
        while piece := plain.recv(65536):
            received += piece
    return received


@pytest.mark.slow
def test_a_broken_handshake_never_leads_to_a_request(server: Post, parsed: list[bytes]) -> None:
    hello, _ = flights(server)
    for name, data in broken(hello).items():
        assert is_refused(server, parsed, lambda d=data: response(server, d)), name
    chance = random.Random(0)
    for _ in range(200):
        at, bit = chance.randrange(len(hello)), 1 << chance.randrange(8)
        data = hello[:at] + bytes([hello[at] ^ bit]) + hello[at + 1 :]
        assert is_refused(server, parsed, lambda d=data: response(server, d)), (at, bit)
    assert server.ping() == 204


def test_a_recorded_handshake_of_a_client_is_refused(server: Post, parsed: list[bytes]) -> None:
    hello, rest = flights(server)
    assert is_refused(server, parsed, lambda: response(server, hello, rest + record(23, PING)))
    assert server.ping() == 204


@pytest.mark.parametrize(
    "pause", [pytest.param(0.02, id="one byte at a time"), pytest.param(0, id="only its hello")]
)
def test_a_handshake_that_does_not_end_is_given_up(
    server: Post, parsed, monkeypatch, pause
) -> None:
    monkeypatch.setattr(module, "PENDING_SECONDS", 1.0)
    hello, _ = flights(server)

    def trickle() -> None:
        with server.plain() as plain, suppress(ConnectionError):
            for byte in hello:
                plain.sendall(bytes([byte]))
                time.sleep(pause)
            while plain.recv(65536):
                pass

    assert is_refused(server, parsed, trickle)
    assert server.ping() == 204


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_truncated_reply_is_not_accepted(server: Post, size: int) -> None:
    assert server.ping() == 204
    ticket = server.mailbox.send("anna", b"order", 0, 60)
    order = server.mailbox.inboxes["anna"].order
    assert order is not None
    with server.connect() as connection:
        connection.sendall(upload_head(ticket, bytes(size)) + bytes(size // 2))
        wait(lambda: order.received == size // 2)
    wait(lambda: not any(c.requests for c in server.listener.connections.values()))
    assert list(server.mailbox.replies([ticket])) == []
    assert server.mailbox.inboxes["anna"].order is order
    assert server.ping() == 204
