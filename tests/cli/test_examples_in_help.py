"""The example commands of helps, docs and the README: commands, options and clients exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import coterie
from coterie.cli import app
from coterie.config.values import DEMO

ROOT = Path(__file__).parents[2]
COMMANDS: Any = typer.main.get_command(app)
DEMO_CLIENTS = set(yaml.safe_load(DEMO.read_text())["divide"]["mixtures"])


def texts() -> dict[str, str]:
    found = {name: command.help or "" for name, command in COMMANDS.commands.items()}
    found["package"] = coterie.__doc__ or ""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return found | {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in files}


def examples() -> list[tuple[str, str]]:
    found = []
    for where, text in texts().items():
        joined = re.sub(r"\\\n\s*", " ", text)
        lines = re.findall(r"^[ ]*(?:\$ )?coterie ([a-z].*)$", joined, re.MULTILINE)
        found += [(where, line) for line in lines]
    return found


@pytest.mark.parametrize(("where", "line"), examples())
def test_an_example_is_a_command_with_options_that_exist(where: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    command: Any = COMMANDS
    while hasattr(command, "commands") and words:
        name = words.pop(0)
        assert name in command.commands, f"{where}: coterie {line}"
        command = command.commands[name]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
    options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert options <= known, f"{where}: coterie {line}"


@pytest.mark.parametrize(("where", "text"), texts().items(), ids=texts().keys())
def test_clients_of_the_demo_exist(where: str, text: str) -> None:
    named = re.findall(r"runs/demo --client (\w+)", text)
    if where == "package":
        named = re.findall(r'client="(\w+)"', text)
    assert set(named) <= DEMO_CLIENTS
