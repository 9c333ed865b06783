"""Tests of the output and the files of `python -m reproduce`."""

import sys

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import terminal
from reproduce.__main__ import app
from tests.cli.test_startup import SLOW, outcome


@pytest.fixture
def reproduce(monkeypatch):
    """Runs `python -m reproduce ...` in this process, 80 columns wide, and returns its output."""

    def command(*arguments: object) -> str:
        words = list(map(str, arguments))
        result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "80"})
        assert result.exit_code == 0
        return result.output

    monkeypatch.setattr(terminal, "console", terminal.Console(width=80))
    return command


def test_a_table_is_filled_in(values, tmp_path, reproduce) -> None:
    run = values(rounds=1)
    del run["method"]
    table = {"table": "T", "run": run, "columns": [{"name": "A"}, {"name": "B"}]}
    rows = [{"method": "pretrained", "paper": [9, 8]}, {"method": "local", "paper": [7, 6]}]
    file = tmp_path / "table.yaml"
    file.write_text(yaml.safe_dump({**table, "rows": rows}))
    out = tmp_path / "out"
    reproduce(file, "--out", out, "--columns", "b", "--methods", "local")
    assert "local-seed0" in "".join(p.name for p in (out / "b").iterdir())
    assert not (out / "a").exists()
    lines = reproduce(file, "--out", out, "--set", "seed=3").splitlines()
    tables = [line for line in lines if "tokens/s" not in line]  # progress is not cut
    assert max(map(len, tables)) <= max(80, len(str(out)) + 40)
    heads = [line.split() for line in lines if line.startswith("method")]
    assert heads[0] == ["method", "A", "rank", "paper", "rank", "B", "rank", "paper", "rank"]
    assert f"Saved to {out}/table.md and table.json." in lines


def test_a_tables_results_become_a_page(values, tmp_path, monkeypatch, reproduce) -> None:
    run = values(rounds=1)
    del run["method"]
    table = {
        "table": "T",
        "run": run,
        "regimes": {"one step": {"training": {"steps": 1}}},
        "columns": [{"name": "A"}],
        "rows": [{"method": "local"}],
    }
    file, out, docs = (tmp_path / name for name in ("mine.yaml", "out", "docs"))
    file.write_text(yaml.safe_dump(table))
    data = f"data_root={run['data_root']}"
    output = reproduce(file, "--set", data, "--seeds", 2, "--out", out, "--write-docs", docs)
    assert f"Page: {docs}/mine.md" in output
    assert (docs / "mine.json").read_text() == (out / "table.json").read_text()
    page = (docs / "mine.md").read_text()
    assert f"python -m reproduce {file} --set data_root=DATA --seeds 2\n" in page
    assert (out / "table.md").read_text() in page
    assert "](images/mine.png)" in page
    assert (docs / "images" / "mine.png").read_bytes().startswith(b"\x89PNG")
    for name in [name for name in sys.modules if name.startswith("coterie.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "reproduce.drawing")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    regime = ("--regime", "one step", "--set", data)
    output = reproduce(file, *regime, "--out", tmp_path / "other", "--write-docs", docs)
    assert f"Page: {docs}/mine-one-step.md" in output
    assert "The page has no picture, which needs matplotlib" in output
    page = (docs / "mine-one-step.md").read_text()
    assert f"python -m reproduce {file} --regime 'one step' --set data_root=DATA\n" in page
    assert page.startswith("# T: one step\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--help", "Fill a paper's table in again"),
        ("nofile.yaml", "no run file nofile.yaml"),
        ("run.yaml", "run.yaml is a run file; use `coterie run` or `coterie compare`."),
        ("table.yaml", "In column 'A': Unknown key 'rouns'"),
        ("table.yaml --columns B", "no column 'B'"),
    ],
)
def test_a_mistake_costs_no_import_of_torch(command, message, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("rounds: 3\n", encoding="utf-8")
    (tmp_path / "table.yaml").write_text(
        "table: t\nrows: [{method: local}]\ncolumns: [{name: A, run: {rouns: 3}}]\n",
        encoding="utf-8",
    )
    text, modules = outcome(tmp_path, command, "reproduce.__main__")
    assert message in text
    assert not SLOW & modules
