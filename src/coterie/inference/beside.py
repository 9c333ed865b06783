"""Search for runs to compare with a given run: its baselines, and the runs in the same folder."""

from collections.abc import Iterator
from pathlib import Path

from coterie.errors import CoterieError
from coterie.methods.registry import POOLED
from coterie.runs import RunFolder

SAME = ("seed", "base", "bases", "data_root", "data", "clients", "divide")
"""Keys of a run file that must have equal values in two runs whose models are compared."""


def find_beside(folder: RunFolder, method: str) -> RunFolder:
    """Find a run of another method that has the same base, data and seed as a given run.

    The search covers the given run's baselines, which are the runs in its subfolder `baselines`. If
    the given run is itself a baseline, the search also covers the run that contains it. Finally,
    the search covers all other runs in the given run's parent folder, such as the runs of a
    comparison.

    Args:
        folder: The given run.
        method: The name of the other method.

    Returns:
        The folder of the other method's run.

    Raises:
        CoterieError: There is no such run, or more than one.
    """
    config = folder.description["config"]
    runs: dict[str, list[RunFolder]] = {}
    for candidate in _neighbours(folder.path):
        try:
            candidate_config = candidate.description["config"]
        except CoterieError:
            continue
        if all(candidate_config.get(key) == config.get(key) for key in SAME):
            pooled = candidate_config["pooled"]
            label = POOLED if pooled else candidate_config["method"]["name"]
            runs.setdefault(label, []).append(candidate)
    matches = runs.get(method, [])
    if not matches:
        available = ", ".join(sorted(runs)) or "none"
        raise CoterieError(
            f"{method!r} is neither a run folder nor the method of a run that can be compared with "
            f"the run {folder.path}. A comparable run has the same seed, base and data, and is in "
            f"the same folder or among the run's baselines; available methods: {available}."
        )
    if len(matches) > 1:
        paths = ", ".join(str(match.path) for match in matches)
        raise CoterieError(
            f"There are several runs of {method!r} next to the run {folder.path} or among its "
            f"baselines; give the folder of one of them: {paths}."
        )
    return matches[0]


def _neighbours(path: Path) -> Iterator[RunFolder]:
    """Yield the runs that `find_beside` searches, except the given run itself.

    Args:
        path: The folder of the given run.
    """
    parent = path.resolve().parent
    for folder in (*sorted(path.glob("baselines/*")), parent.parent, *sorted(parent.glob("*"))):
        if folder.resolve() != path.resolve() and (folder / "run.json").is_file():
            yield RunFolder(folder)
