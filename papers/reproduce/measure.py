"""Measure all small tables again, in every regime, smallest first, and write their pages.

The grid is not among them: its cells take hours, and `reproduce.regret` writes its page.

`python -m reproduce.measure DATA` can be stopped at any time; started again, it keeps the
cells that are finished. What a table prints goes to runs/NAME.log.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coterie.files import writing
from reproduce.pages import write_pages
from reproduce.table_file import is_table, read_table, table_folder

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "recipes" / "small"
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Job:
    """A table in one regime; None stands for the settings of its `run` alone."""

    path: Path
    regime: str | None
    cells: int

    @property
    def name(self) -> str:
        """The name of the table's folder of runs."""
        return table_folder(self.path, self.regime).name

    def run(self, data: Path, seeds: int) -> bool:
        """Fill the table in on one thread, and return whether that succeeded."""
        command = [sys.executable, "-m", "reproduce", str(self.path.relative_to(ROOT))]
        command += ["--set", f"data_root={data.resolve()}", "--seeds", str(seeds)]
        command += ["--regime", self.regime] if self.regime else []
        command += ["--write-docs", "results"]
        console.print(f"{self.name}: {self.cells} cells, {seeds} seeds")
        log = ROOT / "runs" / f"{self.name}.log"
        with writing(log):
            log.parent.mkdir(exist_ok=True)
            with log.open("a", encoding="utf-8") as out:
                done = subprocess.run(
                    command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=out, stderr=out, check=False,
                )  # fmt: skip
        console.print(f"{self.name}: {'done' if done.returncode == 0 else f'failed, see {log}'}")
        return done.returncode == 0


def jobs(names: list[str]) -> list[Job]:
    """Return the jobs of some tables, or of all tables, the smallest first."""
    paths = [path for path in sorted(SMALL.glob("*.yaml")) if is_table(path)]
    tables = {path.stem: path for path in paths if not path.stem.startswith("grid")}
    if unknown := set(names) - set(tables):
        raise typer.BadParameter(f"no table {min(unknown)!r} (tables: {', '.join(tables)})")
    chosen = []
    for name, path in tables.items():
        if not names or name in names:
            spec, _ = read_table(path)
            cells = len(spec.rows) * len(spec.columns)
            chosen += [Job(path, regime, cells) for regime in (None, *spec.regimes)]
    return sorted(chosen, key=lambda job: job.cells)


def main(
    data: Annotated[Path, typer.Argument(help="Folder of your data.")],
    table: Annotated[
        list[str] | None, typer.Option(help="Only this table of recipes/small; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per cell.")] = 2,
    at_once: Annotated[
        int, typer.Option(min=1, help="Tables at once; each uses one core and about 1 GB.")
    ] = 1,
) -> None:
    """Measure the small tables in every regime, and write their pages to papers/results."""
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(lambda job: job.run(data, seeds), jobs(table or [])))
    write_pages(ROOT / "results")  # tables at once may have missed each other's pages
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    typer.run(main)
