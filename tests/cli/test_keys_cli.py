"""`coterie keys ...`, as a stranger uses it."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from coterie.network.keys import Credentials, Keys


@pytest.fixture
def command(succeeds, tmp_path, monkeypatch) -> Callable[..., str]:
    """A function that runs `coterie keys ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(succeeds, "keys", width=400)


def test_init_without_a_host_says_that_it_is_for_one_machine(command, refuses) -> None:
    output = command("init")
    assert "cannot connect yet" in output
    assert "coterie keys certify keys --host NAME" in output
    assert Keys(Path("keys")).hosts() == ["localhost", "127.0.0.1", "::1"]
    refuses("already exists", "keys", "init")


def test_init_with_hosts_names_them(command) -> None:
    output = command("init", "mine", "--host", "coterie.example.org", "--host", "192.0.2.7")
    assert "cannot connect yet" not in output
    assert "coterie.example.org, 192.0.2.7." in output
    assert Keys(Path("mine")).hosts()[3:] == ["coterie.example.org", "192.0.2.7"]


def test_clients_are_added_listed_and_removed(command, refuses) -> None:
    command("init")
    assert "coterie keys add NAME" in command("list")
    assert "The key file of anna is anna.key" in command("add", "anna")
    command("add", "ben", "--keys", "keys", "--out", "ben.txt")
    keys = Keys(Path("keys"))
    assert Credentials.load(Path("anna.key")).name == "anna"
    assert Credentials.load(Path("ben.txt")).name == "ben"
    listed = command("list")
    for name, client in keys.clients().items():
        row = rf"^{name} +{client.fingerprint} +{client.expires:%Y-%m-%d}"
        assert re.search(row, listed, re.MULTILINE)
    old = Credentials.load(Path("anna.key"))
    refuses("already exists", "keys", "renew", "anna")
    assert "The key file of anna is new.key" in command("renew", "anna", "--out", "new.key")
    new = Credentials.load(Path("new.key")).key.public_key()
    assert keys.clients()["anna"].certificate.public_key() == new != old.key.public_key()
    assert f"localhost, 127.0.0.1, ::1, until {keys.expires():%Y-%m-%d}." in listed
    assert command("remove", "anna") == "The server now rejects the key of anna.\n"
    assert list(keys.clients()) == ["ben"]
    refuses("There is no client 'anna' in keys", "keys", "remove", "anna")


def test_a_damaged_certificate_is_named_with_the_command_that_replaces_it(command) -> None:
    for words in (["init"], ["add", "anna"], ["add", "ben"]):
        command(*words)
    Path("keys/clients/ben.pem").write_bytes(b"damaged")
    listed = command("list")
    assert re.search("^anna ", listed, re.MULTILINE)
    assert not re.search("^ben ", listed, re.MULTILINE)
    assert "Warning: keys/clients/ben.pem is ignored" in listed
    assert "`coterie keys renew ben --keys keys`." in listed
    command("renew", "ben", "--out", "new.key")
    assert "Warning" not in command("list")


def test_a_host_is_added_later(command) -> None:
    command("init")
    output = command("certify", "--host", "coterie.example.org")
    assert "::1, coterie.example.org, until" in output


@pytest.mark.parametrize("arguments", [["add", "anna"], ["list"], ["remove", "anna"], ["certify"]])
def test_commands_without_keys_say_how_to_begin(arguments, command, refuses) -> None:
    advice = "create one with `coterie keys init keys`."
    refuses(f"Error: keys is not a server's key folder; {advice}\n", "keys", *arguments)
    assert not Path("anna.key").exists()


def test_help_needs_neither_cryptography_nor_torch() -> None:
    check = "sys.exit(bool({'cryptography', 'torch'} & {*sys.modules}))"
    script = f"import sys, coterie.cli.keys; {check}"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_what_a_command_writes_is_for_its_user_alone(tmp_path) -> None:
    command = [sys.executable, "-m", "coterie", "keys", "init"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}
