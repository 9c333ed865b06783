"""A client's ledger of differentially private releases and of masks, and privacy budgets.

A release is a result that is computed from a client's records and sent with noise. Masks hide an
upload, and must not hide another one. As the server decides how often a round is repeated, every
client keeps its own ledger. An entry is never removed, even if its round is rolled back.
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
    """The privacy loss (epsilon and delta) that a run causes, or that a client permits.

    A run has a budget for each of its noise mechanisms: the privacy loss that all of the
    mechanism's releases together cause for one client. The function `together` combines these
    budgets. The budget of a client is the limit on the privacy loss of all of the client's runs
    together.
    """

    epsilon: float
    """The budget's epsilon; infinite if any data are sent without noise."""
    delta: float
    description: str = ""
    """A name for the data that are sent with noise, such as `updates`."""


ROUNDING = 1e-9
Noise = Annotated[float, Field(gt=1e-100, lt=1e100)]
"""A noise multiplier whose square neither overflows nor underflows."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RUNS = TypeAdapter(dict[str, dict[str, Noise | Digest]])


class Ledger:
    """A list of all noisy releases and all masks of one client, from all runs of the client.

    Each release is the output of a Gaussian mechanism on the client's records. Therefore, the costs
    `1 / noise**2` of the releases add up.

    Args:
        path: File of the ledger; None to keep the ledger in memory.
        run: Id of the current run.
        limit: Budget of all runs together; None for no limit.

    Raises:
        CoterieError: The file is damaged or cannot be read.
    """

    def __init__(self, path: Path | None = None, run: str = "", limit: Budget | None = None):
        self.path, self.run, self.limit = path, run, limit
        self.runs = {} if path is None else _read(path)
        """The entries of each run, by the run's id: the noise multiplier of each release, and the
        digest of the upload that each mask hides, by name."""

    def spend(self, release: str, noise: float, releases: int) -> bool:
        """Record a release if it is permitted, and return whether it is permitted.

        Call this method before the release is sent. The source of a release is the method or the
        aggregation transform that adds the noise. A new release is permitted if, with this release
        included, both of these conditions hold:

        - The releases of all runs cost at most as much as the client's budget permits.
        - The current run's releases from the same source cost at most as much as `releases`
          releases with this noise.

        A release that is already recorded is permitted again at no cost.

        Args:
            release: A name that identifies the release within the run. Two releases have equal
                names only if the second is an exact repetition of the first, which costs nothing.
                If the source is a transform, the name begins with the transform's name and a colon.
            noise: Standard deviation of the noise, divided by the sensitivity.
            releases: Number of releases that the source makes in all rounds of the run.

        Raises:
            CoterieError: The file cannot be read or written.
        """
        with self._updated() as recorded:
            cost = noise**-2
            if release in recorded:
                return True
            source = release.rpartition(":")[0]
            from_source = (n for name, n in recorded.items() if name.rpartition(":")[0] == source)
            if _exceeds(_cost(from_source) + cost, releases * cost):
                return False
            if self.limit is not None and _exceeds(self._all() + cost, _allowed(self.limit)):
                return False
            recorded[release] = noise
            return True

    def use(self, masks: str, digest: str) -> bool:
        """Record which upload the masks hide; return False if they have hidden another one.

        Args:
            masks: A name that identifies the masks within the run.
            digest: A digest of the upload.

        Raises:
            CoterieError: The file cannot be read or written.
        """
        with self._updated() as recorded:
            return recorded.setdefault(masks, digest) == digest

    def affords(self, budgets: Sequence[Budget]) -> bool:
        """Return whether the limit permits the current run to spend all of the given budgets."""
        if self.limit is None:
            return True
        if any(math.isinf(budget.epsilon) for budget in budgets):
            return False
        other_runs = self._all() - _cost(self.runs.get(self.run, {}).values())
        return not _exceeds(other_runs + sum(map(_allowed, budgets)), _allowed(self.limit))

    def spent(self, delta: float) -> float:
        """Return the total epsilon of all recorded releases at a given delta."""
        total = self._all()
        return epsilon(total**-0.5, 1, delta) if total else 0.0

    def _all(self) -> float:
        return _cost(record for run in self.runs.values() for record in run.values())

    @contextmanager
    def _updated(self) -> Iterator[dict[str, float | str]]:
        """Yield the current run's records, and save them if the with statement's body changes them.

        Yields:
            A mapping from the names of releases to noise multipliers, and from the names of masks
            to digests.
        """
        with nullcontext() if self.path is None else _locked(self.path):
            self.runs = self.runs if self.path is None else _read(self.path)
            old = self.runs.get(self.run, {})
            new = {**old}
            yield new
            if new != old:
                runs = {**self.runs, self.run: new}
                if self.path is not None:
                    write_private(self.path, json.dumps(runs, indent=2).encode())
                self.runs = runs


def together(budgets: Sequence[Budget]) -> Budget | None:
    """Combine the budgets of a run's noise mechanisms into one budget for the whole run.

    The result is None if `budgets` is empty.
    """
    if len(budgets) < 2:
        return budgets[0] if budgets else None
    delta = min(budget.delta for budget in budgets)
    description = " and ".join(budget.description for budget in budgets)
    if any(math.isinf(budget.epsilon) for budget in budgets):
        return Budget(math.inf, delta, description)
    return Budget(epsilon(sum(map(_allowed, budgets)) ** -0.5, 1, delta), delta, description)


def _exceeds(cost: float, allowed: float) -> bool:
    return cost > allowed * (1 + ROUNDING)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a ledger's file against other processes during the body of the `with` statement."""
    with open_lock(path.with_name(f".{path.name}.lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cost(records: Iterable[float | str]) -> float:
    """Return the cost of all noisy releases in a run's records; masks cost nothing."""
    return math.fsum(noise**-2 for noise in records if not isinstance(noise, str))


def _allowed(budget: Budget) -> float:
    """Return the largest total cost `sum(1 / noise**2)` that a budget permits."""
    return noise_for(budget.epsilon, 1, budget.delta) ** -2 if budget.epsilon else 0.0


def _read(path: Path) -> dict[str, dict[str, float | str]]:
    try:
        runs = parse_json(read_inside(path.parent, path.name))
        return RUNS.validate_python(runs, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise CoterieError(
            f"The privacy ledger {path} cannot be read, so the budget that this client has spent "
            "is unknown; restore the file from a backup."
        ) from error
