"""Try a wheel as a stranger would: install it into an empty environment and use it elsewhere.

    python scripts/try_wheel.py dist/coterie-0.1.0-py3-none-any.whl

It does so twice: with the newest versions that the ranges of pyproject.toml allow, and with the
oldest. PyTorch is the version of requirements.txt both times: another may bring gigabytes for GPUs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SHORT_RUN = ("--set", "rounds=1", "--set", "training.steps=2", "--set", "baselines=[]")
TIMEOUT = 600
"""Seconds that a command may take."""


class Stranger:
    """A user with a new environment and an empty folder."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "folder"
        self.folder.mkdir()
        self._bin = home / "environment" / "bin"
        self._environ = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
        }
        subprocess.run([sys.executable, "-m", "venv", home / "environment"], check=True)

    def does(self, program: str, *arguments: object, code: int = 0) -> str:
        """Run a program of the environment and return its output; it must exit with `code`."""
        done = subprocess.run(
            [self._bin / program, *map(str, arguments)],
            cwd=self.folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        output = done.stdout + done.stderr
        command = " ".join([program, *map(str, arguments)])
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{output}"
        return output


def oldest(project: dict) -> Iterator[str]:
    """Yield a constraint for every requirement: the lowest version of its range, or the range.

    Requirements of the extras are included, although no extra is installed.
    """
    extras = project["optional-dependencies"]
    users = [extras[name] for name in extras if name != "dev"]
    for requirement in map(Requirement, sum(users, project["dependencies"])):
        lowest = [f"=={each.version}" for each in requirement.specifier if each.operator == ">="]
        yield requirement.name + (lowest[0] if lowest else str(requirement.specifier))


def try_out(wheel: Path, constraints: list[str], version: str) -> None:
    """Install the wheel under constraints, and do with it what README.md begins with."""
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as home:
        stranger = Stranger(Path(home))
        limits = Path(home) / "constraints.txt"
        limits.write_text("\n".join(constraints) + "\n", encoding="utf-8")
        began = time.monotonic()
        stranger.does("pip", "install", "--constraint", limits, wheel)
        stranger.does("pip", "check")
        size = subprocess.check_output(["du", "-sm", Path(home) / "environment"], text=True)
        print(f"  installed in {time.monotonic() - began:.0f} s, {size.split()[0]} MiB", flush=True)
        use(stranger, version)


def use(stranger: Stranger, version: str) -> None:
    """Check that commands work if they need no extra, and that the others name their extra."""
    assert stranger.does("coterie", "--version") == f"coterie {version}\n"
    assert "Train a method" in stranger.does("coterie", "--help")
    assert "Run file (YAML)" in stranger.does("coterie", "run", "--help"), "arguments have help"
    began = time.monotonic()
    table = stranger.does("coterie", "run", "--out", "run", *SHORT_RUN)
    assert "Lower is better." in table, table
    adapter = stranger.folder / "run" / "checkpoints" / "00001" / "client-ada.safetensors"
    assert adapter.stat().st_size > 100_000
    print(f"  ran in {time.monotonic() - began:.0f} s", flush=True)
    prompt = "I sing of"
    text = stranger.does("coterie", "generate", "run", "--client", "ada", "--prompt", prompt)
    assert text.startswith(prompt), text
    assert len(text) > len(prompt) + 20, text
    # Other packages may install those of the deployment.
    engine = ["run", "--out", "again", *SHORT_RUN, "--engine", "ray"]
    for extra, command in {"report": ["report", "run"], "ray": engine}.items():
        output = stranger.does("coterie", *command, code=2)
        assert f"pip install 'coterie[{extra}]'" in output, output


def main() -> None:
    """Try the wheel in each environment: with the newest or the oldest versions of its ranges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("environments", nargs="*", default=["newest", "oldest"])
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    torch = [pin for pin in pins if pin.startswith("torch==")]
    lowest = [pin for pin in oldest(project) if not pin.startswith("torch==")]
    # Torch stays the version of requirements.txt: ordinary builds of others take gigabytes.
    constraints = {"newest": torch, "oldest": [*lowest, *torch]}
    for name in arguments.environments:
        print(f"{wheel.name} with the {name} versions of what it needs", flush=True)
        try_out(wheel, constraints[name], project["version"])


if __name__ == "__main__":
    main()
