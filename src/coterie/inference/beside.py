"""Runs beside a run, on the same base, data and seed: its baselines, and those of a comparison."""

from collections.abc import Iterator
from pathlib import Path

from coterie.errors import CoterieError
from coterie.methods.registry import POOLED
from coterie.runs import RunFolder

SAME = ("seed", "base", "bases", "data_root", "data", "clients", "divide")
"""What must be equal in two runs for their models to be compared: keys of a run file."""


def find_beside(folder: RunFolder, method: str) -> RunFolder:
    """The run of a method beside the one in a folder.

    That is one of its baselines, or, where the folder is itself a baseline or a run of a
    comparison, one of those next to it. Raises CoterieError if there is none, or more than one.
    """
    config = folder.description["config"]
    known: dict[str, list[RunFolder]] = {}
    for other in _around(folder.path):
        try:
            theirs = other.description["config"]
        except CoterieError:
            continue
        if all(theirs.get(key) == config.get(key) for key in SAME):
            label = POOLED if theirs["pooled"] else theirs["method"]["name"]
            known.setdefault(label, []).append(other)
    found = known.get(method, [])
    if not found:
        there = f"there are: {', '.join(sorted(known))}" if known else "there are none"
        raise CoterieError(
            f"No run of {method!r} is beside {folder.path} on the same data ({there}), and no run "
            "is in a folder of that name."
        )
    if len(found) > 1:
        listed = ", ".join(str(other.path) for other in found)
        raise CoterieError(f"Several runs of {method!r} are beside {folder.path}: {listed}.")
    return found[0]


def _around(path: Path) -> Iterator[RunFolder]:
    """A run's baselines; the run that it is a baseline of; and what is in the same folder."""
    parent = path.resolve().parent
    for folder in (*sorted(path.glob("baselines/*")), parent.parent, *sorted(parent.glob("*"))):
        is_self = folder.resolve() == path.resolve()
        if not is_self and (folder / "run.json").is_file():
            yield RunFolder(folder)
