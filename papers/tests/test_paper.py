"""A paper's table against an example by hand."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from reproduce.paper import PaperColumn, PaperTable, correlation, score_tables


def result(*perplexities: float) -> dict[str, Any]:
    scores = {
        f"client-{n}": {"perplexity": value, "bits_per_byte": value / 10}
        for n, value in enumerate(perplexities)
    }
    return {"reports": "trained", "trained": scores, "aggregated": scores}


def table(results: dict[str, Any], **figures: Mapping[str, float | None]) -> PaperTable:
    columns = [
        PaperColumn(name, rows, figures[name], note="other texts" if name == "X" else "")
        for name, rows in results.items()
    ]
    return PaperTable({"table": "Table 4"}, "GPT-2", "test", columns)


@pytest.fixture
def example() -> PaperTable:
    """Column X: means 10 and 14 (2 seeds), 20, 30, 30; the paper has no figure for the last."""
    x = {
        "a": [result(8, 12), result(13, 15)],
        "b": [result(18, 22)],
        "c": [result(30, 30)],
        "d": [result(40, 20)],
        "e": [],
    }
    y = {"a": [result(2)], "b": [result(1)], "c": [], "d": [result(1)], "e": [result(4)]}
    return table(
        {"X": x, "Y": y},
        X={"a": 5, "b": 7, "c": 6, "d": None, "e": 1},
        Y={"a": 3, "b": 3, "c": 1, "d": 8, "e": 9},
    )


def test_ranks_are_over_the_rows_that_both_have(example) -> None:
    x, y = example.summary()["columns"]
    rows = {row["row"]: row for row in x["rows"]}
    assert rows["a"]["perplexity"] == 12
    assert rows["a"]["std"] == pytest.approx(8**0.5)
    assert [rows[r]["rank"] for r in "abcde"] == [1, 2, 3, None, None]
    assert [rows[r]["paper_rank"] for r in "abcde"] == [1, 3, 2, None, None]
    assert [rows[r]["seeds"] for r in "abcde"] == [2, 1, 1, 1, 0]
    assert [rows[r]["rank_of_all"] for r in "abe"] == [1, 2, None]
    # In Y b and d tie for us, a and b for the paper; c has not run.
    assert {r["row"]: (r["rank"], r["paper_rank"]) for r in y["rows"]} == {
        "a": (3, 1),
        "b": (1, 1),
        "c": (None, None),
        "d": (1, 3),
        "e": (4, 4),
    }


def test_the_correlation_by_hand_gives_ties_their_mean_rank(example) -> None:
    x, y = example.summary()["columns"]
    assert x["correlation"] == pytest.approx(1 - 6 * (0 + 1 + 1) / (3 * 8))  # no ties: 0.5
    ours, papers = [3, 1.5, 1.5, 4], [1.5, 1.5, 3, 4]  # a, b, d, e; both have the mean 2.5
    product = sum((o - 2.5) * (p - 2.5) for o, p in zip(ours, papers, strict=True))
    assert y["correlation"] == pytest.approx(product / sum((o - 2.5) ** 2 for o in ours))


def test_a_correlation_that_is_not_defined() -> None:
    assert correlation([]) is None
    assert correlation([{"perplexity": 1, "paper": 2}]) is None
    assert correlation([{"perplexity": p, "paper": 2} for p in (1, 3)]) is None
    assert correlation([{"perplexity": p, "paper": p} for p in (1, 2)]) is None  # too few
    assert correlation([{"perplexity": p, "paper": 2} for p in (1, 2, 3)]) is None


def accurate(*accuracies: float) -> dict[str, Any]:
    """Return results on prompts with answers, in which a lower accuracy has a lower perplexity."""
    scores = {
        f"client-{n}": {"perplexity": 9 * a, "bits_per_byte": a, "accuracy": a, "samples": 4}
        for n, a in enumerate(accuracies)
    }
    return {"reports": "trained", "trained": scores, "aggregated": scores}


def test_of_accuracies_the_highest_is_first_on_both_sides() -> None:
    rows = {
        "a": [accurate(0.8, 0.9), accurate(0.7, 0.8)],
        "b": [accurate(0.6, 0.5)],
        "c": [accurate(0.7, 0.7)],
    }
    example = table({"X": rows}, X={"a": 83.06, "b": 75.5, "c": 70})
    (column,) = example.summary()["columns"]
    assert column["metric"] == "accuracy"
    ranks = {row["row"]: (row["rank"], row["paper_rank"]) for row in column["rows"]}
    assert ranks == {"a": (1, 1), "b": (3, 2), "c": (2, 3)}
    assert column["rows"][0]["accuracy"] == pytest.approx(0.8)
    assert column["correlation"] == pytest.approx(1 - 6 * (0 + 1 + 1) / (3 * 8))
    layout, clients = score_tables(example.summary())
    assert layout.rows[0] == ["a", "80.00 (7.07)", "1", "83.06", "1"]
    assert layout.note.startswith("Mean test accuracy (%) over clients (standard deviation), 1 to")
    assert "Higher is better." in layout.note
    title = "X: test accuracy (%), mean (standard deviation) over 1 to 2 seeds"
    assert clients.title == title
    assert clients.columns == [
        "method",
        "client-0",
        "client-1",
        "mean (std)",
        "worst client",
        "over clients",
        "rank",
    ]
    assert clients.rows[1] == ["b", "60.00", "50.00", "55.00", "50.00 (client-1)", "± 7.07", "3"]


def test_columns_may_show_different_figures_or_what_is_asked_for() -> None:
    results = {"X": {"a": [result(3)], "b": [result(2)]},
               "Y": {"a": [accurate(0.3)], "b": [accurate(0.2)]}}  # fmt: skip
    example = table(results, X={}, Y={})
    layout = score_tables(example.summary())[0]
    assert layout.rows == [["a", "3.00", "2", "30.00", "1"], ["b", "2.00", "1", "20.00", "2"]]
    assert layout.note == (
        "Means over clients, 1 seed. X: test perplexity. Lower is better. Y: test accuracy (%). "
        "Higher is better. X: other texts."
    )
    columns = [replace(column, asked="perplexity") for column in example.columns]
    asked = replace(example, columns=columns)
    assert [row[3:] for row in score_tables(asked.summary())[0].rows] == [
        ["2.70", "2"],
        ["1.80", "1"],
    ]


def test_a_column_that_has_not_run_is_no_perplexity() -> None:
    run = table({"X": {"a": [accurate(0.5)]}, "Y": {"a": []}}, X={}, Y={})
    note = score_tables(run.summary())[0].note
    assert note.startswith("Mean test accuracy (%) over clients, ")


def test_the_layout(example) -> None:
    layout, x, _ = score_tables(example.summary())
    assert layout.columns == ["method", "X", "rank", "paper", "rank", "Y", "rank", "paper", "rank"]
    rows = {row[0]: row[1:] for row in layout.rows}
    assert rows["a"] == ["12.00 (2.83)", "1", "5.00", "1", "2.00", "3", "3.00", "1"]
    assert rows["d"][:4] == ["30.00", "", "", ""]
    assert rows["e"][:4] == ["", "", "1.00", ""]
    assert layout.rows[-1][0] == "Spearman"
    assert rows["Spearman"][0] == "0.50"
    assert "1 to 2 seeds" in layout.note
    assert "(GPT-2)" in layout.note
    assert "X: other texts." in layout.note
    assert x.title == "X: test perplexity, mean (standard deviation) over 1 to 2 seeds"
    assert x.rows[0][:3] == ["a", "10.50 (3.54)", "13.50 (2.12)"]  # each client's


def test_the_papers_deviations_stand_beside_its_figures(example) -> None:
    first, *others = example.columns
    first = replace(first, deviations={"a": 0.3, "b": None})
    with_them = replace(example, columns=[first, *others])
    rows = {row[0]: row[1:] for row in score_tables(with_them.summary())[0].rows}
    assert rows["a"][:4] == ["12.00 (2.83)", "1", "5.00 (0.30)", "1"]
    assert [rows[name][2] for name in "bd"] == ["7.00", ""]
    entries = with_them.summary()["columns"][0]["rows"]
    assert [row["paper_std"] for row in entries] == [0.3, None, None, None, None]
    for row in entries:
        del row["paper_std"]  # as in files of earlier versions
    summary = with_them.summary() | {
        "columns": [{**with_them.summary()["columns"][0], "rows": entries}]
    }
    assert score_tables(summary)[0].rows[0][3] == "5.00"


def test_differences_follow_each_columns_scores(example) -> None:
    summary = json.loads(json.dumps(example.summary()))
    interval = {"value": 8.5, "low": 2.25, "high": 11, "p": 0.01, "significant": True}
    rows = summary["columns"][0]["rows"]
    rows[1]["difference"] = {"from": "a", **interval}
    rows[2]["difference"] = {"from": "a", "unpaired": "they have no seed in common"}
    _, clients, differences, _ = score_tables(summary)
    assert differences.title == "X: differences in mean test perplexity"
    assert differences.columns == ["method", "difference from a", "95 % interval", "p", ""]
    assert differences.rows == [["b", "+8.50", "+2.25 to +11.00", "0.010", ""]]
    assert "Not compared with a: c; they have no seed in common." in clients.note


def test_without_any_figure_of_the_paper_there_are_ours_alone() -> None:
    results = {"X": {"a": [result(3)], "b": [result(2)]}}
    layout = score_tables(table(results, X={}).summary())[0]
    assert layout.columns == ["method", "X", "rank"]
    assert layout.rows == [["a", "3.00", "2"], ["b", "2.00", "1"]]
    assert "paper" not in layout.note


@pytest.mark.parametrize(("width", "parts"), [(60, 2), (140, 1)])
def test_a_columns_figures_stay_side_by_side(width, parts) -> None:
    names = ("Multilingual", "SlimPajama")
    rows = {"comigs-1g1s": [result(1111.11), result(999)], "local": [result(5), result(6)]}
    figures = {name: {"comigs-1g1s": 47.19, "local": 54.38} for name in names}
    out = io.StringIO()
    Console(file=out, width=width).print(
        score_tables(table(dict.fromkeys(names, rows), **figures).summary())[0]
    )
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    heads = [line for line in lines if line.startswith("method")]
    assert len(heads) == parts
    assert all(line.split()[-3:] == ["rank", "paper", "rank"] for line in heads)
