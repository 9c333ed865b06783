"""The keys of a deployment: the server's certificate, and the certificates of the clients.

A server's key folder contains these files:

ca.pem, ca.key           the deployment's certificate authority, which every client trusts
server.pem, server.key   the server's certificate, signed by the authority, and the server's key
clients/NAME.pem         a client's self-signed certificate, by which the server identifies NAME

A client has one key file, with the client's name, the client's certificate, ca.pem, and the
client's private key, of which the server keeps no copy. The server trusts exactly the certificates
in clients/: deleting a file removes the client, and adding a client does not need ca.key.
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
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import CoterieError
from coterie.files import (
    open_regular,
    read_file,
    refuse_special,
    write_bytes,
    write_folder,
    write_private,
)
from coterie.names import client_name
from coterie.network.certificates import (
    LOOPBACK,
    UNREADABLE,
    RegisteredClient,
    authority_certificate,
    client_certificate,
    client_from_pem,
    clock_text,
    on_p384,
    pem,
    private_key,
    private_pem,
    server_certificate,
)

SOON = timedelta(days=30)
"""The period before a certificate's expiry in which the server warns about it."""
MAX_KEY_FILE_BYTES = 1 << 16
"""The maximum number of bytes that are read from a key file; a valid file is much smaller."""
HEADER = "# A Coterie client's key file. It contains a private key: keep it secret."
KEY_FILE = re.compile(
    r"#[^\n]*\n"
    r"Client: (?P<name>\S+)\n"
    r"(?P<certificate>-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n)"
    r"(?P<ca>-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n)"
    r"(?P<key>-----BEGIN PRIVATE KEY-----\n[^-]+-----END PRIVATE KEY-----)\s*"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Credentials:
    """The contents of a client's key file, with which the client takes part in runs."""

    path: Path
    """The key file."""
    name: str
    """The client's name."""
    expires: datetime
    """The time at which the client's certificate expires (UTC)."""
    ca: bytes
    """The certificate of the deployment's certificate authority (PEM)."""
    key: ec.EllipticCurvePrivateKey
    """The client's private key, on NIST P-384."""

    @classmethod
    def load(cls, path: Path) -> "Credentials":
        """Read a key file.

        Raises:
            CoterieError: The file cannot be read, or is not a key file. The message quotes nothing
                from the file, which may contain a private key.
        """
        try:
            with open(open_regular(path), encoding="ascii") as file:
                match = KEY_FILE.fullmatch(file.read(MAX_KEY_FILE_BYTES))
            if match is None:
                raise ValueError
            x509.load_pem_x509_certificate(match["ca"].encode())
            certificate = x509.load_pem_x509_certificate(match["certificate"].encode())
            key = on_p384(private_key(match["key"].encode()))
            if certificate.public_key() != key.public_key():
                raise ValueError
            expires = certificate.not_valid_after_utc
            return cls(path, _validated(match["name"]), expires, match["ca"].encode(), key)
        except OSError as error:
            raise CoterieError(f"Could not read the key file {path}: {error.strerror}.") from None
        except (*UNREADABLE, CoterieError):
            raise CoterieError(
                f"{path} is not a client's key file; use the file written by `coterie keys add`."
            ) from None

    def reload(self) -> "Credentials":
        """Read the key file again, because it may have been replaced.

        Raises:
            CoterieError: The file is not a key file, has expired, or belongs to another client.
        """
        credentials = Credentials.load(self.path)
        if credentials.name != self.name:
            raise CoterieError(
                f"The key file {self.path} belongs to {credentials.name!r}, not {self.name!r}."
            )
        if credentials.expires < datetime.now(UTC):
            raise CoterieError(
                f"The key file {self.path} expired on {credentials.expires:%Y-%m-%d}, by this "
                f"machine's clock; ask the server's operator for a new one (`coterie keys renew "
                f"{self.name}`)."
            )
        return credentials

    def context(self) -> ssl.SSLContext:
        """Return a client's TLS 1.3 context, which trusts only servers of this deployment."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca.decode())
        context.load_cert_chain(self.path)
        return context


class Keys:
    """The server's key folder.

    Only `certify` reads ca.key, which can be stored elsewhere while `certify` is not used.

    Args:
        folder: The folder.

    Raises:
        CoterieError: The folder is not a key folder.
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
        """Create a key folder. If an error occurs, the incomplete folder is deleted.

        Args:
            folder: The folder, which must not exist.
            hosts: The DNS names and IP addresses by which clients on other machines reach the
                server. The certificate is also valid for `LOOPBACK`.

        Raises:
            CoterieError: The folder exists or cannot be written, or a host is neither a DNS name
                nor an IP address.
        """
        if folder.exists():
            raise CoterieError(
                f"{folder} already exists; choose another folder. If it contains keys, renew the "
                f"server's certificate with `coterie keys certify {folder}`; add hosts with --host."
            )
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = authority_certificate(authority_key)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = server_certificate(key, [*LOOPBACK, *hosts], authority, authority_key)

        def fill(temporary: Path) -> None:
            (temporary / "clients").mkdir()
            write_private(temporary / "ca.key", private_pem(authority_key))
            write_private(temporary / "server.key", private_pem(key))
            write_bytes(temporary / "ca.pem", pem(authority))
            write_bytes(temporary / "server.pem", pem(certificate))

        write_folder(folder, fill)
        return cls(folder)

    def certify(self, hosts: Sequence[str] = ()) -> None:
        """Renew the server's certificate. The certificates of clients stay valid.

        Args:
            hosts: DNS names and IP addresses that are added to those of the current certificate.

        Raises:
            CoterieError: A host is neither a DNS name nor an IP address, or a file is damaged.
        """
        certificate = server_certificate(
            _load(self.key, private_key),
            [*self.hosts(), *hosts],
            _load(self.ca, x509.load_pem_x509_certificate),
            _load(self.folder / "ca.key", private_key),
        )
        write_bytes(self.certificate, pem(certificate))

    def hosts(self) -> list[str]:
        """Return the DNS names and IP addresses for which the server's certificate is valid."""
        extensions = _load(self.certificate, x509.load_pem_x509_certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in names]

    def expires(self) -> datetime:
        """Return the time at which the server's certificate expires (UTC)."""
        return _load(self.certificate, x509.load_pem_x509_certificate).not_valid_after_utc

    def remarks(self) -> list[str]:
        """Return a sentence about each certificate that is damaged or expires within `SOON`.

        Raises:
            CoterieError: The server's certificate has expired or is not valid yet.
        """
        now = datetime.now(UTC)
        certificate = _load(self.certificate, x509.load_pem_x509_certificate)
        expires = certificate.not_valid_after_utc
        if expires < now:
            raise CoterieError(
                f"The server's certificate expired on {expires:%Y-%m-%d}, {clock_text()}; renew it "
                f"with `coterie keys certify {self.folder}`."
            )
        if certificate.not_valid_before_utc > now:
            raise CoterieError(
                f"The server's certificate is not valid yet, {clock_text()}; set the clock."
            )
        certificates = {"the server's certificate": (expires, f"certify {self.folder}")}
        clients, faults = self.read_clients()
        for name, client in clients.items():
            command = f"renew {name} --keys {self.folder}"
            certificates[f"the key of {name}"] = (client.expires, command)
        return faults + [
            f"{subject} {'expires' if expires > now else 'expired'} on {expires:%Y-%m-%d}; renew "
            f"it with `coterie keys {command}`"
            for subject, (expires, command) in certificates.items()
            if expires < now + SOON
        ]

    def add(self, name: str, out: Path) -> Path:
        """Generate a client's key, write the key file, and register the client.

        If the process is killed after the key file was written and before the client is registered,
        a key file remains that the server rejects. If the client were registered first, a
        registered client without a key file could remain.

        Args:
            name: The client's name, which must differ from all registered names, not only in case.
            out: The path of the key file to write, which must not exist.

        Returns:
            The path of the key file.

        Raises:
            CoterieError: The name is invalid or registered, or the file cannot be created.
        """
        _validated(name)
        for file in self._certificate_files():
            if file.stem.lower() == name.lower():
                raise CoterieError(
                    f"There is already a client {file.stem!r}; choose another name, or write a new "
                    f"key file for that client with `coterie keys renew {file.stem}`."
                )
        return self._issue(name, out)

    def renew(self, name: str, out: Path) -> Path:
        """Replace a client's key by a new key. The old key becomes invalid.

        Args:
            name: The name of a registered client.
            out: The path of the new key file to write, which must not exist.

        Returns:
            The path of the new key file.

        Raises:
            CoterieError: The client is not registered, or the file exists or cannot be written.
        """
        if not self._certificate_file(name).exists():
            raise self._unknown_client(name)
        return self._issue(name, out)

    def _issue(self, name: str, out: Path) -> Path:
        if out.exists():
            raise CoterieError(
                f"{out} already exists; delete it, or choose another file with --out."
            )
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = pem(client_certificate(name, key))
        header = f"{HEADER}\nClient: {name}\n".encode()
        write_private(out, header + certificate + read_file(self.ca) + private_pem(key))
        try:
            write_bytes(self._certificate_file(name), certificate)
        except CoterieError:
            out.unlink()
            raise
        return out

    def remove(self, name: str) -> None:
        """Remove a client; raise CoterieError if no client has this name."""
        try:
            self._certificate_file(name).unlink()
        except FileNotFoundError:
            raise self._unknown_client(name) from None

    def clients(self) -> dict[str, RegisteredClient]:
        """Return the registered clients by name, in alphabetical order."""
        return self.read_clients()[0]

    def read_clients(self) -> tuple[dict[str, RegisteredClient], list[str]]:
        """Return the registered clients, and a sentence about each file that is ignored.

        Raises:
            OSError: There is no folder of certificates.
        """
        clients, faults = {}, []
        for path in self._certificate_files():
            try:
                client = RegisteredClient(_validated(path.stem), client_from_pem(read_file(path)))
                clients[client.name] = client
            except FileNotFoundError:  # the client was removed meanwhile
                continue
            except (*UNREADABLE, CoterieError, OSError) as error:
                reason = getattr(error, "strerror", None) or "it is damaged, or has a wrong name"
                command = f"coterie keys renew {path.stem} --keys {self.folder}"
                faults.append(f"{path} is ignored ({reason}); replace it with `{command}`")
        return clients, faults

    def state(self) -> object:
        """Return a value that changes when the server's or a client's certificate changes."""
        versions = []
        for path in (self.certificate, *self._certificate_files()):
            with suppress(FileNotFoundError):
                status = path.stat()
                versions.append((path.name, status.st_mtime_ns, status.st_ino))
        return versions

    def server_context(self, clients: Iterable[RegisteredClient]) -> ssl.SSLContext:
        """Return the server's TLS 1.3 context, which trusts only these clients.

        Raises:
            CoterieError: The server's private key does not belong to its certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a resumed TLS session would not present a certificate
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust leaf certificates
        try:
            refuse_special(self.certificate, self.key)
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise CoterieError(
                f"{self.certificate} and {self.key} do not match ({error.reason}); create a "
                f"new certificate with `coterie keys certify {self.folder}`."
            ) from None
        if pems := b"".join(pem(client.certificate) for client in clients):
            context.load_verify_locations(cadata=pems.decode())
        return context

    def _certificate_files(self) -> list[Path]:
        self._clients.stat()  # a missing folder must not look like one without clients
        return sorted(self._clients.glob("[!.]*.pem"), key=lambda path: path.stem)

    def _certificate_file(self, name: str) -> Path:
        return self._clients / f"{_validated(name)}.pem"

    def _unknown_client(self, name: str) -> CoterieError:
        return CoterieError(
            f"There is no client {name!r} in {self.folder}; `coterie keys list {self.folder}` "
            "lists all clients."
        )


def _validated(name: str) -> str:
    """Return the name unchanged; raise CoterieError if it is not a valid name of a client."""
    try:
        return client_name(name)
    except ValueError as error:
        message = str(error)
        raise CoterieError(f"{message[0].upper()}{message[1:]}.") from None


def _load(path: Path, load: Callable[[bytes], T]) -> T:
    try:
        return load(read_file(path))
    except UNREADABLE:
        reason = "it is not a file written by `coterie keys`"
        raise CoterieError(f"{path} is damaged; {reason}.") from None
