"""What a client has told of its records under noise, and how much more it may tell.

The server decides how often a round is opened; so the client counts for itself, and its count
outlives whatever is undone.
"""

import fcntl
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from coterie.errors import CoterieError
from coterie.files import open_lock, parse_json, read_inside, write_private
from coterie.privacy.mechanisms import epsilon, noise_for


class Budget(NamedTuple):
    """What a run spends of a client's privacy, or what a client allows all of its runs to spend."""

    epsilon: float
    """Infinite if something is sent without noise."""
    delta: float
    description: str = ""
    """What is sent under noise, such as `updates`."""


ROUNDING = 1e-9
Noise = Annotated[float, Field(gt=1e-100, lt=1e100)]
"""A noise multiplier whose square neither overflows nor vanishes."""
RUNS = TypeAdapter(dict[str, dict[str, Noise]])


class Ledger:
    """One client's releases, of one run after another. In a file, or for as long as it is there.

    Releases are Gaussian mechanisms on the same records, so their `1 / noise**2` add up.
    """

    def __init__(self, path: Path | None = None, run: str = "", limit: Budget | None = None):
        self.path, self.run, self.limit = path, run, limit
        self.runs = {} if path is None else _read(path)
        """The noise multiplier of each release, by run and by what tells it from others."""

    def spend(self, release: str, noise: float, releases: int) -> bool:
        """Return whether a release may be made, and count it before it is made.

        A release that was counted may be made again.

        Args:
            release: its name: a digest, after `SOURCE:` where a run has several sources.
            noise: standard deviation of its noise over its sensitivity.
            releases: number of releases of this source in the run.

        Raises:
            CoterieError: the file cannot be written.
        """
        with nullcontext() if self.path is None else _alone(self.path):
            self.runs = self.runs if self.path is None else _read(self.path)
            mine, share = self.runs.get(self.run, {}), noise**-2
            if release in mine:
                return True
            source = release.rpartition(":")[0]
            alike = (n for other, n in mine.items() if other.rpartition(":")[0] == source)
            if _over(_spent(alike) + share, releases * share):
                return False
            if self.limit is not None and _over(self._all() + share, _most(self.limit)):
                return False
            runs = {**self.runs, self.run: {**mine, release: noise}}
            if self.path is not None:
                write_private(self.path, json.dumps(runs, indent=2).encode())
            self.runs = runs
            return True

    def affords(self, budgets: Sequence[Budget]) -> bool:
        """Return whether a whole run with these budgets stays within the limit."""
        if self.limit is None:
            return True
        if any(math.isinf(budget.epsilon) for budget in budgets):
            return False
        before = self._all() - _spent(self.runs.get(self.run, {}).values())
        return not _over(before + sum(map(_most, budgets)), _most(self.limit))

    def spent(self, delta: float) -> float:
        """The epsilon of all releases so far."""
        total = self._all()
        return epsilon(total**-0.5, 1, delta) if total else 0.0

    def _all(self) -> float:
        return _spent(noise for run in self.runs.values() for noise in run.values())


def together(budgets: Sequence[Budget]) -> Budget | None:
    """Return one budget for everything that a run spends; None if it spends nothing."""
    if len(budgets) < 2:
        return budgets[0] if budgets else None
    delta = min(budget.delta for budget in budgets)
    what = " and ".join(budget.description for budget in budgets)
    if any(math.isinf(budget.epsilon) for budget in budgets):
        return Budget(math.inf, delta, what)
    return Budget(epsilon(sum(map(_most, budgets)) ** -0.5, 1, delta), delta, what)


def _over(amount: float, most: float) -> bool:
    return amount > most * (1 + ROUNDING)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from the file meanwhile."""
    with open_lock(path.with_name(f".{path.name}.lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _spent(noises: Iterable[float]) -> float:
    return math.fsum(noise**-2 for noise in noises)


def _most(budget: Budget) -> float:
    """What a budget allows, in the ledger's measure."""
    return noise_for(budget.epsilon, 1, budget.delta) ** -2 if budget.epsilon else 0.0


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        runs = parse_json(read_inside(path.parent, path.name))
        return RUNS.validate_python(runs, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise CoterieError(
            f"{path} cannot be read; without it nobody knows what this client has told of its "
            "texts. Restore it from a backup."
        ) from error
