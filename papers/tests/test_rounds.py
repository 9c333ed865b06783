"""Scores by round, against sums by hand."""

import json

from coterie.analysis.experiments import MEAN
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.perplexity import PERPLEXITY
from reproduce.rounds import by_round, curves


def test_the_scores_of_a_point_are_found_by_client_and_round() -> None:
    lines = [
        {"round": 0, "client": "anna", "name": "test/trained", "value": {"perplexity": 9}},
        {"round": 0, "client": "anna", "name": "test/aggregated", "value": {"perplexity": 8}},
        {"round": 0, "client": "anna", "name": "loss/all", "value": [3]},
        {"round": 2, "client": "anna", "name": "test/trained", "value": {"perplexity": 7}},
        {"round": 2, "client": "ben", "name": "test/trained", "value": {"perplexity": 6}},
    ]
    assert by_round(lines, "trained") == {
        "anna": {1: {"perplexity": 9}, 3: {"perplexity": 7}},
        "ben": {3: {"perplexity": 6}},
    }


def test_means_and_deviations_over_seeds_by_hand() -> None:
    results = [
        {"rounds": {c: {n + 1: {"perplexity": p} for n, p in enumerate(figures)}
                    for c, figures in (("anna", anna), ("ben", ben))}}
        for anna, ben in (((10, 8), (20, 16)), ((14, 9.333), (20, 16)))
    ]  # fmt: skip
    scores = curves(results, PERPLEXITY)
    assert scores == {
        "round": [1, 2],
        "mean": {MEAN: [16.0, 12.33], "anna": [12.0, 8.67], "ben": [20.0, 16.0]},
        "std": {
            MEAN: [round(2 / 2**0.5, 2), round(0.6665 / 2**0.5, 2)],
            "anna": [round(4 / 2**0.5, 2), round(1.333 / 2**0.5, 2)],
            "ben": [0.0, 0.0],
        },
    }


def test_where_a_client_has_no_score_there_is_no_mean() -> None:
    rounds = {"anna": {1: {"accuracy": 0.12345}, 2: {"accuracy": 0.5}}, "ben": {2: {"accuracy": 1}}}
    scores = curves([{"rounds": rounds}], ACCURACY)
    assert scores["mean"] == {MEAN: [None, 0.75], "anna": [0.1235, 0.5], "ben": [None, 1.0]}
    assert scores["std"] == {MEAN: [None, 0.0], "anna": [0.0, 0.0], "ben": [None, 0.0]}
    json.dumps(scores, allow_nan=False)
