"""Clients obey orders that the server of their deployment has signed, and no others."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.messages import MessageError
from coterie.network import certificates
from coterie.network.flower import fleet
from coterie.network.keys import Keys, Kit
from coterie.network.signature import SIZES, signed, verified

ORDER = b"an order" * 100


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys.create(tmp_path / "keys")
    keys.add("anna", tmp_path / "anna.key")
    return keys


@pytest.fixture
def authority(keys: Keys, tmp_path: Path) -> bytes:
    return Kit.load(tmp_path / "anna.key").ca


def test_what_the_server_signed_is_taken_also_after_its_certificate_was_renewed(
    keys, authority
) -> None:
    assert verified(authority, signed(keys, ORDER)) == ORDER
    keys.certify(["new.example.org"])
    assert verified(authority, signed(keys, ORDER)) == ORDER
    assert verified(authority, signed(keys, b"")) == b""


def test_no_flipped_bit_and_no_part_of_it_is_taken(keys, authority) -> None:
    data = signed(keys, ORDER)
    changed = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(len(data))]
    # Of the certificate, only what its own signature covers says anything.
    for one in [*changed, *(data[:end] for end in range(0, len(data), 7)), data + b"x", b""]:
        try:
            found = verified(authority, one)
        except MessageError:
            continue
        assert found == ORDER


def by_a_client(keys: Keys, tmp_path: Path) -> bytes:
    """With a kit's own key and certificate."""
    lines = (tmp_path / "anna.key").read_bytes()
    kit = Kit.load(tmp_path / "anna.key")
    (tmp_path / "own.pem").write_bytes(pem_of(x509.load_pem_x509_certificate(lines)))
    (tmp_path / "own.key").write_bytes(certificates.private_pem(kit.key))
    own = Mock(certificate=tmp_path / "own.pem", key=tmp_path / "own.key")
    return signed(own, ORDER)


def by_another_deployment(keys: Keys, tmp_path: Path) -> bytes:
    return signed(Keys.create(tmp_path / "elsewhere"), ORDER)


def with_anothers_certificate(keys: Keys, tmp_path: Path) -> bytes:
    """The certificate is the server's, and the key is not."""
    other = Keys.create(tmp_path / "elsewhere")
    return signed(Mock(certificate=keys.certificate, key=other.key), ORDER)


def with_the_authoritys_key(keys: Keys, tmp_path: Path) -> bytes:
    """Signed by the authority itself, whose certificate is not a server's."""
    return signed(Mock(certificate=keys.ca, key=keys.folder / "ca.key"), ORDER)


def expired(keys: Keys, tmp_path: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
        keys.certify()
    return signed(keys, ORDER)


def unsigned(keys: Keys, tmp_path: Path) -> bytes:
    return ORDER


def without_certificate(keys: Keys, tmp_path: Path) -> bytes:
    return SIZES.pack(0, 0) + ORDER


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "forged",
    [
        *(by_a_client, by_another_deployment, with_anothers_certificate, with_the_authoritys_key),
        *(expired, unsigned, without_certificate),
    ],
)
def test_nobody_elses_signature_is_taken(forged, keys, authority, tmp_path) -> None:
    data = forged(keys, tmp_path)
    with pytest.raises(MessageError, match="not signed by the server of this deployment"):
        verified(authority, data)


def test_a_client_that_gets_an_order_of_another_sender_does_not_obey(
    keys, authority, tmp_path, monkeypatch
) -> None:
    worker = Mock()
    found = Mock(messages_list=[Mock()], message_object_trees=[Mock()])
    client = Mock(PullMessages=Mock(return_value=found))
    connection = fleet.Connection(client, Mock(), authority)
    monkeypatch.setattr(fleet, "PullMessagesRequest", Mock())
    monkeypatch.setattr(fleet, "fetch", Mock())
    monkeypatch.setattr(fleet, "unpack", lambda _: ORDER)
    assert connection._one(worker)
    worker.answer.assert_not_called()
    monkeypatch.setattr(fleet, "unpack", lambda _: signed(keys, ORDER))
    assert connection.pull() is not None
