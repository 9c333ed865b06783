"""A deployment's keys: the server's certificate, and the clients' key files."""

import os
import socket
import ssl
import stat
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import CoterieError
from coterie.network import certificates
from coterie.network import keys as keys_module
from coterie.network.keys import Credentials, Keys

HOSTS = ("localhost", "127.0.0.1", "::1", "coterie.example.org", "192.0.2.7")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.create(tmp_path / "keys", ["coterie.example.org", "192.0.2.7"])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def public_key(credentials: Credentials) -> ec.EllipticCurvePublicKey:
    return credentials.key.public_key()


def registered(keys: Keys) -> dict[str, object]:
    """Return the public keys of the registered clients by name."""
    return {name: client.certificate.public_key() for name, client in keys.clients().items()}


def shake_hands(server: Keys, trusted: Path, host: str) -> None:
    """Perform a TLS handshake on loopback; raise what the client's side raises."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server.certificate, server.key)
    context = ssl.create_default_context(cafile=trusted)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT

    def serve() -> None:
        connection, _ = listener.accept()
        connection.settimeout(30)
        try:
            with ours.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(b"welcome")
        except (ssl.SSLError, OSError):
            connection.close()  # the client has hung up

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=30) as plain,
                context.wrap_socket(plain, server_hostname=host) as secured,
            ):
                assert secured.recv(7) == b"welcome"
        finally:
            thread.join()


@pytest.mark.parametrize("host", [*HOSTS, "elsewhere.example.org", "192.0.2.8"])
def test_the_certificate_is_for_its_hosts_only(host, keys) -> None:
    refused = pytest.raises(ssl.SSLCertVerificationError, match="mismatch")
    with nullcontext() if host in HOSTS else refused:
        shake_hands(keys, keys.ca, host)


def test_a_client_that_trusts_another_authority_does_not_connect(keys, tmp_path) -> None:
    other = Keys.create(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(keys, other.ca, "localhost")


def test_no_certificate_is_valid_for_longer_than_it_should_be(keys) -> None:
    now, day = datetime.now(UTC), timedelta(days=1)
    authority = x509.load_pem_x509_certificate(keys.ca.read_bytes())
    assert abs(authority.not_valid_after_utc - now - 3652 * day) < day
    assert abs(keys.expires() - now - 730 * day) < day


def test_a_server_can_not_sign_certificates(keys) -> None:
    certificate = x509.load_pem_x509_certificate(keys.certificate.read_bytes()).extensions
    assert not certificate.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_private_keys_are_for_their_owner_and_certificates_for_all(keys, tmp_path) -> None:
    folder = tmp_path / "keys"
    before = {path.name for path in folder.rglob("*")}
    key_file = keys.add("anna", tmp_path / "anna.key")
    assert {path.name for path in folder.rglob("*")} - before == {"anna.pem"}
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "anna.key"}
    for private in (folder / "ca.key", keys.key, key_file):
        assert mode(private) == 0o600
    for public in (keys.ca, keys.certificate, folder / "clients" / "anna.pem"):
        assert mode(public) & 0o400
        assert b"PRIVATE" not in public.read_bytes()


def test_a_key_file_holds_what_its_client_needs(keys, tmp_path) -> None:
    assert keys.add("anna", tmp_path / "anna.key") == tmp_path / "anna.key"
    credentials = Credentials.load(tmp_path / "anna.key")
    assert (credentials.name, credentials.ca) == ("anna", keys.ca.read_bytes())
    assert isinstance(credentials.key.curve, ec.SECP384R1)
    signature = credentials.key.sign(b"it is me", ec.ECDSA(hashes.SHA256()))
    public = keys.clients()["anna"].certificate.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    public.verify(signature, b"it is me", ec.ECDSA(hashes.SHA256()))


def test_a_key_file_survives_a_way_that_changes_line_ends(keys, tmp_path) -> None:
    path = keys.add("anna", tmp_path / "anna.key")
    sent = tmp_path / "sent.key"
    sent.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert public_key(Credentials.load(sent)) == public_key(Credentials.load(path))
    Credentials.load(sent).context()


def test_clients_are_in_the_order_of_their_names(keys, tmp_path) -> None:
    names = ["b", "a-b", "a", "a.b", "_", "Z"]
    credentials = {
        name: Credentials.load(keys.add(name, tmp_path / f"{name}.key")) for name in names
    }
    entries = Keys(tmp_path / "keys").clients()
    assert list(entries) == sorted(names)
    assert registered(keys) == {name: public_key(c) for name, c in credentials.items()}
    assert len({client.fingerprint for client in entries.values()}) == len(names)


def test_a_removed_client_is_forgotten_and_may_come_back_with_another_key(keys, tmp_path) -> None:
    old = Credentials.load(keys.add("anna", tmp_path / "anna.key"))
    keys.add("ben", tmp_path / "ben.key")
    keys.remove("anna")
    assert list(keys.clients()) == ["ben"]
    new = Credentials.load(keys.add("anna", tmp_path / "new.key"))
    assert registered(keys)["anna"] == public_key(new) != public_key(old)


@pytest.mark.parametrize("name", ["", "../anna", "a/b", ".anna", "-a", "two words", "a" * 65])
def test_a_name_that_a_run_file_could_not_have_is_refused(name, keys, tmp_path) -> None:
    for act in (lambda: keys.add(name, tmp_path / "ben.key"), lambda: keys.remove(name)):
        with pytest.raises(CoterieError, match="must consist of 1 to 64 characters"):
            act()
    assert not (tmp_path / "ben.key").exists()


def test_what_is_there_is_never_overwritten(keys, tmp_path) -> None:
    path = keys.add("anna", tmp_path / "anna.key")
    before, client = path.read_bytes(), keys.clients()
    with pytest.raises(CoterieError, match="There is already a client 'anna'"):
        keys.add("anna", tmp_path / "again.key")
    with pytest.raises(CoterieError, match="already exists; delete it, or"):
        keys.add("ben", path)
    with pytest.raises(CoterieError, match="already exists; choose another folder"):
        Keys.create(tmp_path / "keys")
    assert (path.read_bytes(), keys.clients()) == (before, client)
    assert not (tmp_path / "again.key").exists()


def test_a_stop_before_the_registration_can_be_mended(keys, tmp_path, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    key_file = tmp_path / "anna.key"
    with monkeypatch.context() as patch:
        patch.setattr(keys_module, "write_bytes", stop)
        with pytest.raises(KeyboardInterrupt):
            keys.add("anna", key_file)
    assert (key_file.exists(), keys.clients()) == (True, {})
    key_file.unlink()
    keys.add("anna", key_file)
    assert registered(keys) == {"anna": public_key(Credentials.load(key_file))}


def test_a_client_that_cannot_be_registered_gets_no_key_file(keys, tmp_path, monkeypatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise CoterieError(f"Could not write {path}: No space left on device.")

    monkeypatch.setattr(keys_module, "write_bytes", fail)
    with pytest.raises(CoterieError, match="No space"):
        keys.add("anna", tmp_path / "anna.key")
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_a_key_file_that_cannot_be_written_registers_nobody(keys, tmp_path) -> None:
    with pytest.raises(CoterieError, match=r"^Could not write .*anna\.key: No such file"):
        keys.add("anna", tmp_path / "nowhere" / "anna.key")
    assert keys.clients() == {}


def test_a_folder_of_keys_appears_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    with pytest.raises(CoterieError, match="neither a DNS name nor"):
        Keys.create(tmp_path / "keys", ["https://example.org"])
    with monkeypatch.context() as patch:
        patch.delattr(keys_module, "pem")
        with pytest.raises(NameError):
            Keys.create(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["ca.pem", "server.pem", "server.key", "clients", None])
def test_another_folder_is_refused_with_what_to_do(missing, keys, tmp_path) -> None:
    if missing is None:
        folder = tmp_path / "nowhere"
    else:
        folder = tmp_path / "keys"
        (folder / missing).rename(tmp_path / "moved")
    with pytest.raises(CoterieError, match=f"create one with `coterie keys init {folder}`"):
        Keys(folder)


def test_a_certificate_that_is_none_is_named_and_ignored(keys, tmp_path) -> None:
    keys.add("anna", tmp_path / "anna.key")
    for content in (b"hello", keys.certificate.read_bytes()):  # whose key is on another curve
        (tmp_path / "keys" / "clients" / "ben.pem").write_bytes(content)
        clients, [fault] = keys.read_clients()
        assert list(clients) == list(keys.clients()) == ["anna"]
        assert "ben.pem is ignored (it is damaged, or has a wrong name)" in fault
        assert keys.remarks() == [fault]


@pytest.mark.parametrize("host", ["a.example:9092", "", "a..b", "-a.org", "192.0.2.300", "*.org"])
def test_what_is_no_host_is_refused(host, keys) -> None:
    before = keys.certificate.read_bytes()
    with pytest.raises(CoterieError, match="neither a DNS name nor an IP address"):
        keys.certify([host])
    assert keys.certificate.read_bytes() == before


def test_certify_renews_and_adds_hosts_without_touching_clients(keys, tmp_path) -> None:
    credentials = Credentials.load(keys.add("anna", tmp_path / "anna.key"))
    before, hosts = keys.certificate.read_bytes(), keys.hosts()
    keys.certify(["New.example.org", "2001:db8::7", "localhost"])
    assert keys.hosts() == [*hosts, "new.example.org", "2001:db8::7"]
    assert keys.certificate.read_bytes() != before
    assert registered(keys) == {"anna": public_key(credentials)}
    (tmp_path / "theirs.pem").write_bytes(credentials.ca)
    for host in ("localhost", "coterie.example.org", "new.example.org", "2001:db8::7"):
        shake_hands(keys, tmp_path / "theirs.pem", host)


def test_a_certificate_never_outlives_its_authority(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(certificates, "AUTHORITY_LASTS", timedelta(days=30))
    keys = Keys.create(tmp_path / "keys")
    authority = x509.load_pem_x509_certificate(keys.ca.read_bytes())
    assert keys.expires() == authority.not_valid_after_utc
    shake_hands(keys, keys.ca, "localhost")


def with_key(content: bytes, curve: ec.EllipticCurve) -> bytes:
    """Return credentials with a key that does not belong to the certificate."""
    key = certificates.private_pem(ec.generate_private_key(curve))
    return content[: content.index(b"-----BEGIN PRIVATE")] + key


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: bytes(range(256)) * 20,
        lambda content: content[: len(content) // 2],
        lambda content: content[:-60] + b"A" * 10 + content[-50:],
        lambda content: content.replace(b"Client: anna", b"Client: ../anna"),
        lambda content: content.replace(b"Client: anna", b"Client:"),
        lambda content: content.replace(b"\nMII", b"\nXXX"),
        lambda content: content[content.index(b"-----BEGIN PRIVATE") :],
        lambda content: with_key(content, ec.SECP256R1()),
        lambda content: with_key(content, ec.SECP384R1()),
    ],
    ids=["empty", "bytes", "half", "key", "name", "nameless", "ca", "bare", "curve", "another"],
)
def test_what_is_no_key_file_is_refused_and_not_shown(change, keys, tmp_path) -> None:
    path = keys.add("anna", tmp_path / "anna.key")
    content = change(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(CoterieError) as refusal:
        Credentials.load(path)
    expected = f"{path} is not a client's key file; use the file written by `coterie keys add`."
    assert str(refusal.value) == expected
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "why"), [("nowhere", "No such file or directory"), ("keys", "Is a directory")]
)
def test_a_key_file_that_cannot_be_read_is_refused(name, why, keys, tmp_path) -> None:
    with pytest.raises(CoterieError, match=f"^Could not read the key file .*{name}: {why}.$"):
        Credentials.load(tmp_path / name)


def test_a_renewed_client_has_another_key_and_certificate(keys, tmp_path) -> None:
    old = Credentials.load(keys.add("anna", tmp_path / "anna.key"))
    with pytest.raises(CoterieError, match="already exists; delete it, or"):
        keys.renew("anna", tmp_path / "anna.key")
    assert registered(keys) == {"anna": public_key(old)}
    state = keys.state()
    new = Credentials.load(keys.renew("anna", tmp_path / "new.key"))
    assert registered(keys) == {"anna": public_key(new)}
    assert public_key(new) != public_key(old)
    assert keys.state() != state
    with pytest.raises(CoterieError, match="There is no client 'ben'"):
        keys.renew("ben", tmp_path / "ben.key")


def test_a_key_file_is_read_again(keys, tmp_path, monkeypatch) -> None:
    credentials = Credentials.load(keys.add("anna", tmp_path / "anna.key"))
    keys.renew("anna", tmp_path / "new.key").replace(tmp_path / "anna.key")
    assert public_key(credentials.reload()) != public_key(credentials)
    keys.add("ben", tmp_path / "ben.key").replace(tmp_path / "anna.key")
    with pytest.raises(CoterieError, match="belongs to 'ben', not 'anna'"):
        credentials.reload()
    monkeypatch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(minutes=-1))
    keys.renew("anna", tmp_path / "late.key").replace(tmp_path / "anna.key")
    with pytest.raises(CoterieError, match=r"expired on \d.*`coterie keys renew anna`"):
        credentials.reload()


def test_a_client_removed_while_all_are_read_is_left_out(keys, tmp_path, monkeypatch) -> None:
    for name in ("anna", "ben"):
        keys.add(name, tmp_path / f"{name}.key")
    entries = sorted((tmp_path / "keys" / "clients").iterdir())
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(entries))
    keys.remove("anna")
    assert list(keys.clients()) == ["ben"]
    assert len(keys.state()) == 2  # the server's and ben's


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for others")
def test_what_root_writes_belongs_to_whom_its_folder_does(keys, tmp_path) -> None:
    """Update a service's keys as with sudo; the service must be able to read them."""
    for folder in (keys.folder, keys.folder / "clients"):
        os.chown(folder, 12345, 12346)
    keys.add("anna", tmp_path / "anna.key")
    keys.certify(["example.org"])
    for path in (keys.folder / "clients" / "anna.pem", keys.certificate):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
