"""Frames of recorded metrics and of scores, and the figures computed from them."""

import pandas as pd
import pytest

from coterie.analysis import Comparison
from coterie.analysis.frame import components, metrics, over_runs, std


def line(round: int, client: str | None, name: str, value: object) -> dict:
    return {"round": round, "client": client, "name": name, "value": value}


def test_rounds_begin_with_one_and_values_are_taken_apart() -> None:
    frame = metrics(
        [
            line(0, "anna", "trust", {"anna": 0.75, "ben": 0.25}),
            line(0, None, "seconds", 2.5),
            line(1, "anna", "trust", {"anna": 1.0}),
            line(1, "ben", "routing/h.0", [0.5, 0.5]),
        ]
    )
    assert frame["round"].tolist() == [1, 1, 2, 2]
    assert frame["client"].isna().tolist() == [False, True, False, False]
    trust = components(frame[frame["name"] == "trust"])
    assert trust.index.tolist() == [("anna", 1), ("anna", 2)]
    assert trust["anna"].tolist() == [0.75, 1.0]
    assert trust["ben"].isna().tolist() == [False, True]
    assert components(frame[frame["name"] == "routing/h.0"]).loc[("ben", 2)].tolist() == [0.5, 0.5]
    assert components(frame[frame["name"] == "seconds"])[0].tolist() == [2.5]
    assert len(components(metrics([]))) == 0


def test_runs_have_their_scores_beside_each_other() -> None:
    trained, aggregated = {"anna": {"perplexity": 3.0}}, {"anna": {"perplexity": 5.0}}
    results = [{"reports": "trained", "trained": trained, "aggregated": aggregated}] * 2
    assert over_runs(results)["perplexity"].to_dict() == {(0, "anna"): 3, (1, "anna"): 3}
    assert over_runs(results, "aggregated")["perplexity"].tolist() == [5, 5]


@pytest.mark.parametrize("count", range(1, 12))
def test_values_that_are_the_same_have_no_deviation(count) -> None:
    assert std(pd.Series([7.7] * count)) == 0


def test_the_order_of_clients_does_not_part_methods_that_do_as_well() -> None:
    methods = {}
    for name, values in (("a", (8.3, 7.1, 8.3, 7.1)), ("b", (7.1, 8.3, 7.1, 8.3))):
        scores = {str(n): {"perplexity": v, "bits_per_byte": 1.0} for n, v in enumerate(values)}
        methods[name] = [{"reports": "trained", "trained": scores, "aggregated": scores}]
    for results in (methods, dict(reversed(methods.items()))):
        assert [row["rank"] for row in Comparison("x", results).summary()] == [1, 1]
