"""What `coterie compare` says and writes."""

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError


def compare(*arguments: object) -> str:
    words = ["compare", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False).output


def test_a_comparison_is_numbered_and_told_against_a_row(values, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.cli.terminal.say", print)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values(rounds=1)))
    words = ["--methods", "pretrained,local", "--out", tmp_path / "out"]
    said = compare(file, *words, "--against", "pretrained")
    assert "Run 1 of 2: pretrained-seed0\n" in said
    assert "Run 2 of 2: local-seed0\n" in said
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "| method | difference from pretrained | 95 % interval | p |" in page
    assert "no significant difference from pretrained" in page
    with pytest.raises(CoterieError, match="no row 'fedavg' to compare with"):
        compare(file, *words, "--against", "fedavg")
