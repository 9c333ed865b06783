"""Deployments as documented: the units, the image, and the commands of the pages."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from ports import free_port
from sites import Deployment

from coterie.bases import EMBEDDED
from coterie.cli import app
from coterie.config.deployed import check_start, load_deployment
from coterie.config.sections import DeploymentSpec
from coterie.config.values import read_values
from coterie.deployment.monitoring import METRICS
from coterie.deployment.status import State
from coterie.errors import CoterieError

ROOT = Path(__file__).parent.parent
NAMES = ("set-up", "operate", "hostile", "container")
PAGES = [ROOT / "docs" / "deploy" / f"{name}.md" for name in NAMES]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNITS = sorted((ROOT / "deploy").glob("*.service"))
PROGRAM = "/opt/coterie/bin/coterie"


def blocks(language: str) -> list[str]:
    """Return the pages' code blocks in a language; blocks may be indented."""
    fenced = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in fenced]


def unit(path: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=True)
    parsed.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parsed.read_string(path.read_text(encoding="utf-8"))
    return parsed


def start(path: Path) -> list[str]:
    return shlex.split(unit(path)["Service"]["ExecStart"])


def find(words: list[str]) -> tuple[Any, list[str]]:
    """Find the command that words begin with, and return it and its arguments."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command, rest


def options(words: list[str]) -> set[str]:
    """Return the options of the command that words begin with."""
    return {name for option in find(words)[0].params for name in option.opts}


@pytest.mark.parametrize("text", sorted(set(re.findall(r"(?<!`)`(coterie [^`]+)`(?!`)", PAGE))))
def test_the_prose_names_commands_and_options_that_exist(text: str) -> None:
    words = shlex.split(text)[1:]
    assert {word for word in words if word.startswith("--")} <= options(words)


def test_options_in_tables_and_sentences_exist() -> None:
    named = set(re.findall(r"`(--[a-z-]+)(?: [A-Z=]+)?`", PAGE))
    assert named >= {"--address", "--resume", "--data", "--base", "--public"}
    others = options(["keys", "init"]) | options(["status"])
    assert named <= options(["server"]) | options(["client"]) | others


@pytest.mark.parametrize("text", blocks("yaml"))
def test_run_files_of_the_page_are_deployments(text: str, tmp_path: Path) -> None:
    path = tmp_path / "us.yaml"
    path.write_text(text, encoding="utf-8")
    config = load_deployment(read_values(path), ["alice", "bob"])
    assert (config.name, [client.name for client in config.clients]) == ("us", ["alice", "bob"])
    with pytest.raises(CoterieError, match="'bob' has no key"):
        check_start(config, ["alice"])


def test_the_page_explains_every_key_of_the_deployment() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", PAGE, flags=re.MULTILINE))
    defaults = DeploymentSpec().model_dump(mode="json")
    assert blocks("yaml")
    for key, value in defaults.items():
        text = str(int(value)) if key == "deadline" and value else json.dumps(value)
        assert rows[key].strip() == ("" if value is None else f"`{text}`"), key


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_valid_command_and_writes_only_where_it_may(path: Path) -> None:
    program, role, *rest = start(path)
    assert (program, role) == (PROGRAM, path.stem.removeprefix("coterie-"))
    command, arguments = find([role, *rest])
    command.make_context("", arguments)  # parses the options, and runs nothing
    service, words = unit(path)["Service"], start(path)
    place = f"/var/lib/{service['StateDirectory']}"
    assert service["ProtectSystem"] == "strict"
    assert service["ReadWritePaths"] == service["WorkingDirectory"] == place
    assert words[words.index("--out") + 1].startswith(place + "/")
    assert service["User"] == "coterie"


def test_the_server_goes_on_after_a_failure_and_not_after_its_end() -> None:
    path = ROOT / "deploy" / "coterie-server.service"
    assert "--resume" in start(path)
    service = unit(path)["Service"]
    assert service["Restart"] == "on-failure"
    assert service["SuccessExitStatus"] == "130"  # of a stop; see cli.terminal.exit_stopped


def address(path: Path, option: str) -> tuple[str, str]:
    """Return the host and the port that a unit gives with an option."""
    words = start(path)
    host, _, port = words[words.index(option) + 1].rpartition(":")
    return host, port


def test_units_and_image_agree_about_the_ports() -> None:
    client, server = UNITS
    host, port = address(server, "--address")
    assert (host, port) == ("0.0.0.0", address(client, "--server")[1])
    assert re.findall(r"^EXPOSE (.+)$", CONTAINERFILE, flags=re.MULTILINE) == [port]
    assert f"--publish {port}:{port}" in PAGE
    metrics = ":".join(address(server, "--metrics"))
    assert metrics.startswith("127.0.0.1:")  # without TLS, and not for other machines
    assert set(re.findall(r"--metrics [0-9.]+:([0-9]+)", PAGE)) == {metrics.partition(":")[2]}
    assert f"http://{metrics}/health" in PAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_knows_every_line(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8").replace(PROGRAM, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if path.stem in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_page_describes_every_metric_and_every_state() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, flags=re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described >= {*METRICS, *get_args(State)}


def health(process: int) -> int:
    """Return the exit code of the image's health check for a container's first process."""
    [text] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", CONTAINERFILE, flags=re.MULTILINE)
    program, option, code = json.loads(text)
    assert (program, option) == ("python", "-c")
    assert "/proc/1/cmdline" in code
    code = code.replace("/proc/1/", f"/proc/{process}/")
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc on this system")
def test_the_health_check_fails_without_an_answer(tmp_path) -> None:
    run = {"name": "us", "base": "tiny-gpt2", "clients": [{"name": "anna", "path": "diarist.txt"}]}
    texts = str(EMBEDDED / "demo-writers")
    with Deployment(tmp_path / "run", {**run, "data_root": texts}) as deployment:
        deployment.make_keys()
        port = free_port()
        silent = deployment.serve("--metrics", f"127.0.0.1:{port}").process.pid
        assert health(silent) == 1  # it does not listen yet
        deployment.wait(lambda: health(silent) == 0)
        deployment.join()  # a client has no address for monitoring
        client = deployment.programs["anna"].process.pid
        deployment.wait(lambda: "joined the run" in deployment.programs["anna"].text)
        assert health(client) == 0
        os.kill(silent, signal.SIGSTOP)
        assert health(silent) == 1
        os.kill(silent, signal.SIGCONT)
        assert health(silent) == 0
        deployment.kill("server")
        assert health(silent) == 1
        again = deployment.serve("--metrics", f"127.0.0.1:{port}", "--resume")
        deployment.wait(lambda: health(again.process.pid) == 0)
        again.send(signal.SIGTERM)
        assert (again.end(20), health(again.process.pid)) == (130, 1)


def test_files_that_the_page_installs_exist() -> None:
    named = set(re.findall(r"(?<![\w/])deploy/[\w.-]+", PAGE))
    assert len(named) >= 3
    for name in named:
        assert (ROOT / name).is_file(), name


def test_the_image_is_made_of_what_is_there() -> None:
    for sources in re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, flags=re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [extra] = re.findall(r"'\.\[(\w+)\]'", CONTAINERFILE)
    assert f"\n{extra} = [" in project
    entry = json.loads(re.findall(r"^ENTRYPOINT (.+)$", CONTAINERFILE, flags=re.MULTILINE)[0])
    assert f"\n{entry[0]} = " in project
    assert re.findall(r"^USER (\w+)$", CONTAINERFILE, flags=re.MULTILINE) == ["coterie"]


@pytest.mark.parametrize("text", re.findall(r"^RUN (.+?[^\\])$", CONTAINERFILE, re.DOTALL | re.M))
def test_the_image_is_built_by_commands_that_a_shell_can_read(text: str) -> None:
    done = subprocess.run(["sh", "-n", "-c", text], capture_output=True, text=True, check=False)
    assert done.stderr == ""
