"""Pages of results: what they hold comes from the result file alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import CoterieError
from reproduce.pages import INDEX, pages, shown, write_docs
from reproduce.paper import PaperColumn, PaperTable

SCORES = {"a": {"perplexity": 3, "bits_per_byte": 2}, "b": {"perplexity": 5, "bits_per_byte": 1}}
RESULT = {"reports": "trained", "trained": SCORES, "aggregated": SCORES}


def scores(file: str, regime: str | None = None) -> dict[str, Any]:
    """Return the summary of a table of scores, as compare_table makes it."""
    head = {"table": "T", "shows": "scores", "file": file, "regime": regime}
    head["command"] = f"python -m reproduce {file}"
    results = {"fedavg": [RESULT, RESULT], "local": []}
    column = PaperColumn("X", results, {"local": 9}, note="other texts")
    return PaperTable(head, "GPT-2", "test", [column]).summary()


SHARES = {"X": {"a": {"a": 1, "b": 0.25}, "b": {"a": 0.25, "b": 1}}}
FIELD = {"way": "up", "field": "adapter", "what": "pairs", "bytes": {"a": 9}}
FIELDS = {"X": {"fedavg": [FIELD]}}


@pytest.mark.parametrize(
    "summary",
    [
        scores("t.yaml"),
        {"table": "T", "shows": "jaccard", "columns": SHARES},
        {"table": "T", "shows": "messages", "columns": FIELDS},
    ],
    ids=lambda summary: summary["shows"],
)
def test_tables_can_be_shown_from_what_json_keeps(summary) -> None:
    assert shown(json.loads(json.dumps(summary))) == shown(summary)


def test_what_is_not_known_is_not_shown() -> None:
    ranks = {"rank": 1, "paper": None, "paper_rank": None}
    row: dict[str, Any] = {"row": "fedit", "seeds": 1, "accuracy": 0.5, "rank_of_all": 1, **ranks}
    column = {"name": "X", "note": "", "metric": "accuracy", "correlation": None, "rows": [row]}
    summary = {"table": "T", "shows": "scores", "paper": "", "split": "test", "columns": [column]}
    (layout,) = shown(summary)
    assert layout.rows == [["fedit", "50.00", "1"]]
    row |= {"clients": {"a": 0.4, "b": 0.6}, "server": None}
    _, clients = shown(summary)
    assert clients.columns == ["method", "a", "b", "mean", "worst client", "rank"]
    assert clients.rows == [["fedit", "40.00", "60.00", "50.00", "40.00 (a)", "1"]]


def test_a_table_is_kept_with_its_page_and_listed(tmp_path) -> None:
    folder = tmp_path / "docs" / "results"
    for file in ("recipes/two.yaml", "recipes/one.yaml"):
        assert write_docs(scores(file), folder) == folder / f"{Path(file).stem}.md"
    assert json.loads((folder / "one.json").read_text()) == scores("recipes/one.yaml")
    page = (folder / "one.md").read_text()
    assert "python -m reproduce recipes/one.yaml\n" in page
    assert "| fedavg | 4.00 (0.00) |" in page
    assert (folder / INDEX).read_text().count("](one.md)") == 1
    assert all(path.read_text() == text for path, text in pages(folder).items())


def test_a_regime_has_a_page_of_its_own(tmp_path) -> None:
    page = write_docs(scores("recipes/one.yaml", "Quarter"), tmp_path)
    assert page == tmp_path / "one-quarter.md"
    assert write_docs(scores("recipes/one.yaml"), tmp_path) == tmp_path / "one.md"
    assert "](one-quarter.md)" in (tmp_path / INDEX).read_text()


def test_a_remark_stands_on_its_page_until_the_table_is_measured_again(tmp_path) -> None:
    summary = scores("one.yaml")
    path = write_docs({**summary, "remark": "Measured long ago."}, tmp_path)
    assert "\n*Measured long ago.*\n" in path.read_text()
    assert "](one.md) (with a remark)" in (tmp_path / INDEX).read_text()
    write_docs(summary, tmp_path)
    assert "long ago" not in path.read_text()
    assert "remark" not in (tmp_path / INDEX).read_text()


def test_what_is_written_around_the_list_stays(tmp_path) -> None:
    (tmp_path / INDEX).write_text("# Ours\n\nBefore.\n")
    write_docs(scores("one.yaml"), tmp_path)
    index = (tmp_path / INDEX).read_text()
    assert index.startswith("# Ours\n\nBefore.\n\n<!--")
    (tmp_path / INDEX).write_text(index + "\nAfter.\n")
    write_docs(scores("two.yaml"), tmp_path)
    lines = (tmp_path / INDEX).read_text().splitlines()
    assert [line for line in lines if line.startswith("- ")] == ["- [T](one.md)", "- [T](two.md)"]
    assert lines[-2:] == ["", "After."]


def test_another_tables_results_are_not_overwritten(tmp_path) -> None:
    write_docs(scores("comigs/table4.yaml"), tmp_path)
    with pytest.raises(CoterieError, match=r"holds the results of comigs/table4\.yaml; choose"):
        write_docs(scores("pcl/table4.yaml"), tmp_path)
