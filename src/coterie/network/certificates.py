"""Certificates and keys of a deployment, made and read: X.509 on NIST curves, in PEM."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.errors import CoterieError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DAY = timedelta(days=1)
AUTHORITY_LASTS = 3652 * DAY
CERTIFICATE_LASTS = 730 * DAY
LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?:{LABEL}\.)*(?![0-9]+$){LABEL}")
"""A DNS name; what ends in a number is an address with a slip in it."""
Key = TypeVar("Key", ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)


def authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A certificate authority, signed by itself."""
    name = _named("Coterie certificate authority")
    ends = datetime.now(UTC) + AUTHORITY_LASTS
    builder = _builder(key, name, ends, name, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return builder.add_extension(_usage(authority=True), critical=True).sign(key, hashes.SHA256())


def server_certificate(
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


def client_certificate(name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A client's certificate, signed by itself."""
    named, ends = _named(f"Coterie client {name}"), datetime.now(UTC) + CERTIFICATE_LASTS
    builder = (
        _builder(key, named, ends, named, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    return builder.sign(key, hashes.SHA256())


def _builder(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    ends: datetime,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    """What all certificates have; valid since yesterday, for clocks that are behind."""
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


def private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """A private key; raises one of cryptography's errors, or ValueError, if it is none."""
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError
    return key


def client_from_pem(pem: bytes) -> x509.Certificate:
    """A client's certificate, with a key on the curve of clients' keys."""
    certificate = x509.load_pem_x509_certificate(pem)
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError
    on_p384(key)
    return certificate


def on_p384(key: Key) -> Key:
    """The key, if it is on the curve of clients' keys."""
    if not isinstance(key.curve, ec.SECP384R1):
        raise ValueError
    return key


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as text (PKCS #8), not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as text (SubjectPublicKeyInfo), as Flower has it."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
