"""A figure in a file of one's own: examples/spread.py in reports."""

from pathlib import Path

import pytest
from looped import succeed

import coterie
from coterie.report.figures import FIGURES
from coterie.report.page import write_report

EXAMPLE = Path(__file__).parents[2] / "examples" / "spread.py"


@pytest.fixture(autouse=True)
def _only_plugins(monkeypatch) -> None:
    monkeypatch.setattr(FIGURES, "builtin", {})


def test_a_report_has_the_figure_of_a_plugin(written, tmp_path) -> None:
    written("us/local", {"name": "local"}, perplexities=(11.0, 31.0))
    succeed("report", tmp_path / "us", "--out", tmp_path, "--plugin", EXAMPLE)
    assert (tmp_path / "figures" / "spread-light.svg").exists()
    assert "Best and worst client" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_figure_without_data_is_listed_with_the_reason(written, tmp_path) -> None:
    coterie.load_plugin(EXAMPLE)
    report = write_report([written("run", {"name": "local"}, perplexities=None)], tmp_path)
    ((left_out,),) = (section.left_out for section in report.sections)
    assert left_out.why == "no run has been evaluated yet"
