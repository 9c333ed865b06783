"""Figures of filled-in tables: what they draw is what the result file holds."""

import re
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coterie import CoterieError
from coterie.analysis.experiments import MEAN
from coterie.report.page import write_report
from coterie.report.style import LIGHT, Canvas
from reproduce.drawing import pictures, write_pictures
from reproduce.pages import IMAGES, pages, runs_name, write_docs
from reproduce.report import app, sections
from reproduce.tables import compare_table
from tests.report.drawing import drawn

ROWS = ("local", "fedavg", "not run")


def summary(kind: str | None = None, paper: bool = True, **row: Any) -> dict[str, Any]:
    """Return two columns of three rows, of which the last has not run.

    row: more values of each row that has run.
    """

    def entry(place: int, name: str) -> dict[str, Any]:
        figures = {"paper": 90.0 - place if paper else None, "paper_std": 0.5, "paper_rank": 1}
        ran = {"seeds": 2, "accuracy": 0.1 * place, "std": 0.01, "rank": 1, "rank_of_all": 1}
        none = {"seeds": 0, "rank": None, "rank_of_all": None}
        return {"row": name, **(none if name == "not run" else ran | row), **figures}

    columns = [
        {"name": name, "note": "", "metric": "accuracy", "correlation": None,
         "rows": [entry(first + place, row) for place, row in enumerate(ROWS)]}
        for first, name in ((1, "10"), (4, "20"))
    ]  # fmt: skip
    figure = {"figure": {"kind": kind, "x": "clients", "y": "method"}} if kind else {}
    return {
        "table": "T",
        "shows": "scores",
        "file": "recipes/one.yaml",
        "regime": None,
        "command": "python -m reproduce recipes/one.yaml",
        "paper": "",
        "split": "test",
        **figure,
        "columns": columns,
    }


def axes_of(table: dict[str, Any]) -> list[Any]:
    return drawn(pictures(table)).draw(Canvas(LIGHT)).axes


def points(line: Any) -> list[tuple[float, float]]:
    return [(round(float(x), 6), round(float(y), 6)) for x, y in line.get_xydata()]


def test_dots_stand_at_the_means_and_hollow_ones_at_the_papers_figures() -> None:
    first, second, above, _ = axes_of(summary())  # the paper's figures have a scale of their own
    assert (first.get_title(), second.get_title()) == ("10", "20")
    assert [label.get_text() for label in first.get_yticklabels()] == list(ROWS)
    (ours,), (papers,) = first.containers, above.containers
    assert points(ours.lines[0])[:2] == [(10, -0.14), (20, 0.86)]
    assert points(papers.lines[0]) == [(89, 0.14), (88, 1.14), (87, 2.14)]
    assert papers.lines[0].get_markerfacecolor() == "none"
    (bars,) = ours.lines[2]
    (left, _), (right, _) = bars.get_segments()[0]
    assert (left, right) == pytest.approx((9, 11))
    (alone, _) = (axis.containers for axis in axes_of(summary(paper=False)))
    assert len(alone) == 1


def test_lines_run_over_the_columns() -> None:
    (axis,) = axes_of(summary("lines"))
    assert [label.get_text() for label in axis.get_xticklabels()] == ["10", "20"]
    assert axis.get_xlabel() == "clients"
    lines = {line.get_label(): points(line) for line in axis.lines}
    assert lines["local"] == [(0, 10), (1, 40)]
    assert lines["fedavg"] == [(0, 20), (1, 50)]
    assert "not run" not in lines
    assert [(0, 89), (1, 86)] in lines.values()  # the paper's


def test_a_heat_map_has_ours_and_the_papers() -> None:
    ours, papers, *_ = axes_of(summary("heat map"))
    assert ours.images[0].get_array()[:2].tolist() == [[10, 40], [20, 50]]
    assert papers.images[0].get_array().tolist() == [[89, 86], [88, 85], [87, 84]]
    assert (ours.get_xlabel(), ours.get_ylabel()) == ("clients", "method")
    assert [text.get_text() for text in ours.texts] == ["10.00", "40.00", "20.00", "50.00"]


def test_curves_have_a_picture_per_column_and_a_panel_per_client() -> None:
    mean = {MEAN: [0.3, 0.4], "anna": [0.2, None], "ben": [0.4, 0.5]}
    rounds = {"round": [2, 4], "mean": mean, "std": {name: [0.0, 0.1] for name in mean}}
    table = summary("curves", rounds=rounds)
    assert [picture.name for picture in pictures(table)] == ["scores-10", "scores-20"]
    axes = drawn(pictures(table)[:1]).draw(Canvas(LIGHT)).axes
    panels = {axis.get_title(): axis.lines for axis in axes}
    assert list(panels) == [MEAN, "anna", "ben"]
    assert [line.get_label() for line in panels[MEAN]] == ["local", "fedavg"]
    assert points(panels["ben"][0]) == [(2, 40), (4, 50)]
    assert points(panels["anna"][0]) == [(2, 20)]


def test_what_has_no_scores_has_no_figure() -> None:
    with pytest.raises(CoterieError, match="'T' shows no scores"):
        pictures({"shows": "jaccard", "table": "T", "columns": {}})
    nothing = summary()
    for column in nothing["columns"]:
        column["rows"] = column["rows"][2:]
    with pytest.raises(CoterieError, match="No row of 'T' has been run yet"):
        pictures(nothing)


def test_a_page_shows_its_picture_until_there_are_other_results(tmp_path) -> None:
    page = write_docs(summary(), tmp_path)
    assert "![" not in page.read_text()
    write_pictures(summary(), tmp_path)
    text = pages(tmp_path)[page]
    assert (
        "![Dots of mean test accuracy (%) by row, with a panel for each of 10 and 20; filled"
        in text
    )
    assert f"]({IMAGES}/one.png)" in text
    write_docs(summary(paper=False), tmp_path)
    assert "![" not in page.read_text()


def test_a_report_draws_a_result_file_and_a_folder_that_has_one(tmp_path) -> None:
    file = write_docs(summary(), tmp_path / "docs").with_suffix(".json")
    report = write_report([], tmp_path / "report", sections=sections([file]))
    assert [section.name for section in report.sections] == ["recipes-one"]
    names = {path.name for path in report.figures.iterdir()}
    assert names == {f"scores-{t}.{k}" for t in ("light", "dark") for k in ("svg", "png")}
    assert "<caption>T</caption>" in report.page.read_text()
    other = {**summary(), "file": "other/one.yaml"}
    nothing = {**summary(), "file": "recipes/none.yaml", "shows": "jaccard"}
    nothing |= {"columns": {"AG News": {"anna": {"anna": 0.5}}}}
    paths = [write_docs(s, tmp_path / str(n)) for n, s in enumerate((other, nothing))]
    files = [file, *(p.with_suffix(".json") for p in paths)]
    report = write_report([], tmp_path / "report", sections=sections(files))
    assert [section.name for section in report.sections] == [
        "recipes-one",
        "other-one",
        "recipes-none",
    ]
    assert len(list(report.figures.iterdir())) == 8  # two of each theme and kind
    assert [item.why for item in report.sections[2].left_out] == [
        "'T' shows no scores, so it has no figure."
    ]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CoterieError, match=r"run\.json is not the result file of a table"):
        sections([tmp_path / "run.json"])


def test_the_command_draws_a_tables_folder_and_its_runs(values, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.cli.terminal.say", print)
    run = values(rounds=1)
    del run["method"]
    table = {"table": "T", "run": run, "columns": [{"name": "A"}], "rows": [{"method": "local"}]}
    file, out = tmp_path / "mine.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump(table))
    compare_table(file, out=out)
    output = CliRunner().invoke(app, [str(out)], catch_exceptions=False).output
    folder = runs_name({"file": str(file), "regime": None})
    assert re.search(rf"^{folder}: 1 figure$", output, re.MULTILINE)
    assert re.search(r"^a: [0-9]+ figures$", output, re.MULTILINE)
    assert f"Report: {out / 'report' / 'report.html'}" in output
    (out / "table.json").write_text("{}")
    with pytest.raises(CoterieError, match=r"table\.json is not the result file of a table"):
        CliRunner().invoke(app, [str(out)], catch_exceptions=False)
    with pytest.raises(CoterieError, match="nor a table's result file"):
        CliRunner().invoke(app, [str(tmp_path / "no.json")], catch_exceptions=False)
