"""Regret, harmed clients and costs, computed from invented run folders."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from coterie.analysis.tables import Table
from coterie.cli import terminal
from coterie.config.run import parse
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from coterie.runs.folder import describe
from reproduce.pages import pages, shown, write_docs
from reproduce.regret import app, read_cells
from reproduce.scenarios import scenarios

ROWS = ("pretrained", "local", "fedavg", "comigs-1g1s", "auto")
CLIENTS = [{"name": "a", "path": "a.txt"}, {"name": "b", "path": "b.txt"}]
EXCLUDED = ("auto", "grouped", "pretrained")
Windows = Mapping[str, Sequence[float]]
"""For each client, the loss per token in every window, or whether a pair is ranked correctly."""


def write_cell(
    runs: Path, scenario: str, row: str, seed: int, windows: Windows, rounds: int = 12
) -> Path:
    """Write the folder of a finished run, whose windows have ten tokens, and return its path."""
    name = f"{row}-seed{seed}"
    run = parse(
        {"name": name, "seed": seed, "rounds": rounds, "method": "local", "clients": CLIENTS}
    )
    folder = RunFolder.create(runs / scenario / f"{name}-{rounds}", describe(run.as_dict(), {}, {}))
    scores: dict[str, dict[str, float]] = {}
    for client, losses in windows.items():
        items: dict[str, Any] = {"of": f"{client}{seed}", "tokens": [10] * len(losses)}
        if scenario == "preferences":
            items |= {"nats": [10.0] * len(losses), "reward_accuracy": list(losses)}
            scores[client] = {"perplexity": exp(1), "reward_accuracy": fmean(losses)}
        else:
            items |= {"nats": [10 * loss for loss in losses]}
            scores[client] = {"perplexity": exp(fmean(losses))}
        folder.keep_items("trained", client, items)
    seconds, traffic = 10.0 * (1 + ROWS.index(row)), {"up": 10**6 * ROWS.index(row), "down": 0}
    folder.finish(
        {"method": row, "reports": "trained", "trained": scores, "aggregated": {}}
        | {"seconds": seconds, "traffic": traffic}
    )
    return folder.path


@pytest.fixture
def table(tmp_path) -> Callable[..., Path]:
    """A function that writes a table file with some scenarios and seeds."""

    def write(*columns: str, seeds: int = 1) -> Path:
        path = tmp_path / "grid.yaml"
        names = [{"name": name} for name in columns]
        rows = [{"method": row} for row in ROWS]
        values = {"table": "T", "seeds": seeds, "run": {"clients": CLIENTS}}
        path.write_text(yaml.safe_dump({**values, "columns": names, "rows": rows}))
        (tmp_path / "runs").mkdir(exist_ok=True)
        return path

    return write


def column_of(layouts: Sequence[Table], title: str, head: str) -> dict[str, str]:
    """Return the first column with a heading, by row, of the table with a title."""
    [layout] = [layout for layout in layouts if layout.title == title]
    number = list(layout.columns).index(head)
    return {row[0]: row[number] for row in layout.rows}


def test_regret_is_that_of_naive_loops(table, tmp_path) -> None:
    """Compare the values with loops over scenarios, seeds and clients."""
    chance = np.random.default_rng(0)
    file, runs = table("x", "y", seeds=3), tmp_path / "runs"
    losses: dict[tuple[str, str, int], list[float]] = {}
    for scenario in "xy":
        for row in ROWS:
            for seed in range(3):
                cell = {client: chance.uniform(2, 4, 40).tolist() for client in "ab"}
                write_cell(runs, scenario, row, seed, cell)
                losses[scenario, row, seed] = [fmean(windows) for windows in cell.values()]
    summary = read_cells(runs, file, EXCLUDED)
    regrets: dict[str, dict[str, float]] = {row: {} for row in ROWS}
    for scenario in "xy":
        by_seed: dict[str, list[float]] = {row: [] for row in ROWS}
        for seed in range(3):
            means = {
                row: fmean(fmean(losses[scenario, row, other]) for other in {0, 1, 2} - {seed})
                for row in ("local", "fedavg", "comigs-1g1s")
            }
            best = min(means, key=lambda row: means[row])
            for row in ROWS:
                cells = zip(losses[scenario, row, seed], losses[scenario, best, seed], strict=True)
                by_seed[row].append(fmean(ours - others for ours, others in cells))
        for row in ROWS:
            regrets[row][scenario] = fmean(by_seed[row])
    for scenario in scenarios(summary):
        for row, regret in scenario.regrets().items():
            assert regret.value == pytest.approx(regrets[row][scenario.name], abs=1e-5)
            assert regret.low < regret.value < regret.high
    layouts, title = shown(summary), "Regret in nats per token"
    for row in ROWS:
        worst = max(regrets[row].values())
        mean = column_of(layouts, title, "mean")[row].split()[0]
        assert float(mean) == pytest.approx(fmean(regrets[row].values()), abs=6e-4)
        assert float(column_of(layouts, title, "worst")[row]) == pytest.approx(worst, abs=6e-4)
        assert regrets[row][column_of(layouts, title, "worst scenario")[row]] == worst
        change = float(column_of(layouts, title, "perplexity change")[row].split()[0])
        assert change == pytest.approx(100 * (exp(worst) - 1), abs=0.06)


LOCAL, FEDAVG = (2.0, 2.0, 2.6), (2.1, 2.1, 2.1)
"""The losses of two rows with three seeds."""


@pytest.mark.parametrize(
    ("seeds", "best", "local", "fedavg"),
    [
        (3, ["fedavg", "fedavg", "local"], (-0.1 - 0.1 + 0) / 3, (0 + 0 - 0.5) / 3),
        (1, ["local"], 0, 0.1),
    ],
)
def test_the_best_method_is_picked_on_the_other_seeds(
    table, tmp_path, seeds: int, best: list[str], local: float, fedavg: float
) -> None:
    """Pick local, the better one with seeds 0 and 1, for seed 2 only."""
    file = table("x", seeds=seeds)
    for seed in range(seeds):
        for row, losses in {"local": LOCAL, "fedavg": FEDAVG, "comigs-1g1s": (9, 9, 9)}.items():
            write_cell(tmp_path / "runs", "x", row, seed, {"a": [losses[seed]] * 3})
    summary = read_cells(tmp_path / "runs", file, EXCLUDED)
    [scenario] = scenarios(summary)
    assert list(scenario.best().values()) == best
    regrets = scenario.regrets()
    assert regrets["local"].value == pytest.approx(local)
    assert regrets["fedavg"].value == pytest.approx(fedavg)
    layouts = shown(summary)
    [note] = [layout.note for layout in layouts if layout.title == "Best single methods"]
    assert ("optimistic" in note) == (seeds == 1)
    assert ("One seed" in layouts[0].note) == (seeds == 1)
    assert ("picked on the other seeds" in note) == (seeds == 3)


def test_harmed_clients_and_costs_by_hand(table, tmp_path) -> None:
    """Count clients that lose more than 1 % or 1 point, and those beyond the noise of the test."""
    file, runs = table("x", "preferences"), tmp_path / "runs"
    noisy, slight = [2.5, 4.0, 2.6, 4.1], [3 + log(1.009)] * 4
    cells: dict[str, Windows] = {
        "pretrained": {"a": [4.0] * 4, "b": [3.0] * 4},
        "local": {"a": [2.0] * 4, "b": [3.0] * 4},
        "fedavg": {"a": [2.03] * 4, "b": slight},  # a: certainly worse; b: by 0.9 % only
        "comigs-1g1s": {"a": [1.9] * 4, "b": noisy},  # b: worse, but not certainly
    }
    right: dict[str, Windows] = {
        "local": {"a": [1, 1, 1, 0], "b": [1, 0, 0, 0]},
        "fedavg": {"a": [0, 0, 0, 1], "b": [1, 1, 1, 1]},  # a: worse, but not certainly
    }
    for scenario, by_row in {"x": cells, "preferences": right}.items():
        for row, windows in by_row.items():
            write_cell(runs, scenario, row, 0, windows)
    summary = read_cells(runs, file, EXCLUDED)
    layouts, title, local = shown(summary), "Clients that are worse off", "worse than local"
    worse = {"pretrained": "1/2 (50%)", "fedavg": "2/4 (50%)", "comigs-1g1s": "1/2 (50%)"}
    assert column_of(layouts, title, local) == {**worse, "local": "", "auto": ""}
    beyond = {"pretrained": "1", "fedavg": "1", "comigs-1g1s": "0", "local": "", "auto": ""}
    assert column_of(layouts, title, "beyond noise") == beyond
    assert column_of(layouts, title, "worse than pretrained")["fedavg"] == "0/2 (0%)"
    points = column_of(layouts, "Regret in points", "preferences")
    assert points["fedavg"] == "0.0 [0.0, 0.0]"
    assert points["local"].split()[0] == "12.5"
    [layout] = [layout for layout in layouts if layout.title == "Time and traffic of a run"]
    assert layout.rows[1] == ["local", "20", "0.50", "1.00", "0.33"]  # no comigs on preferences


def test_missing_cells_are_named_and_not_used(table, tmp_path) -> None:
    """Use the only seed with which all single methods are finished, and name the others' gaps."""
    file, runs = table("x", "y", seeds=2), tmp_path / "runs"
    for row in ROWS:
        for seed in (0,) if row == "fedavg" else (0, 1):
            write_cell(runs, "x", row, seed, {"a": [2.0 + seed] * 3})
    write_cell(runs, "y", "auto", 0, {"a": [2.0] * 3})
    summary = read_cells(runs, file, EXCLUDED)
    layouts = shown(summary)
    missing = column_of(layouts, "Missing cells", "methods")
    assert missing == {"x": "fedavg (1)", "y": "pretrained, local, fedavg, comigs-1g1s, auto (1)"}
    first, second = scenarios(summary)
    assert list(first.best()) == ["0"]
    assert second.regrets() == {}
    assert column_of(layouts, "Regret in nats per token", "scenarios")["auto"] == "1/2"


def test_a_candidate_that_misses_seeds_and_is_behind_is_ignored(table, tmp_path) -> None:
    """Use both seeds, although fedavg has only the first, where local is better."""
    file, runs = table("x", seeds=2), tmp_path / "runs"
    for row, seed, loss in (("local", 0, 2.0), ("local", 1, 3.0), ("fedavg", 0, 2.1)):
        write_cell(runs, "x", row, seed, {"a": [loss] * 3})
    [scenario] = scenarios(read_cells(runs, file, EXCLUDED))
    assert scenario.best() == {"0": "local", "1": "local"}
    assert scenario.regrets()["fedavg"].value == pytest.approx(0.1)


def test_a_page_keeps_the_cells_whose_run_folders_are_gone(table, tmp_path, monkeypatch) -> None:
    """Write a page, delete a run, write the page again, and refuse runs with other settings."""
    file, runs, docs = table("x", seeds=2), tmp_path / "runs", tmp_path / "docs"

    def run() -> str:
        words = [str(runs), "--table", str(file), "--write-docs", str(docs)]
        return CliRunner().invoke(app, words, catch_exceptions=False).output

    monkeypatch.setattr(terminal, "console", terminal.Console(width=80))
    paths = [
        write_cell(runs, "x", row, seed, {"a": [2 + seed + number / 7, 3.0]})
        for number, row in enumerate(ROWS)
        for seed in (0, 1)
    ]
    printed, page = run(), (docs / "grid.md").read_text()
    assert f"Page: {docs}/grid.md" in printed
    assert "](grid.md)" in (docs / "README.md").read_text()
    assert "Missing cells" not in printed
    assert all(path.read_text() == text for path, text in pages(docs).items())
    kept = json.loads((docs / "grid.json").read_text())
    for path in paths[1::2]:
        shutil.rmtree(path)
    run()
    assert json.loads((docs / "grid.json").read_text()) == kept
    assert (docs / "grid.md").read_text() == page
    with pytest.raises(CoterieError, match=r"holds the regret of .*; choose another folder"):
        write_docs({**kept, "shows": "scores", "columns": []}, docs)
    write_cell(runs, "x", "local", 1, {"a": [1.0, 2.0]}, rounds=13)
    with pytest.raises(
        CoterieError, match="x, local: the cells with the seeds 0, 1 have different"
    ):
        run()
    write_cell(runs, "x", "local", 1, {"a": [1.0, 2.0]}, rounds=14)
    with pytest.raises(CoterieError, match="are runs of the same cell; remove the outdated"):
        run()
