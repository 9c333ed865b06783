"""Scores over rounds, by client, over the runs of a row."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any

import pandas as pd

from coterie.analysis.experiments import MEAN
from coterie.analysis.frame import Frame, Result
from coterie.evaluation.metrics import Metric
from coterie.messages.names import TEST
from coterie.training.context import ClientId

Rounds = Mapping[ClientId, Mapping[int, Mapping[str, float]]]
"""Scores by client and round (1 is the first)."""


def by_round(lines: Iterable[Mapping[str, Any]], point: str) -> Rounds:
    """Return the scores at a point (trained or aggregated) in the lines of metrics.jsonl."""
    scores: dict[ClientId, dict[int, Mapping[str, float]]] = {}
    for line in lines:
        if line["name"] == f"{TEST}{point}":
            scores.setdefault(line["client"], {})[line["round"] + 1] = line["value"]
    return scores


def curves(results: Sequence[Result], metric: Metric) -> dict[str, Any]:
    """Return the means and deviations over seeds of results with `rounds` (see `by_round`).

    `round` numbers the evaluated rounds. `mean` and `std` have a list of equal length for MEAN and
    for each client, rounded as tables print them; None where a client has no score.
    """
    points = [
        (run, round, client, score[metric.name])
        for run, result in enumerate(results)
        for client, rounds in result["rounds"].items()
        for round, score in rounds.items()
    ]
    scores: Frame = pd.DataFrame(points, columns=["run", "round", "client", "score"])
    own: Frame = scores.pivot(index=["run", "round"], columns="client", values="score")
    every: Frame = pd.concat([own.mean(axis=1, skipna=False).rename(MEAN), own], axis=1)
    means: Frame = every.groupby("round").mean()
    # A single seed has no deviation.
    std: Frame = every.groupby("round").std().fillna(0.0).where(means.notna())
    return {
        "round": [int(round) for round in means.index],
        "mean": _listed(means, metric),
        "std": _listed(std, metric),
    }


def _listed(figures: Frame, metric: Metric) -> dict[str, list[float | None]]:
    digits = 4 if metric.share else 2
    return {
        str(name): [None if isnan(value) else round(value, digits) for value in column]
        for name, column in figures.items()
    }
