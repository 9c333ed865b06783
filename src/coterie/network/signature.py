"""The server's signature under its orders, which clients check before they obey.

Flower delivers what any node of a run sends to another whose number it knows. TLS ends at the door,
so the sender is known by this alone.
"""

import struct
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from coterie.messages import MessageError
from coterie.network.certificates import private_key
from coterie.network.keys import UNREADABLE, Keys

SIZES = struct.Struct(">HH")
"""Of the certificate (DER) and of the signature, which stand before the order."""
HOW = ec.ECDSA(hashes.SHA256())
PURPOSE = b"coterie order\0"
"""Stands before what is signed: no other use of the server's key signs the same."""


def signed(keys: Keys, order: bytes) -> bytes:
    """An order with the server's certificate and signature."""
    certificate = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    shown = certificate.public_bytes(serialization.Encoding.DER)
    signature = private_key(keys.key.read_bytes()).sign(PURPOSE + order, HOW)
    return SIZES.pack(len(shown), len(signature)) + shown + signature + order


def verified(authority: bytes, data: bytes) -> bytes:
    """The order in what `signed` made.

    authority: the certificate (PEM) of the deployment's certificate authority. Raises MessageError
    if the signature is not that of a server with a valid certificate from it.
    """
    try:
        certificate_size, signature_size = SIZES.unpack_from(data)
        end = SIZES.size + certificate_size
        certificate = x509.load_der_x509_certificate(data[SIZES.size : end])
        signature, order = data[end : end + signature_size], data[end + signature_size :]
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        now = datetime.now(UTC)
        valid = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
        key = certificate.public_key()
        if (
            not valid
            or ExtendedKeyUsageOID.SERVER_AUTH not in usage
            or not isinstance(key, ec.EllipticCurvePublicKey)
        ):
            raise ValueError
        key.verify(signature, PURPOSE + order, HOW)
    except (*UNREADABLE, struct.error, InvalidSignature) as error:
        raise MessageError("The order was not signed by the server of this deployment.") from error
    return order
