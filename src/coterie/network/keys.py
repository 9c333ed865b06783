"""The keys of a deployment: the server's certificate, and who may take part.

A server keeps a folder of keys:

ca.pem, ca.key           the certificate authority of this deployment; every client trusts it
server.pem, server.key   the server's certificate, signed by it; TLS uses them
clients/NAME.pem         the certificate by which the server knows a client, signed by itself

A client gets one file, its kit: its name, its certificate, ca.pem, and its private key, which the
server forgets. The server trusts exactly the certificates in clients/, so that a client ends with
its file, and adding one needs no ca.key.
"""

import re
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import TypeAdapter, ValidationError

from coterie.errors import CoterieError
from coterie.files import ClientName, write_bytes, write_folder, write_private
from coterie.network.certificates import (
    LOOPBACK,
    authority_certificate,
    client_certificate,
    client_from_pem,
    on_p384,
    pem,
    private_key,
    private_pem,
    public_pem,
    server_certificate,
)

SOON = timedelta(days=30)
"""How long before the end of a certificate the server begins to speak of it."""
KIT_BYTES = 1 << 16
"""A kit is far smaller; of a file that is not one, no more than this is read."""
HEAD = "# A Coterie client's kit. It contains a private key: keep it secret."
KIT = re.compile(
    r"#[^\n]*\n"
    r"Client: (?P<name>\S+)\n"
    r"(?P<certificate>-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n)"
    r"(?P<ca>-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n)"
    r"(?P<key>-----BEGIN PRIVATE KEY-----\n[^-]+-----END PRIVATE KEY-----)\s*"
)
UNREADABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
"""What cryptography raises for bytes that are not what they should be."""
T = TypeVar("T")


@dataclass(frozen=True)
class Kit:
    """What a client needs to take part: who it is, whom it trusts, and its own key."""

    path: Path
    """The file that it was read from, from which TLS reads it again."""
    name: str
    expires: datetime
    """When its certificate ends (UTC)."""
    ca: bytes
    """The certificate authority's certificate, PEM."""
    key: ec.EllipticCurvePrivateKey
    """On NIST P-384."""

    @classmethod
    def load(cls, path: Path) -> "Kit":
        """Read a kit; raises CoterieError, which never shows what the file holds."""
        try:
            with path.open(encoding="ascii") as file:
                found = KIT.fullmatch(file.read(KIT_BYTES))
            if found is None:
                raise ValueError
            x509.load_pem_x509_certificate(found["ca"].encode())
            certificate = x509.load_pem_x509_certificate(found["certificate"].encode())
            key = on_p384(private_key(found["key"].encode()))
            if certificate.public_key() != key.public_key():
                raise ValueError
            expires = certificate.not_valid_after_utc
            return cls(path, _checked(found["name"]), expires, found["ca"].encode(), key)
        except OSError as error:
            raise CoterieError(f"Could not read the key file {path}: {error.strerror}.") from None
        except (*UNREADABLE, CoterieError):
            raise CoterieError(
                f"{path} is not a client's key file; use the file written by `coterie keys add`."
            ) from None

    def again(self) -> "Kit":
        """The kit as it is now; raises CoterieError if it has expired or is another client's."""
        kit = Kit.load(self.path)
        if kit.name != self.name:
            raise CoterieError(
                f"The key file {self.path} belongs to {kit.name!r}, not {self.name!r}."
            )
        if kit.expires < datetime.now(UTC):
            raise CoterieError(
                f"The key file {self.path} expired on {kit.expires:%Y-%m-%d}, by this machine's "
                f"clock; ask for a new one, which `coterie keys renew {self.name}` writes on the "
                "server."
            )
        return kit

    @property
    def public(self) -> bytes:
        """The key by which the server knows the client (PEM, SubjectPublicKeyInfo)."""
        return public_pem(self.key.public_key())

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 as this client, with servers of this deployment alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca.decode())
        context.load_cert_chain(self.path)
        return context


@dataclass(frozen=True)
class Registered:
    """A client as the server knows it."""

    name: str
    certificate: x509.Certificate

    @property
    def public(self) -> bytes:
        """Its public key (PEM, SubjectPublicKeyInfo)."""
        return self.certificate.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the certificate's SHA-256."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()[:16]

    @property
    def expires(self) -> datetime:
        """When its certificate ends (UTC)."""
        return self.certificate.not_valid_after_utc


class Keys:
    """The server's folder of keys.

    Raises CoterieError if the folder is no such folder. Only `certify` needs ca.key, which may
    otherwise be kept elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        self.folder = folder
        self._clients = folder / "clients"
        files = (self.ca, self.certificate, self.key)
        if not (self._clients.is_dir() and all(file.is_file() for file in files)):
            raise CoterieError(
                f"{folder} is not a server's key folder; create one with `coterie keys init "
                f"{folder}`."
            )

    @classmethod
    def create(cls, folder: Path, hosts: Sequence[str] = ()) -> "Keys":
        """A new folder of keys, whole or not at all.

        hosts: names and addresses, beside this machine's own, by which clients reach the server.
        Raises CoterieError if the folder exists or a host is neither a name nor an address.
        """
        if folder.exists():
            raise CoterieError(
                f"{folder} already exists; choose another folder. If it contains keys, use "
                f"`coterie keys certify {folder}` to renew their certificate or add hosts."
            )
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = authority_certificate(authority_key)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = server_certificate(key, [*LOOPBACK, *hosts], authority, authority_key)

        def fill(new: Path) -> None:
            (new / "clients").mkdir()
            write_private(new / "ca.key", private_pem(authority_key))
            write_private(new / "server.key", private_pem(key))
            write_bytes(new / "ca.pem", pem(authority))
            write_bytes(new / "server.pem", pem(certificate))

        write_folder(folder, fill)
        return cls(folder)

    def certify(self, hosts: Sequence[str] = ()) -> None:
        """Renew the server's certificate, for the hosts that it names and these; clients stay."""
        certificate = server_certificate(
            _load(self.key, private_key),
            [*self.hosts(), *hosts],
            _load(self.ca, x509.load_pem_x509_certificate),
            _load(self.folder / "ca.key", private_key),
        )
        write_bytes(self.certificate, pem(certificate))

    def hosts(self) -> list[str]:
        """The names and addresses that the server's certificate is valid for."""
        extensions = _load(self.certificate, x509.load_pem_x509_certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in names]

    def expires(self) -> datetime:
        """When the server's certificate ends (UTC)."""
        return _load(self.certificate, x509.load_pem_x509_certificate).not_valid_after_utc

    def remarks(self) -> list[str]:
        """Certificates that end soon, a sentence each; raises CoterieError if the server's is not
        valid now."""
        now = datetime.now(UTC)
        certificate = _load(self.certificate, x509.load_pem_x509_certificate)
        end = certificate.not_valid_after_utc
        clock = f"by this machine's clock, which says {now:%Y-%m-%d %H:%M} UTC"
        if end < now:
            raise CoterieError(
                f"The server's certificate expired on {end:%Y-%m-%d}, {clock}; renew it with "
                f"`coterie keys certify {self.folder}`."
            )
        if certificate.not_valid_before_utc > now:
            raise CoterieError(
                f"The server's certificate is not valid yet, {clock}; set the clock."
            )
        ends = {"the server's certificate": (end, f"certify {self.folder}")}
        for name, client in self.clients().items():
            ends[f"the key of {name}"] = client.expires, f"renew {name} --keys {self.folder}"
        return [
            f"{what} {'ends' if end > now else 'ended'} on {end:%Y-%m-%d}; renew it, at any time, "
            f"with `coterie keys {how}`"
            for what, (end, how) in ends.items()
            if end < now + SOON
        ]

    def add(self, name: str, out: Path) -> Path:
        """Make a client's key, write its kit to `out`, and register the public key.

        In this order, so that a kill in between leaves at worst a kit that the server refuses, and
        not a client that nobody can be. Raises CoterieError if the name or the file is taken.
        """
        if self._file(name).exists():
            raise CoterieError(
                f"There is already a client {name!r}; choose another name, or write a new key "
                f"file for that client with `coterie keys renew {name}`."
            )
        return self._make(name, out)

    def renew(self, name: str, out: Path) -> Path:
        """Make a client's key and kit anew; the server then accepts this kit and no older one.

        Raises CoterieError if there is no such client or the file is taken.
        """
        if not self._file(name).exists():
            raise self._nobody(name)
        return self._make(name, out)

    def _make(self, name: str, out: Path) -> Path:
        if out.exists():
            raise CoterieError(
                f"{out} already exists; delete it, or choose another file with --out."
            )
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = pem(client_certificate(name, key))
        head = f"{HEAD}\nClient: {name}\n".encode()
        write_private(out, head + certificate + self.ca.read_bytes() + private_pem(key))
        try:
            write_bytes(self._file(name), certificate)
        except CoterieError:
            out.unlink()
            raise
        return out

    def remove(self, name: str) -> None:
        """Forget a client; raises CoterieError if there is none of that name."""
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            raise self._nobody(name) from None

    def clients(self) -> dict[str, Registered]:
        """Every client, in the order of names."""
        found = {}
        for path in sorted(self._clients.glob("[!.]*.pem"), key=lambda path: path.stem):
            with suppress(FileNotFoundError):  # removed meanwhile
                name = _checked(path.stem)
                found[name] = Registered(name, _load(path, client_from_pem))
        return found

    def state(self) -> object:
        """What changes when a certificate here changes."""
        found = []
        for path in (self.certificate, *sorted(self._clients.glob("[!.]*.pem"))):
            with suppress(FileNotFoundError):
                about = path.stat()
                found.append((path.name, about.st_mtime_ns, about.st_ino))
        return found

    def door(self, clients: Iterable[Registered]) -> ssl.SSLContext:
        """TLS 1.3 as this server, with these clients alone; raises CoterieError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a session that is resumed would not show its certificate again
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # certificates, not authorities
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise CoterieError(
                f"{self.certificate} and {self.key} do not belong together ({error.reason}); make "
                f"a certificate with `coterie keys certify {self.folder}`."
            ) from None
        if pems := b"".join(pem(client.certificate) for client in clients):
            context.load_verify_locations(cadata=pems.decode())
        return context

    def _file(self, name: str) -> Path:
        return self._clients / f"{_checked(name)}.pem"

    def _nobody(self, name: str) -> CoterieError:
        return CoterieError(
            f"There is no client {name!r} in {self.folder}; `coterie keys list {self.folder}` "
            "lists all clients."
        )


def _checked(name: str) -> str:
    """A client's name, as a run file may name it; raises CoterieError."""
    try:
        return TypeAdapter(ClientName).validate_python(name)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CoterieError(f"{message[0].upper()}{message[1:]}.") from None


def _load(path: Path, load: Callable[[bytes], T]) -> T:
    try:
        return load(path.read_bytes())
    except UNREADABLE:
        raise CoterieError(
            f"{path} is damaged; it is not a file written by `coterie keys`."
        ) from None
