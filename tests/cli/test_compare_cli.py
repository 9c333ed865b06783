"""What `coterie compare` leaves in a folder of results."""

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
    table = {"table": "T", "run": run, "columns": [{"name": "A"}], "rows": [{"method": "local"}]}
    file, out, docs = (tmp_path / name for name in ("mine.yaml", "out", "docs"))
    file.write_text(yaml.safe_dump(table))
    data = f"data_root={run['data_root']}"
    said = compare(file, "--set", data, "--seeds", 2, "--out", out, "--write-docs", docs)
    assert f"Page: {docs}/mine.md" in said
    assert (docs / "mine.json").read_text() == (out / "table.json").read_text()
    page = (docs / "mine.md").read_text()
    assert f"coterie compare {file} --set data_root=DATA --seeds 2\n" in page
    assert (out / "table.md").read_text() in page


def test_a_run_file_has_no_page(values, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values(rounds=1)))
    with pytest.raises(CoterieError, match="--write-docs needs a table file"):
        compare(file, "--write-docs", tmp_path / "docs")
