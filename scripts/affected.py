"""Print the files and folders whose slow tests CI runs after a change, as variables of a shell.

    python scripts/affected.py

TESTS are run whole; they include the tests that mutants.yaml lists for the changed files. Of
SAMPLED, which cover packages that import a changed package, a third is run.
A change is what was committed in the 12 hours before the last commit. After a tenth of all commits,
CI runs all slow tests. docs/develop/tests.md has the rules as a table.
"""

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grimp
import yaml

ROOT = Path(__file__).parent.parent
HOURS = 12
ALSO = {
    "methods": {"engines", "testing"},
    "devices": {"adapters", "engines", "methods", "training"},
    "deployment/test_crashes.py": {"deployment", "engines"},
}
"""For a folder or file of tests, further packages whose changes it covers."""
PAPERS = {"adapters", "alignment", "methods"}
"""Packages on which the papers' results depend most."""
EVERYTHING = (["papers/tests", "tests"], [])
NEEDED_BY_ALL = (
    r"(tests/(conftest|durations)\.py|pyproject\.toml|requirements\.txt|Makefile|\.ci/.*)"
)


def imports() -> dict[str, set[str]]:
    """Return the packages and modules at the top of `coterie` that each of them imports."""
    graph = grimp.build_graph("coterie", cache_dir=None)
    packages = graph.find_children("coterie")
    for package in packages:
        graph.squash_module(package)
    return {
        package.removeprefix("coterie."): {
            module.removeprefix("coterie.")
            for module in graph.find_modules_directly_imported_by(package) & packages
        }
        for package in packages
    }


def affected(
    changed: Iterable[str], imported: Mapping[str, set[str]]
) -> tuple[list[str], list[str]]:
    """Return the files and folders of tests to run whole, and those of which to run a third.

    Args:
        changed: The paths of the changed files in the repository.
        imported: The packages that each package of `coterie` imports.
    """
    whole: set[str] = set()
    users: set[str] = set()
    papers, changed = False, set(changed)
    for path in changed:
        if re.fullmatch(NEEDED_BY_ALL, path):
            return EVERYTHING
        if package := re.match(r"src/coterie/([a-z_]+)", path):
            name = package[1]
            whole.add(name)
            for uses in (imported, ALSO):
                users |= {user for user, used in uses.items() if name in used}
            papers = papers or name in PAPERS
        elif folder := re.match(r"tests/([a-z_]+)/", path):
            whole.add(folder[1])
        elif helper := re.match(r"tests/(?!test_)(\w+)\.py", path):
            whole |= importers(helper[1])
        elif path.startswith("tests/test_"):
            whole.add(path.removeprefix("tests/"))
        elif path.startswith("papers/"):
            papers = True
        else:  # pages, examples, benchmarks, data of tests
            whole.add("cli")
    for folders in (whole, users):
        if folders & {"cli", "api", "testing"}:
            folders |= {path.name for path in (ROOT / "tests").glob("test_*.py")}
    text = (ROOT / "scripts" / "mutants.yaml").read_text(encoding="utf-8")
    faults: list[Any] = yaml.safe_load(text)
    for fault in faults:
        if fault["file"] in changed:
            whole |= {test.partition("::")[0].removeprefix("tests/") for test in fault["tests"]}
    whole -= {name for name in whole if name.partition("/")[0] in whole - {name}}
    tests, sampled = existing(whole), existing(users - whole)
    return (["papers/tests", *tests] if papers else tests), sampled


def importers(module: str) -> set[str]:
    """Return the folders and files of tests that import a module in tests/, also indirectly."""
    statement = re.compile(rf"^\s*(?:from|import) (?:tests\.)?{module}\b", re.MULTILINE)
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if statement.search(path.read_text(encoding="utf-8")):
            name = path.relative_to(ROOT / "tests").parts[0]
            is_helper = name == path.name and not name.startswith("test_")
            names |= importers(path.stem) if is_helper else {name}
    return names


def existing(names: Iterable[str]) -> list[str]:
    """Return the paths of the files and folders of tests that exist."""
    return [f"tests/{name}" for name in sorted(names) if (ROOT / "tests" / name).exists()]


def git(*arguments: str) -> list[str]:
    """Return the words that a git command prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def after_last_commit() -> tuple[list[str], list[str]]:
    """Return what `affected` returns for the change before the last commit."""
    [commit, time] = git("show", "-s", "--format=%h %ct", "--abbrev=7")
    before = git("rev-list", "-1", f"--before={int(time) - HOURS * 3600}", "HEAD")
    if not before or int(commit[:7], 16) % 10 == 0:
        return EVERYTHING
    return affected(git("diff", "--name-only", *before, "HEAD"), imports())


if __name__ == "__main__":
    for variable, paths in zip(("TESTS", "SAMPLED"), after_last_commit(), strict=True):
        print(f"{variable}={shlex.quote(' '.join(paths))}")
