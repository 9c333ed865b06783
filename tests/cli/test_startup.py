"""Errors on the command line: reported before slow imports, in characters of the terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from coterie.cli import main
from {module} import app
try:
    main(app)
finally:
    print(*sorted(sys.modules))
"""
SLOW = {"torch", "transformers", "datasets", "aiohttp", "ray", "pandas", "matplotlib"}


def outcome(folder: Path, command: str, module: str = "coterie.cli") -> tuple[str, set[str]]:
    """Return the output of a command in its own process, and the modules that it imported."""
    process = [sys.executable, "-c", PROGRAM.format(module=module), *command.split()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(process, env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == (0 if "--help" in command or "--version" in command else 2)
    *lines, modules = (done.stderr + done.stdout).splitlines()
    return "\n".join(lines), set(modules.split())


COMMANDS = [
    ("--help", "fine-tuning of language models"),
    ("run --help", "coterie run mine.yaml"),
    ("--version", "coterie 0."),
    ("run nofile.yaml", "no run file nofile.yaml"),
    ("audit nofile.yaml", "no run file nofile.yaml"),
    ("data nofile.yaml", "no run file nofile.yaml"),
    ("data lost.yaml", "there is no file or folder"),
    ("compare nofile.yaml", "no run file nofile.yaml"),
    ("run wrong.yaml", "Unknown key 'rouns'. Did you mean 'rounds'?"),
    ("run lost.yaml", "there is no file or folder"),
    ("run --set training.bach=4", "Unknown key 'training.bach'"),
    ("run --set training.batch=few", "training.batch should be a whole number"),
    ("run --set method=fedavgg", "no method 'fedavgg'"),
    ("methods fedavgg", "no method 'fedavgg'"),
    ("compare table.yaml", "run it with `python -m reproduce` in papers/ of the repository."),
    ("run --resume nowhere", "nowhere"),
    ("generate nowhere --client a --prompt b", "nowhere"),
    ("chat --help", "Chat with a client's model"),
    ("chat nowhere --client a", "nowhere"),
    ("export nowhere --client a --to b", "nowhere"),
    ("serve --help", "coterie serve runs/mine"),
    ("serve nowhere", "no folder nowhere"),
    ("report nowhere", "nowhere"),
    ("server nofile.yaml", "coterie keys init"),
    ("client --server host:1 --key nokey --data texts", "nokey"),
]


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_mistake_costs_no_import_of_torch(command, message, tmp_path) -> None:
    (tmp_path / "wrong.yaml").write_text("rouns: 3\n", encoding="utf-8")
    (tmp_path / "lost.yaml").write_text("clients: [{name: anna, path: lost.txt}]", encoding="utf-8")
    (tmp_path / "table.yaml").write_text("rows: [{method: local}]", encoding="utf-8")
    text, modules = outcome(tmp_path, command)
    assert message in text
    assert not SLOW & modules


def test_a_wrong_setting_of_a_method_imports_that_method_alone(tmp_path) -> None:
    text, modules = outcome(tmp_path, "run --set method=fedavg --set method.mlb=2")
    assert "Did you mean 'method.mlp'?" in text
    assert "coterie.methods.averaging" in modules
    families = {"comigs", "pcl", "fedamole", "fedmkt", "fdlora", "ranks", "prompts", "fedit"}
    assert not modules & {f"coterie.methods.{family}" for family in families}


def _main(arguments: list[bytes | str], encoding: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "coterie", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=300)


def test_an_output_stream_that_lacks_a_character_gets_a_replacement() -> None:
    done = _main(["report", "日本"], "cp1252")
    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: ?? is not a folder")


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = _main(["generate", "runs/demo", "--client", "ada", "--prompt", b"caf\xe9"], "utf-8")
    assert done.returncode == 2
    assert b"Argument 6" in done.stderr
    assert b"Traceback" not in done.stderr
