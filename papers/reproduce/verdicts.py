"""Test the papers' claims (claims.yaml) on finished runs, and write their tables in papers/.

`python -m reproduce.verdicts DATA` reads the runs that `python -m reproduce` or `reproduce.measure`
left in runs/, in every regime; tests without runs keep their row. DATA is the folder of data that
they had. Where answers are chosen from a list, rows that are not better than always giving the
commonest answer get no verdict.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from coterie.analysis.frame import Result, mean_score, of_clients
from coterie.analysis.significance import Difference, at_floor, differences
from coterie.analysis.tables import Table, shown_of
from coterie.config.run import RunConfig
from coterie.engines.session import Session
from coterie.evaluation.metrics import Metric
from coterie.files import write_text
from coterie.runs import RunFolder
from reproduce.pages import REAL
from reproduce.table_file import TableSpec, read_table, slug, table_folder
from reproduce.tables import load_table

ROOT = Path(__file__).parents[1]
CLAIMS = Path(__file__).with_name("claims.yaml")
START = "<!-- Written by reproduce/verdicts.py from runs; do not edit the table below. -->"
END = "<!-- End of the table. -->"
SIZE = "135 M"
"""Stands in place of a regime for the tables of recipes/real: the size of their base."""
SEEDS = 3
"""The most that a table may have."""
AT_FLOOR = "at the floor"
"""Stands in place of a verdict."""
TOO_SMALL = "too small for one seed"
"""Stands in place of a verdict on a difference that another seed could reverse."""
NOISE = 2.1
"""Two standard deviations, over seeds, of the difference between two rows of perplexities.

It is in per cent of the compared figure, rounded up. The pooled standard deviation of the 126 pairs
of trained rows with three seeds in results/grid.json is 0.0102 nats (`exp(2 * 0.0102) - 1`).
"""
NOISE_OF_SHARES = 1.9
"""Two standard deviations of the difference between two rows of shares, in points, rounded up.

The pooled standard deviation is 0.94 points over the 21 pairs of trained rows in the column
Opposite preferences of results/grid.json, the only column of shares with several seeds. Most of its
accuracies are above 90 %, so differences on harder tasks may vary more.
"""
HEADINGS = (
    "claim",
    "regime",
    "column",
    "test",
    "figures",
    "difference",
    "95 % interval",
    "seeds",
    "verdict",
)


class Test(BaseModel):
    """An inequality between rows; claims.yaml says what the keys mean."""

    model_config = ConfigDict(extra="forbid")

    better: str = ""
    than: tuple[str, ...] = ()
    than_worse_of: tuple[str, ...] = ()
    row: str = ""
    within: float = 0
    of: tuple[str, ...] = ()
    of_better: tuple[str, ...] = ()
    nearer: str = ""

    @property
    def rows(self) -> set[str]:
        """All rows that the test needs."""
        single = {self.better, self.row, self.nearer} - {""}
        return single.union(self.than, self.than_worse_of, self.of, self.of_better)

    def among(self, rows: set[str]) -> "Test | None":
        """Limit `than` and `of` to these rows; return None if the test then lacks rows."""
        plain = {"than": self.than, "of": self.of}
        kept = {key: tuple(row for row in given if row in rows) for key, given in plain.items()}
        test = self.model_copy(update=kept)
        others = test.than + test.than_worse_of + test.of + test.of_better
        return test if others and test.rows <= rows else None


class Claim(BaseModel):
    """A claim and its tests in a table of recipes/small, and in its counterpart in recipes/real."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Its number on the paper's page."""
    claim: str
    table: str
    tests: tuple[Test, ...]
    columns: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    real: str = ""

    @property
    def tables(self) -> list[Path]:
        """The table files in which the claim is tested."""
        small = ROOT / "recipes" / "small" / f"{self.table}.yaml"
        real = ROOT / "recipes" / REAL / f"{self.real or self.table}.yaml"
        return [path for path in (small, real) if path.exists()]


Rows = Mapping[str, Sequence[Result]]
FloorOf = Callable[[Rows], list[Result]]
"""Returns the floor under some rows' scores, one result per seed."""


def runs_of(
    path: Path, columns: Sequence[str], regime: str | None, data: Path, runs: Path
) -> Iterator[tuple[str, TableSpec, Rows, FloorOf]]:
    """Yield the finished runs of a table by row, for each of these columns, or for all columns."""
    settings = [f"data_root={data.resolve()}"]
    spec, chosen = load_table(path, settings, columns=columns, regime=regime)
    for column in chosen:
        folder = runs / table_folder(path, regime).name / slug(column.spec.name)
        rows: dict[str, list[Result]] = {}
        for row in spec.rows:
            if (run := column.cells.get(row.label)) is not None:
                tuned = slug(row.label) if row.tune or spec.tune else None
                rows[row.label] = list(outcomes(folder, run, row.point or spec.point, tuned))
        yield column.spec.name, spec, rows, partial(floor_under, column.run)


def floor_under(run: RunConfig, rows: Rows) -> list[Result]:
    """Return the floor of a column's runs, from the data, for each seed that a row has."""
    session = Session(run)
    seeds = sorted({result["seed"] for results in rows.values() for result in results})
    return [session.floor(run.model_copy(update={"seed": seed})) for seed in seeds]


def outcomes(
    folder: Path, run: RunConfig, point: str | None, tuned: str | None = None
) -> Iterator[Result]:
    """Yield the results of a cell's finished runs, seed by seed.

    tuned: the first part of the folders' names if the cell's values were chosen by trials, which
    its digest does not cover; the newest folder of a seed counts.
    """
    for seed in range(run.seed, run.seed + SEEDS):
        digest = run.model_copy(update={"seed": seed}).digest()
        pattern = f"{tuned}-seed{seed}-*" if tuned else f"*-{digest}"
        paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        finished = [outcome for p in paths if (outcome := RunFolder(p).outcome) is not None]
        if finished:
            yield {**finished[-1], "reports": point or finished[-1]["reports"]}


def tried(
    test: Test, rows: Rows, metric: Metric, low: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield for each pair of rows: the test, the two figures, difference, interval, seeds, verdict.

    low: rows at the floor, of which no verdict is given.
    """
    means = {row: mean_score(rows[row], metric.name) for row in test.rows}
    by_worth = lambda row: metric.order(means[row])  # noqa: E731
    others = test.than or test.of
    if test.than_worse_of:
        others = (max(test.than_worse_of, key=by_worth),)
    if test.of_better:
        others = (min(test.of_better, key=by_worth),)
    subject = test.better or test.row
    for other in others:
        compared, change, span = [subject, other], "", ""
        if test.nearer:
            compared.insert(1, test.nearer)
        pair = of_same_seeds({row: rows[row] for row in compared})
        if not pair[subject]:
            continue
        figures = {row: mean_score(pair[row], metric.name) for row in compared}
        unit = metric.shown(1) if metric.share else 100 / figures[other]
        far = unit * abs(figures[subject] - figures[other])
        if test.better:
            difference = differences(pair, other, metric)[subject]
            change, span, verdict = shown(difference, metric)
            label, margin = f"{subject} better than {other}", far
        elif test.within:
            verdict, margin = "holds" if far <= test.within else "does not hold", far - test.within
            label, change = f"{subject} within {test.within:g} % of {other}", f"{far:.1f} %"
        else:
            margin = far - unit * abs(figures[subject] - figures[test.nearer])
            verdict = "holds" if margin > 0 else "does not hold"
            label = f"{subject} nearer to {test.nearer} than to {other}"
        scored, seeds = ", ".join(metric.cell(figures[row]) for row in compared), len(pair[subject])
        verdict = supported(verdict, margin, seeds, metric)
        verdict = verdict if set(compared).isdisjoint(low) else AT_FLOOR
        yield label, scored, change, span, str(seeds), verdict


def supported(verdict: str, margin: float, seeds: int, metric: Metric) -> str:
    """Return a verdict, or TOO_SMALL if it rests on one seed and a margin below the noise.

    margin: the difference, or its distance from the bound of the test, in points if the metric is a
    share, otherwise in per cent of the compared figure.
    """
    noise = NOISE_OF_SHARES if metric.share else NOISE
    return TOO_SMALL if seeds == 1 and abs(margin) < noise else verdict


def of_same_seeds(rows: Rows) -> dict[str, list[Result]]:
    """Return the results of the seeds that all rows have, since some rows have more seeds."""
    seeds = set.intersection(*({r.get("seed") for r in results} for results in rows.values()))
    return {row: [r for r in own if r.get("seed") in seeds] for row, own in rows.items()}


def shown(difference: Any, metric: Metric) -> tuple[str, str, str]:
    """Return a difference, its interval, and their verdict on `better`."""
    assert isinstance(difference, Difference), difference
    value, low, high = map(metric.shown, (difference.value, difference.low, difference.high))
    good = metric.order(difference.value) < 0
    names = ("holds", "leans") if good else ("contradicted", "does not hold")
    return f"{value:+.2f}", f"{low:+.2f} to {high:+.2f}", names[not difference.significant]


def verdicts(claim: Claim, data: Path, runs: Path) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a claim's table."""
    for path in claim.tables:
        yield from verdicts_in(path, claim, data, runs)


def verdicts_in(path: Path, claim: Claim, data: Path, runs: Path) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a claim's table for one table file."""
    known = read_table(path)[0]
    columns = [column.name for column in known.columns if column.name in claim.columns]
    if claim.columns and not columns:
        return
    whole = SIZE if path.parent.name == REAL else "full"
    for regime in (None, *known.regimes):
        for column, spec, rows, floor_of in runs_of(path, columns, regime, data, runs):
            floors: list[Result] | None = None
            if claim.clients:
                rows = {n: [of_clients(r, claim.clients) for r in own] for n, own in rows.items()}
            for test in (test.among({row for row in rows if rows[row]}) for test in claim.tests):
                if test is not None:
                    every = [result for row in test.rows for result in rows[row]]
                    metric = shown_of(every, spec.shows)
                    if floors is None and metric.share:
                        floors = floor_of(rows)
                        if claim.clients:
                            floors = [of_clients(floor, claim.clients) for floor in floors]
                    low = at_floor({row: rows[row] for row in test.rows}, floors or (), metric)
                    for cells in tried(test, rows, metric, low):
                        yield (str(claim.number), regime or whole, column, *cells)


def main(
    data: Annotated[Path, typer.Argument(help="Folder of the data of the runs.")],
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = ROOT / "runs",
) -> None:
    """Test all claims for which there are runs, and write the tables on the papers' pages."""
    papers = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    for paper, claims in papers.items():
        rows: list[tuple[str, ...]] = []
        for claim in map(Claim.model_validate, claims):
            tests = list(verdicts(claim, data, runs))
            Console().print(f"{paper}: {claim.claim} {len(tests)} tests")
            rows += tests
        page = ROOT / f"{paper.lower()}.md"
        write_text(page, with_tests(page.read_text(encoding="utf-8"), rows))


def with_tests(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a page whose table of tests contains these rows.

    The page's earlier rows are kept, except those of the same claim, regime, column and test.
    """
    before, _, rest = page.partition(START)
    earlier, _, after = rest.partition(END)
    cells = (line.strip("| ").split(" | ") for line in earlier.splitlines())
    known = {tuple(row[:4]): row for row in cells if row[0].isdecimal() and len(row) > 1}
    merged = known | {tuple(row[:4]): row for row in rows}
    ordered = sorted(merged.values(), key=lambda row: int(row[0]))
    table = Table("Every test, with 95 % intervals", HEADINGS, ordered).markdown()
    return f"{before}{START}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    typer.run(main)
