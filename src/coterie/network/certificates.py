"""Creates and parses the certificates (X.509) and private keys of a deployment, in PEM."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.errors import CoterieError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DAY = timedelta(days=1)
AUTHORITY_LASTS = 3652 * DAY
"""The validity of the certificate authority."""
CERTIFICATE_LASTS = 730 * DAY
"""The validity of the server's and the clients' certificates."""
UNREADABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
"""The exceptions of `cryptography` for bytes that are not a valid certificate or key."""
LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?:{LABEL}\.)*(?![0-9]+$){LABEL}")
"""A DNS name. Its last label is not a number: 192.0.2.300 is a mistyped address, not a name."""
Key = TypeVar("Key", ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)


@dataclass(frozen=True)
class RegisteredClient:
    """A client whose certificate the server accepts."""

    name: str
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the certificate's SHA-256."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()[:16]

    @property
    def expires(self) -> datetime:
        """The time at which the certificate expires (UTC)."""
        return self.certificate.not_valid_after_utc


def authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return a self-signed certificate of a certificate authority."""
    name = _common_name("Coterie certificate authority")
    expires = datetime.now(UTC) + AUTHORITY_LASTS
    return _signed(key, name, expires, name, key, authority=True)


def server_certificate(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Return a certificate for the server, which expires no later than the authority's certificate.

    Args:
        key: The server's private key.
        hosts: The DNS names and IP addresses of the server.
        authority: The certificate of the authority that signs.
        authority_key: The authority's private key.

    Raises:
        CoterieError: A host is neither a DNS name nor an IP address.
    """
    names = dict.fromkeys(map(_general_name, hosts))
    expires = min(datetime.now(UTC) + CERTIFICATE_LASTS, authority.not_valid_after_utc)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    extensions = usage, x509.SubjectAlternativeName(names)
    subject = _common_name("Coterie server")
    return _signed(key, subject, expires, authority.subject, authority_key, *extensions)


def client_certificate(name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return a self-signed certificate for a client.

    Args:
        name: The client's name.
        key: The client's private key.
    """
    subject = _common_name(f"Coterie client {name}")
    expires = datetime.now(UTC) + CERTIFICATE_LASTS
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return _signed(key, subject, expires, subject, key, usage)


def _signed(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    expires: datetime,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
    authority: bool = False,
) -> x509.Certificate:
    """Return a signed certificate with the fields and extensions that all certificates have.

    The validity begins a day ago, so that machines whose clocks are slow accept the certificate.
    An authority's key signs only certificates, and all other keys sign only TLS handshakes.

    Args:
        key: The private key that belongs to the certificate.
        subject: The owner of the certificate.
        expires: The end of the certificate's validity.
        issuer: The owner of the key that signs.
        issuer_key: The private key that signs.
        *extensions: Further extensions, which are not critical.
        authority: Whether the certificate belongs to a certificate authority.
    """
    public_key = key.public_key()
    issuer_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    key_usage = x509.KeyUsage(
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
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - DAY)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(issuer_identifier, critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(key_usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    """Convert a DNS name or an IP address to the type that a certificate's extension needs.

    Raises:
        CoterieError: The host is neither a DNS name nor an IP address.
    """
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if len(host) <= 253 and HOST.fullmatch(host.lower()):
            return x509.DNSName(host.lower())
    raise CoterieError(
        f"{host!r} is neither a DNS name nor an IP address; give it without protocol and port."
    )


def private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Parse a private key.

    Raises:
        ValueError: The key is not on an elliptic curve. If the bytes are not a private key, any of
            the exceptions in `coterie.network.keys.UNREADABLE` may be raised.
    """
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError
    return key


def client_from_pem(pem: bytes) -> x509.Certificate:
    """Parse a client's certificate.

    Raises:
        ValueError: The certificate's key is not on NIST P-384. If the bytes are not a certificate,
            any of the exceptions in `coterie.network.keys.UNREADABLE` may be raised.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError
    on_p384(key)
    return certificate


def on_p384(key: Key) -> Key:
    """Return the key if it is on NIST P-384, the curve of clients' keys; else raise ValueError."""
    if not isinstance(key.curve, ec.SECP384R1):
        raise ValueError
    return key


def pem(certificate: x509.Certificate) -> bytes:
    """Serialise a certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Serialise a private key in PEM (PKCS #8), without encryption."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def clock_text() -> str:
    """Return a phrase with the current time, for messages about certificates' validity periods."""
    return f"by this machine's clock, which says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
