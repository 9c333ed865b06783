"""The keys of a deployment: the server's certificate, and who may take part.

A server keeps a folder of keys:

ca.pem, ca.key           the certificate authority of this deployment; every client trusts it
server.pem, server.key   the server's certificate, signed by it; TLS uses them
clients/NAME.pub         the public key by which the server knows a client

A client gets one file, its kit: its name, ca.pem, and its private key, which the server forgets.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import TypeAdapter, ValidationError

from coterie.data.spec import ClientName
from coterie.errors import CoterieError
from coterie.files import write_bytes, write_folder, write_private

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DAY = timedelta(days=1)
AUTHORITY_LASTS = 3652 * DAY
CERTIFICATE_LASTS = 730 * DAY
KIT_BYTES = 1 << 16
"""A kit is far smaller; of a file that is not one, no more than this is read."""
KIT = re.compile(
    r"#[^\n]*\n"
    r"Client: (?P<name>\S+)\n"
    r"(?P<ca>-----BEGIN CERTIFICATE-----\n.+-----END CERTIFICATE-----\n)"
    r"(?P<key>-----BEGIN PRIVATE KEY-----\n.+-----END PRIVATE KEY-----)\s*",
    re.DOTALL,
)
LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?:{LABEL}\.)*(?![0-9]+$){LABEL}")
"""A DNS name; what ends in a number is an address with a slip in it."""
UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)
"""What cryptography raises for bytes that are not what they should be."""
T = TypeVar("T")
Key = TypeVar("Key", ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)


@dataclass(frozen=True)
class Kit:
    """What a client needs to take part: who it is, whom it trusts, and its own private key."""

    name: str
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
            key = _on_p384(_private_key(found["key"].encode()))
            return cls(_checked(found["name"]), found["ca"].encode(), key)
        except OSError as error:
            raise CoterieError(f"Could not read the kit {path}: {error.strerror}.") from None
        except (*UNREADABLE, CoterieError):
            raise CoterieError(
                f"{path} is not a client's kit; use the file written by `coterie keys add`."
            ) from None

    def encode(self) -> bytes:
        """The kit's file: text that a person can recognise."""
        head = (
            "# A Coterie client's kit. It contains a private key: keep it secret.\nClient: "
            f"{self.name}\n"
        )
        return head.encode() + self.ca + _private_pem(self.key)

    @property
    def public(self) -> bytes:
        """The key by which the server knows the client (PEM, SubjectPublicKeyInfo)."""
        return _public_pem(self.key.public_key())


class Keys:
    """The server's folder of keys.

    Raises CoterieError if the folder is no such folder. Only `certify` needs ca.key, which may
    otherwise be kept elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        self._folder = folder
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
        authority = _authority(authority_key)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _server(key, [*LOOPBACK, *hosts], authority, authority_key)

        def fill(new: Path) -> None:
            (new / "clients").mkdir()
            write_private(new / "ca.key", _private_pem(authority_key))
            write_private(new / "server.key", _private_pem(key))
            write_bytes(new / "ca.pem", _pem(authority))
            write_bytes(new / "server.pem", _pem(certificate))

        write_folder(folder, fill)
        return cls(folder)

    def certify(self, hosts: Sequence[str] = ()) -> None:
        """Renew the server's certificate, for the hosts that it names and these; clients stay."""
        certificate = _server(
            _load(self.key, _private_key),
            [*self.hosts(), *hosts],
            _load(self.ca, x509.load_pem_x509_certificate),
            _load(self._folder / "ca.key", _private_key),
        )
        write_bytes(self.certificate, _pem(certificate))

    def hosts(self) -> list[str]:
        """The names and addresses that the server's certificate is valid for."""
        extensions = _load(self.certificate, x509.load_pem_x509_certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in names]

    def expires(self) -> datetime:
        """When the server's certificate ends (UTC)."""
        return _load(self.certificate, x509.load_pem_x509_certificate).not_valid_after_utc

    def add(self, name: str, out: Path) -> Path:
        """Make a client's key, write its kit to `out`, and register the public key.

        In this order, so that a kill in between leaves at worst a kit that the server refuses, and
        not a client that nobody can be. Raises CoterieError if the name or the file is taken.
        """
        public = self._public(name)
        if public.exists():
            raise CoterieError(
                f"There is already a client {name!r}; choose another name, or remove that "
                f"client with `coterie keys remove {name}`."
            )
        if out.exists():
            raise CoterieError(
                f"{out} already exists; delete it, or choose another file with --out."
            )
        kit = Kit(name, self.ca.read_bytes(), ec.generate_private_key(ec.SECP384R1()))
        write_private(out, kit.encode())
        try:
            write_bytes(public, kit.public)
        except CoterieError:
            out.unlink()
            raise
        return out

    def remove(self, name: str) -> None:
        """Forget a client; raises CoterieError if there is none of that name."""
        try:
            self._public(name).unlink()
        except FileNotFoundError:
            raise CoterieError(
                f"There is no client {name!r} in {self._folder}; `coterie keys list "
                f"{self._folder}` lists all clients."
            ) from None

    def clients(self) -> dict[str, bytes]:
        """Every client's public key (PEM, SubjectPublicKeyInfo), in the order of names."""
        found = {path.stem: path for path in self._clients.glob("[!.]*.pub")}
        return {_checked(name): _load(found[name], _client_pem) for name in sorted(found)}

    def _public(self, name: str) -> Path:
        return self._clients / f"{_checked(name)}.pub"


def fingerprint(public: bytes) -> str:
    """The first 16 hexadecimal digits of a public key's SHA-256, of its DER form.

    public: PEM.
    """
    der = serialization.load_pem_public_key(public).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return sha256(der).hexdigest()[:16]


def _checked(name: str) -> str:
    """A client's name, as a run file may name it; raises CoterieError."""
    try:
        return TypeAdapter(ClientName).validate_python(name)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CoterieError(f"{message[0].upper()}{message[1:]}.") from None


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A certificate authority, signed by itself."""
    name = _named("Coterie certificate authority")
    ends = datetime.now(UTC) + AUTHORITY_LASTS
    builder = _builder(key, name, ends, name, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return builder.add_extension(_usage(authority=True), critical=True).sign(key, hashes.SHA256())


def _server(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """The server's certificate for some hosts; it never outlives the authority."""
    names = dict.fromkeys(map(_host, hosts))
    ends = min(datetime.now(UTC) + CERTIFICATE_LASTS, authority.not_valid_after_utc)
    builder = (
        _builder(key, _named("Coterie server"), ends, authority.subject, authority_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256())


def _builder(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    ends: datetime,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    """What both certificates have; valid since yesterday, for clocks that are behind."""
    public, above = key.public_key(), issuer_key.public_key()
    above_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(above)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - DAY)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(above_identifier, critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(authority: bool) -> x509.KeyUsage:
    """An authority signs certificates, a server its handshakes; and neither does anything else."""
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    """A DNS name or an IP address as certificates name it."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if len(host) <= 253 and HOST.fullmatch(host.lower()):
            return x509.DNSName(host.lower())
    raise CoterieError(
        f"{host!r} is neither a DNS name nor an IP address; give it without protocol and port."
    )


def _load(path: Path, load: Callable[[bytes], T]) -> T:
    try:
        return load(path.read_bytes())
    except UNREADABLE:
        raise CoterieError(
            f"{path} is damaged; it is not a file written by `coterie keys`."
        ) from None


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError
    return key


def _client_pem(pem: bytes) -> bytes:
    """A client's public key, as every library writes it."""
    key = serialization.load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError
    return _public_pem(_on_p384(key))


def _on_p384(key: Key) -> Key:
    """The key, if it is on the curve of clients' keys."""
    if not isinstance(key.curve, ec.SECP384R1):
        raise ValueError
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
