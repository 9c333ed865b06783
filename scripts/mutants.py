"""Show that the tests catch the faults listed in mutants.yaml.

`python scripts/mutants.py` checks out the last commit in two temporary worktrees and runs the
listed tests once without a fault. Then it applies one fault at a time and runs that fault's tests.
A fault is caught if a test fails; a test that cannot be collected does not count. The exit code is
1 if a fault survives.

`python scripts/mutants.py data 12` tries all faults in the area `data`, and fault 12.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_name("mutants.yaml")
WORKTREES = 2
TIMEOUT = 900
"""Seconds that the tests of one fault may take."""


class Fault(BaseModel):
    """A fault in one line of the source, and the tests that catch it."""

    model_config = ConfigDict(extra="forbid")

    area: str
    file: str
    find: str
    replace: str
    fault: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the file's text with the fault applied.

        Raises:
            ValueError: `find` is not in exactly one line of the text.
        """
        if text.count(self.find) != 1 or "\n" in self.find + self.replace:
            raise ValueError(f"{self.file}: {self.find!r} must be in exactly one line")
        return text.replace(self.find, self.replace)


def read_faults() -> list[Fault]:
    """Read mutants.yaml."""
    return [Fault(**values) for values in yaml.safe_load(FAULTS.read_text(encoding="utf-8"))]


@contextmanager
def worktrees(count: int, commit: str) -> Iterator[list[Path]]:
    """Check out a commit in `count` worktrees, and link `shared` beside them if it exists."""
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "prune"], check=True)  # removes what a killed process has left behind
    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        folders = [Path(home) / str(number) for number in range(count)]
        for folder in folders:
            subprocess.run(
                [*git, "add", "--detach", folder, commit], check=True, capture_output=True
            )
        if (shared := ROOT.parent / "shared").exists():
            (Path(home) / "shared").symlink_to(shared.resolve())
        try:
            yield folders
        finally:
            for folder in folders:
                subprocess.run([*git, "remove", "--force", folder], check=True)


def run_tests(
    folder: Path, tests: Sequence[str], options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run tests in a worktree against that worktree's source."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )


def first_failure(tests: subprocess.CompletedProcess[str]) -> str:
    """Return the first test that failed; empty if none did."""
    failed = [line for line in tests.stdout.splitlines() if line.startswith("FAILED ")]
    if tests.returncode != 1 or not failed:
        return ""
    return failed[0].removeprefix("FAILED ").partition(" - ")[0]


def try_fault(
    fault: Fault, folder: Path, options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run a fault's tests with the fault, and restore the file."""
    file = folder / fault.file
    text = file.read_text(encoding="utf-8")
    file.write_text(fault.applied(text), encoding="utf-8")
    try:
        return run_tests(folder, fault.tests, ["-x", *options])
    finally:
        file.write_text(text, encoding="utf-8")


def try_faults(
    faults: Sequence[Fault], folders: Sequence[Path], options: Sequence[str]
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Try faults in parallel, one per worktree, and yield the results in the faults' order."""
    free: SimpleQueue[Path] = SimpleQueue()
    for folder in folders:
        free.put(folder)

    def in_free_worktree(fault: Fault) -> subprocess.CompletedProcess[str]:
        folder = free.get()
        try:
            return try_fault(fault, folder, options)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as pool:
        yield from pool.map(in_free_worktree, faults)


def main(
    only: Annotated[
        list[str] | None, typer.Argument(help="Areas or numbers of faults; default: all.")
    ] = None,
    marker: Annotated[
        str, typer.Option("-m", help="Marker expression of pytest for the tests that count.")
    ] = "",
    commit: Annotated[str, typer.Option(help="Commit to check out.")] = "HEAD",
) -> None:
    """Apply each fault of mutants.yaml to a worktree and run the tests that must catch it."""
    faults = list(enumerate(read_faults(), 1))
    chosen = [(n, f) for n, f in faults if not only or {str(n), f.area} & set(only)]
    if not chosen:
        areas = ", ".join(dict.fromkeys(fault.area for _, fault in faults))
        sys.exit(f"No fault is chosen; give areas ({areas}) or numbers from 1 to {len(faults)}.")
    options = ["-m", marker] if marker else []
    caught = 0
    with worktrees(WORKTREES, commit) as folders:
        tests = sorted({test for _, fault in chosen for test in fault.tests})
        clean = run_tests(folders[0], tests, ["-n", str(WORKTREES), *options])
        if clean.returncode:
            sys.exit(f"Without a fault all tests must pass:\n{clean.stdout}")
        print("All listed tests pass without a fault.", flush=True)
        results = try_faults([fault for _, fault in chosen], folders, options)
        for (number, fault), result in zip(chosen, results, strict=True):
            test = first_failure(result)
            verdict = f"caught by {test}" if test else f"SURVIVED\n{result.stdout[-3000:]}"
            print(f"{number:3} {fault.area}: {fault.fault}\n    {verdict}", flush=True)
            caught += bool(test)
    print(f"{caught} of {len(chosen)} faults caught")
    sys.exit(caught < len(chosen))


if __name__ == "__main__":
    typer.run(main)
