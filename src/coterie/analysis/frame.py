"""Metrics of runs as pandas frames, from which all statistics and plots are computed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, MultiIndex

from coterie.runs import turn_of

Result = Mapping[str, Any]
"""The content of a run's result.json, with the fields that `RunFolder.outcome` adds."""
Frame = Any
"""A pandas DataFrame, typed as Any because pandas' annotations leave most types open.

The docstrings of functions describe the rows and columns of their frames.
"""
Column = Any
"""A pandas Series, typed as Any for the same reason as `Frame`."""


def metrics(lines: Iterable[Mapping[str, Any]]) -> Frame:
    """Return the lines of metrics.jsonl as a frame.

    The columns are `round` (counted from 1), `client` (None for a metric of the whole run), `name`,
    `value`, and `turn`, the number of the turn in which the metric was recorded.
    """
    numbered = [{**line, "turn": turn_of(line)} for line in lines]
    frame = DataFrame(numbered, columns=["round", "client", "name", "value", "turn"])
    return frame.assign(round=frame["round"] + 1)


def components(metrics: Frame) -> Frame:
    """Return the values of one metric as a frame, with a row for each logged value.

    Rows are in the order of the log, and are indexed by client and round. If the values are
    mappings, the columns are the keys of the mappings. If the values are lists, the columns are the
    indices of the lists. If the values are numbers, the only column is 0.

    Args:
        metrics: The rows of one metric in the frame that the function `metrics` returns.
    """
    index = MultiIndex.from_frame(metrics[["client", "round"]])
    return DataFrame(metrics["value"].tolist(), index=index)


def scores(result: Result, point: str | None = None) -> Frame:
    """Return a result's scores as a frame with a row per client and a column per metric.

    Args:
        result: One run's result.
        point: The point of a round at which models are scored, "trained" or "aggregated". None
            selects the point at which the method reports scores.
    """
    return DataFrame.from_dict(result[point or result["reports"]], orient="index")


def of_clients(result: Result, clients: Collection[str]) -> Result:
    """Return a copy of a result in which the reported scores are limited to some clients.

    A result has scores for two points of a round, "trained" and "aggregated". For each point, it
    contains the mean score of every client, and can also contain the scores of single windows. The
    method reports the scores for one of the points, and only these scores are limited. For the
    other point, the mean scores of all clients are copied, and the scores of single windows are
    removed.
    """
    point = result["reports"]
    items = result["items"].get(point, {})
    scored = {name: score for name, score in result[point].items() if name in clients}
    selected = {name: values for name, values in items.items() if name in clients}
    return {**result, point: scored, "items": {point: selected}}


def over_runs(results: Sequence[Result], point: str | None = None) -> Frame:
    """Return the scores of several runs in one frame.

    Args:
        results: The results of the runs.
        point: The point of a round at which models are scored; see `scores`.

    Returns:
        A frame with a row per run (counted from 0) and client, and a column per metric.
    """
    frames = [scores(result, point) for result in results]
    return pd.concat(frames, keys=range(len(frames)), names=["run", "client"])


def mean_score(results: Sequence[Result], key: str, point: str | None = None) -> float:
    """Average a metric over the clients of each run, and then over runs.

    Args:
        results: The results of the runs.
        key: The name of the metric.
        point: The point of a round at which models are scored; see `scores`.
    """
    return float(over_runs(results, point)[key].groupby("run").mean().mean())


def std(values: Column) -> float:
    """Return the sample standard deviation of some values, or 0 for a single value."""
    # Subtracting the first value makes the deviation of equal values exactly 0.
    return float((values - values.iloc[0]).std()) if len(values) > 1 else 0.0
