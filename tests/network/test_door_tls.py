"""Tricks of TLS: certificates that are nearly right, and handshakes that are not as they should be.

test_door_limits.py has the plain strangers; here is what is made to look like a client.
"""

import random
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra flower is not installed")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from door import Entrance, entrance
from test_door_limits import handshake, turned_away, wait

from coterie.network import door as module
from coterie.network.certificates import client_certificate, pem
from coterie.network.keys import Kit

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
NOW, DAY = datetime.now(UTC), timedelta(days=1)
ANNA, AUTHORITY = "Coterie client anna", "Coterie certificate authority"
ASK = b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entrance]:
    with entrance(tmp_path_factory.mktemp("door"), 40_000_000) as made:
        yield made


def certificate(
    key: Private,
    name: str = ANNA,
    issuer: tuple[str, Private] | None = None,
    begins: datetime = NOW - DAY,
    authority: bool = False,
) -> bytes:
    """A certificate (PEM); signed by itself without an issuer, who is a name and a key."""
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


def impostors(anna: Kit, registered: bytes) -> dict[str, tuple[Private, bytes]]:
    """A private key, and the certificates that are shown with it."""
    mine, other = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    edward = ed25519.Ed25519PrivateKey.generate()
    small, large = (rsa.generate_private_key(65537, bits) for bits in (1024, 4096))
    return {
        "anna's name": (mine, certificate(mine)),
        "anna's name, as a kit has it": (mine, pem(client_certificate("anna", mine))),
        "anna's key in another certificate": (anna.key, certificate(anna.key)),
        "anna's key under another name": (anna.key, certificate(anna.key, "Coterie client bob")),
        "anna's key, not valid yet": (anna.key, certificate(anna.key, begins=NOW + DAY)),
        "signed by anna": (
            mine,
            certificate(mine, "Coterie client bob", (ANNA, anna.key)) + registered,
        ),
        "anna's certificate beside it": (mine, certificate(mine) + registered),
        "as if signed by anna": (mine, certificate(mine, issuer=(ANNA, other)) + registered),
        "signed by an authority of the same name": (
            mine,
            certificate(mine, issuer=(AUTHORITY, other))
            + certificate(other, AUTHORITY, authority=True),
        ),
        "an authority": (mine, certificate(mine, authority=True)),
        "Ed25519": (edward, certificate(edward)),
        "RSA of 1,024 bits": (small, certificate(small)),
        "RSA of 4,096 bits": (large, certificate(large)),
        "a long chain": (mine, certificate(mine) + 60 * certificate(other, AUTHORITY)),
    }


def test_no_certificate_that_looks_like_a_clients_is_taken_for_one(entry: Entrance) -> None:
    registered = pem(entry.keys.clients()["anna"].certificate)
    anna = Kit.load(entry.folder / "anna.key")
    for what, (key, shown) in impostors(anna, registered).items():
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (entry.folder / "impostor.pem").write_bytes(shown + private)
        context = ssl.create_default_context(cafile=entry.keys.ca)
        context.set_ciphers("ALL:@SECLEVEL=0")  # the server decides
        context.load_cert_chain(entry.folder / "impostor.pem")
        assert turned_away(entry, context), what
    assert handshake(entry, entry.context()).startswith(b"HTTP/1.1 200")


def test_every_connection_shows_its_certificate(entry: Entrance) -> None:
    context = entry.context()
    with entry.connect(context) as connection:
        connection.sendall(ASK)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        session = connection.session
    plain = socket.create_connection(("127.0.0.1", entry.port), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost", session=session) as again:
        assert not again.session_reused


def flights(entry: Entrance) -> tuple[bytes, bytes]:
    """What anna's TLS sends first, and what in answer to the server's part: certificate and all."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = entry.context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain:
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        first = outgoing.read()
        plain.sendall(first)
        while True:
            incoming.write(plain.recv(65536))
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                return first, outgoing.read()


def record(kind: int, body: bytes, length: int | None = None) -> bytes:
    """A record of TLS."""
    size = len(body) if length is None else length
    return bytes([kind, 3, 3]) + size.to_bytes(2, "big") + body


def broken(hello: bytes) -> dict[str, bytes]:
    """What is sent instead of a handshake, or after its beginning."""
    return {
        "HTTP": ASK,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "a line of the PROXY protocol": b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n" + hello,
        "a hello of SSL 2": bytes.fromhex("802e0100020015000000100100800200800300800400800500"),
        "half a hello": hello[: len(hello) // 2],
        "a hello twice": hello + hello,
        "a hello, then a request in the clear": hello + record(23, ASK),
        "a request in a record": record(23, ASK),
        "a heartbeat": record(24, b"\x01\x40\x00"),
        "a thousand warnings": record(21, b"\x01\x00") * 1000 + hello,
        "a record that is too long": record(22, bytes(20_000), 20_000),
        "empty records": record(22, b"") * 1000 + hello,
        "a hello of 15 MiB": record(22, b"\x01\xf0\x00\x00" + bytes(16_000))
        + record(22, bytes(16_000)) * 20,
    }


def answer(entry: Entrance, data: bytes) -> bytes:
    """All that comes for some bytes, sent as they are, until the other side hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain:
        with suppress(OSError):
            plain.sendall(data)
            plain.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while piece := plain.recv(65536):
                found += piece
    return found


@pytest.mark.slow
def test_no_broken_handshake_comes_to_a_request(entry: Entrance) -> None:
    hello, _ = flights(entry)
    before = len(entry.upstream.seen)
    for what, data in broken(hello).items():
        entry.door.refusals.clear()
        assert b"HTTP" not in answer(entry, data), what
    chance = random.Random(0)
    for _ in range(200):
        entry.door.refusals.clear()
        at, bit = chance.randrange(len(hello)), 1 << chance.randrange(8)
        assert b"HTTP" not in answer(entry, hello[:at] + bytes([hello[at] ^ bit]) + hello[at + 1 :])
    assert len(entry.upstream.seen) == before
    entry.door.refusals.clear()
    assert handshake(entry, entry.context()).startswith(b"HTTP/1.1 200")


def test_what_anna_sent_once_lets_nobody_in_again(entry: Entrance) -> None:
    hello, rest = flights(entry)
    with socket.create_connection(("127.0.0.1", entry.port), timeout=20) as plain:
        plain.sendall(hello)
        assert plain.recv(100)
        plain.sendall(rest)  # her certificate and signature, of another handshake
        plain.settimeout(20)
        with suppress(ConnectionResetError):
            while piece := plain.recv(65536):
                assert b"HTTP" not in piece
    entry.door.refusals.clear()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["one byte at a time", "nothing after the hello"])
def test_a_handshake_takes_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: str
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 1.0)
    with entrance(tmp_path, 1000) as entry:
        hello, _ = flights(entry)
        pause = 0.02 if pieces == "one byte at a time" else 0
        plain = socket.create_connection(("127.0.0.1", entry.port), timeout=20)
        with plain, suppress(OSError):
            for byte in hello:
                plain.sendall(bytes([byte]))
                time.sleep(pause)
            while plain.recv(65536):
                pass
        wait(lambda: not entry.door.handshakes)
        assert handshake(entry, entry.context()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_body_that_is_cut_off_is_not_taken_for_a_whole_one(entry: Entrance, size: int) -> None:
    entry.upstream.seen.clear()
    with entry.connect() as connection:
        head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % size + bytes(size // 2))
    time.sleep(0.5)
    assert [len(seen.body) for seen in entry.upstream.seen] in ([], [size // 2])
    assert handshake(entry, entry.context()).startswith(b"HTTP/1.1 200")
