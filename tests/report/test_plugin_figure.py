"""A figure in a file of one's own: examples/spread.py in reports."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from looped import succeed

import coterie
from coterie import CoterieError, ReportFigure
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


def test_an_installed_package_adds_figures(monkeypatch) -> None:
    coterie.load_plugin(EXAMPLE)
    kind = FIGURES.get("spread")
    monkeypatch.setattr(FIGURES, "registered", {})
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[kind.__module__])
    entry = EntryPoint("spread", "my_package:Spread", "coterie.figures")
    monkeypatch.setitem(vars(FIGURES), "entries", {"spread": entry})
    assert FIGURES.names() == ["spread"]
    assert FIGURES.get("spread") is kind


def test_an_unknown_figure_is_one_sentence() -> None:
    coterie.load_plugin(EXAMPLE)
    with pytest.raises(CoterieError, match=r"no figure 'spred'\. Did you mean 'spread'\?"):
        FIGURES.get("spred")
    with pytest.raises(CoterieError, match=r"dict'> cannot be registered; .*coterie\.ReportFigure"):
        coterie.register(dict)
    with pytest.raises(CoterieError, match="figure Nameless needs a `name`"):
        coterie.register(type("Nameless", (ReportFigure,), {}))
