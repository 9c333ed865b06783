"""`coterie keys ...`, as a stranger uses it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")
from coterie.cli.keys import app
from coterie.errors import CoterieError
from coterie.network.keys import Credentials, Keys


class Output(NamedTuple):
    """The output of a command, and its error."""

    out: str
    refusal: str = ""


@pytest.fixture
def command(tmp_path, monkeypatch) -> Callable[..., Output]:
    """Runs `coterie keys ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Output:
        result = CliRunner().invoke(app, arguments)
        if isinstance(result.exception, CoterieError):
            return Output(result.output, str(result.exception))
        assert result.exit_code == 0, result.output
        return Output(result.output)

    return run


def test_init_without_a_host_says_that_it_is_for_one_machine(command) -> None:
    output = command("init").out
    assert "cannot connect yet" in output
    assert "coterie keys certify keys --host NAME" in output
    assert Keys(Path("keys")).hosts() == ["localhost", "127.0.0.1", "::1"]
    assert "already exists" in command("init").refusal


def test_init_with_hosts_names_them(command) -> None:
    output = command("init", "mine", "--host", "coterie.example.org", "--host", "192.0.2.7").out
    assert "cannot connect yet" not in output
    assert "coterie.example.org, 192.0.2.7." in output
    assert Keys(Path("mine")).hosts()[3:] == ["coterie.example.org", "192.0.2.7"]


def test_clients_are_added_listed_and_removed(command) -> None:
    command("init")
    assert "coterie keys add NAME" in command("list").out
    assert "The key file of anna is anna.key" in command("add", "anna").out
    command("add", "ben", "--keys", "keys", "--out", "ben.txt")
    keys = Keys(Path("keys"))
    assert Credentials.load(Path("anna.key")).name == "anna"
    assert Credentials.load(Path("ben.txt")).name == "ben"
    listed = command("list").out
    for name, client in keys.clients().items():
        row = rf"^{name} +{client.fingerprint} +{client.expires:%Y-%m-%d}"
        assert re.search(row, listed, re.MULTILINE)
    old = Credentials.load(Path("anna.key"))
    assert "already exists" in command("renew", "anna").refusal
    assert "The key file of anna is new.key" in command("renew", "anna", "--out", "new.key").out
    new = Credentials.load(Path("new.key")).key.public_key()
    assert keys.clients()["anna"].certificate.public_key() == new != old.key.public_key()
    assert f"localhost, 127.0.0.1, ::1, until {keys.expires():%Y-%m-%d}." in listed
    assert command("remove", "anna").out == "The server now rejects the key of anna.\n"
    assert list(keys.clients()) == ["ben"]
    assert "There is no client 'anna' in keys" in command("remove", "anna").refusal


def test_a_damaged_certificate_is_named_with_the_command_that_replaces_it(command) -> None:
    for words in (["init"], ["add", "anna"], ["add", "ben"]):
        command(*words)
    Path("keys/clients/ben.pem").write_bytes(b"damaged")
    listed = command("list").out
    assert re.search("^anna ", listed, re.MULTILINE)
    assert not re.search("^ben ", listed, re.MULTILINE)
    assert "Warning: keys/clients/ben.pem is ignored" in listed
    assert "`coterie keys renew ben --keys keys`." in listed
    command("renew", "ben", "--out", "new.key")
    assert "Warning" not in command("list").out


def test_a_host_is_added_later(command) -> None:
    command("init")
    output = command("certify", "--host", "coterie.example.org").out
    assert "::1, coterie.example.org, until" in output


@pytest.mark.parametrize("arguments", [["add", "anna"], ["list"], ["remove", "anna"], ["certify"]])
def test_commands_without_keys_say_how_to_begin(arguments, command) -> None:
    advice = "create one with `coterie keys init keys`."
    assert command(*arguments).refusal == f"keys is not a server's key folder; {advice}"
    assert not Path("anna.key").exists()


def test_help_needs_neither_cryptography_nor_torch() -> None:
    check = "sys.exit(bool({'cryptography', 'torch'} & {*sys.modules}))"
    script = f"import sys, coterie.cli.keys; {check}"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_what_a_command_writes_is_for_its_user_alone(tmp_path) -> None:
    command = [sys.executable, "-m", "coterie", "keys", "init"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    modes = {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    assert modes == {0}
