"""What `coterie compare` leaves in a folder of results."""

import sys

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError


def compare(*arguments: object) -> str:
    words = ["compare", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False).output


def test_a_tables_results_become_a_page(values, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.cli.terminal.say", print)
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
    said = compare(file, "--set", data, "--seeds", 2, "--out", out, "--write-docs", docs)
    assert f"Page: {docs}/mine.md" in said
    assert (docs / "mine.json").read_text() == (out / "table.json").read_text()
    page = (docs / "mine.md").read_text()
    assert f"coterie compare {file} --set data_root=DATA --seeds 2\n" in page
    assert (out / "table.md").read_text() in page
    assert "](images/mine.png)" in page
    assert (docs / "images" / "mine.png").read_bytes().startswith(b"\x89PNG")
    for name in [name for name in sys.modules if name.startswith("coterie.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    regime = ("--regime", "one step", "--set", data)
    said = compare(file, *regime, "--out", tmp_path / "other", "--write-docs", docs)
    assert f"Page: {docs}/mine-one-step.md" in said
    assert "The page has no picture, which needs matplotlib" in said
    page = (docs / "mine-one-step.md").read_text()
    assert f"coterie compare {file} --regime 'one step' --set data_root=DATA\n" in page
    assert page.startswith("# T: one step\n")


def test_a_run_file_has_no_page(values, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values(rounds=1)))
    with pytest.raises(CoterieError, match="--write-docs needs a table file"):
        compare(file, "--write-docs", tmp_path / "docs")
    with pytest.raises(CoterieError, match="--regime needs a table file"):
        compare(file, "--regime", "quarter")


def test_a_comparison_is_numbered_and_told_against_a_row(values, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.cli.terminal.say", print)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values(rounds=1)))
    words = ["--methods", "pretrained,local", "--out", tmp_path / "out"]
    said = compare(file, *words, "--against", "pretrained")
    assert "Run 1 of 2: pretrained-seed0\n" in said
    assert "Run 2 of 2: local-seed0\n" in said
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "| method | less pretrained | 95 % interval | p |" in page
    assert "no significant difference from pretrained" in page
    with pytest.raises(CoterieError, match="no row 'fedavg' to compare with"):
        compare(file, *words, "--against", "fedavg")
