"""Rows that do not exceed the commonest answer, and its row in tables."""

from typing import Any

import pytest

from coterie.analysis import Comparison, run_table
from coterie.analysis.significance import COMMONEST, at_floor
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.perplexity import PERPLEXITY


def run(right: list[float], **more: Any) -> dict[str, Any]:
    """Return the result of a run of one client with a score per sample."""
    scored = {"perplexity": 2.0, "bits_per_byte": 1.0, "accuracy": sum(right) / len(right)}
    items = {"of": "x", "nats": [1.0] * len(right), "tokens": [1] * len(right), "accuracy": right}
    points = {"trained": {"ada": scored}, "aggregated": {"ada": scored}}
    result = {"reports": "trained", **points, "seed": 0, "items": {"trained": {"ada": items}}}
    return {**result, **more}


FLOOR = run([1.0] * 30 + [0.0] * 30)
ROWS = {
    "good": [run([1.0] * 55 + [0.0] * 5)],
    "same": [FLOOR],
    "near": [run([0.0] * 2 + [1.0] * 31 + [0.0] * 27)],
    "low": [run([0.0] * 60)],
}


def test_rows_must_exceed_the_floor_by_more_than_chance() -> None:
    assert at_floor(ROWS, [FLOOR], ACCURACY) == ["same", "near", "low"]


def test_without_scores_by_sample_the_figures_count() -> None:
    scores = {name: row["items"]["trained"]["ada"]["accuracy"] for name, [row] in ROWS.items()}
    rows = {name: [run(right, items={})] for name, right in scores.items()}
    assert at_floor(rows, [FLOOR], ACCURACY) == ["same", "low"]


@pytest.mark.parametrize("floor", [[], [run([1.0]) | {"trained": {}}]])
def test_without_a_floor_no_row_is_at_it(floor) -> None:
    assert at_floor(ROWS, floor, ACCURACY) == []


def test_a_comparison_has_a_row_for_it_that_is_not_ranked() -> None:
    comparison = Comparison("c", ROWS, floor=[FLOOR])
    *rows, last = comparison.summary()
    assert (last["method"], last["rank"], last["accuracy"]) == (COMMONEST, None, 0.5)
    assert (last["clients"], [row["rank"] for row in rows]) == ({"ada": 0.5}, [1, 3, 2, 4])
    assert [row["at_floor"] for row in rows] == [False, True, True, True]
    assert last["difference"]["value"] == pytest.approx(-25 / 60)
    table, differences = comparison.tables()
    assert table.rows[-1][0] == differences.rows[-1][0] == COMMONEST
    assert "Not significantly better than `commonest answer`: same, near, low." in table.note


def test_perplexity_has_no_floor() -> None:
    floor = run([1.0])
    del floor["trained"]["ada"]["perplexity"]
    comparison = Comparison("c", ROWS, asked=PERPLEXITY.name, floor=[floor])
    assert [row["method"] for row in comparison.summary()] == list(ROWS)


def test_a_runs_table_has_a_column_for_it() -> None:
    table = run_table({"good": ROWS["good"][0]}, floor=FLOOR)
    assert table.columns == ["client", "good", COMMONEST]
    assert table.rows[0] == ["ada", "91.67", "50.00"]
