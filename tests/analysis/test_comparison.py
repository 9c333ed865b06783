"""Comparisons: which rows differ by more than chance from the best, or from one that is named."""

import math
from typing import Any

import pytest

from coterie.analysis import Comparison
from coterie.analysis.comparison import check_against
from coterie.errors import CoterieError


def run(nats: list[float], seed: int = 0, of: str = "x") -> dict[str, Any]:
    """Return the result of a run of one client, whose text has windows of one token."""
    scores = {"ada": {"perplexity": math.exp(sum(nats) / len(nats)), "bits_per_byte": 1.0}}
    items = {"trained": {"ada": {"of": of, "nats": nats, "tokens": [1] * len(nats)}}}
    both = {"trained": scores, "aggregated": scores}
    return {"reports": "trained", **both, "seed": seed, "items": items}


EASY = [1.0 + n / 50 for n in range(40)]
BEST = run(EASY)
NEAR = run([nats + (-1) ** n / 3 + 0.001 for n, nats in enumerate(EASY)])
FAR = run([nats + 1 for nats in EASY])
OLD = {key: value for key, value in BEST.items() if key != "items"}
ELSEWHERE = run(EASY, of="y")
RESULTS = {"far": [FAR], "best": [BEST], "near": [NEAR]}


def test_rows_that_do_not_differ_from_the_best_are_marked() -> None:
    comparison = Comparison("c", RESULTS)
    table, differences = comparison.tables()
    assert {row[0]: row[-1] for row in table.rows} == {"far": "3", "best": "1", "near": "2 ="}
    assert "`=`: no significant difference from best (95 %, paired bootstrap over" in table.note
    assert "(or samples) of one seed, without the variation between seeds)." in table.note
    far, best, near = (row["difference"] for row in comparison.summary())
    assert best is None
    assert far["value"] == pytest.approx(math.exp(2.39) - math.exp(1.39))
    assert 0 < far["low"] < far["value"] < far["high"]
    assert near["low"] < 0 < near["high"]
    assert (far["significant"], near["significant"]) == (True, False)
    assert differences.columns[1] == "difference from best"
    assert [row[0] for row in differences.rows] == ["far", "near"]
    assert differences.rows[0][1] == f"{far['value']:+.2f}"
    assert differences.rows[0][2] == f"{far['low']:+.2f} to {far['high']:+.2f}"
    assert [row[-1] for row in differences.rows] == ["", "="]
    assert differences.note == (
        "Negative: better than best. `=`: not significant. With one seed, intervals do not include "
        "the variation between seeds."
    )


def test_differences_are_from_the_row_that_is_named() -> None:
    table, differences = Comparison("c", RESULTS, against="far").tables()
    assert [row[-1] for row in table.rows] == ["3", "1", "2"]
    assert differences.columns[1] == "difference from far"
    assert all(row[1].startswith("-") for row in differences.rows)
    begun = Comparison("c", {"best": [BEST]}, against="far")  # which has not run yet
    assert begun.summary()[0]["difference"] is None
    assert len(begun.tables()) == 1
    check_against("far", RESULTS)
    with pytest.raises(CoterieError, match=r"no row 'zed' .*the rows are far, best, near"):
        check_against("zed", RESULTS)


def test_a_shell_shows_a_line_and_a_notebook_a_page() -> None:
    comparison = Comparison("<i>c</i>", {"<script>": [FAR], "best": [BEST]})
    assert repr(comparison) == "Comparison('<i>c</i>', methods=['<script>', 'best'])"
    html = comparison._repr_html_()
    assert html.count("<table>") == 2
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert "<i>" not in html


def test_rows_of_several_seeds_are_compared_over_them() -> None:
    results = {name: [runs[0], runs[0] | {"seed": 1}] for name, runs in RESULTS.items()}
    table, differences = Comparison("c", results).tables()
    assert table.title == "c: test perplexity, mean (standard deviation) over 2 seeds"
    assert "over windows (or samples) and seeds)." in table.note
    assert "one seed" not in table.note + differences.note
    for row in RESULTS:
        table, differences = Comparison("c", results | {row: RESULTS[row]}).tables()
        assert "Rows without a standard deviation have one seed." in table.note
        assert "of one seed, without" in table.note
        assert differences.note.endswith("intervals do not include the variation between seeds.")


def test_rows_that_cannot_be_paired_have_no_mark_and_a_reason() -> None:
    results = {"best": [BEST], "old": [OLD], "elsewhere": [ELSEWHERE], "far": [FAR]}
    table, differences = Comparison("c", results).tables()
    assert [row[-1] for row in table.rows] == ["1", "1", "1", "4"]
    assert "Not compared with best: old; deployed runs, and runs made with earlier" in table.note
    assert "Not compared with best: elsewhere; they were scored on different" in table.note
    assert [row[0] for row in differences.rows] == ["far"]
    (alone,) = Comparison("c", {"best": [OLD], "old": [OLD]}).tables()
    assert "`=`" not in alone.note


def test_what_was_tuned_is_a_column_and_a_line() -> None:
    trials = [{"settings": {"training.learning_rate": rate}} for rate in ("1e-4", 0.002)]
    chosen = {"settings": {"training.learning_rate": "1e-4"}, "seed": 3, "trials": trials}
    comparison = Comparison("c", {"none": [FAR], "best": [BEST]}, tuned={"best": chosen})
    assert comparison.summary()[1]["tuned"] == chosen
    table = comparison.table()
    assert table.columns[:2] == ["method", "training.learning_rate"]
    assert [row[1] for row in table.rows] == ["", "1e-4"]
    assert "rate: best of 2 trials per method, scored on validation text with seed 3." in table.note
