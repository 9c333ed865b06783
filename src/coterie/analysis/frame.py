"""Metrics of runs as pandas frames, from which all statistics and plots are computed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, MultiIndex

Result = Mapping[str, Any]
"""The content of a run's result.json, with the fields that `RunFolder.outcome` adds."""
Frame = Any
"""A pandas DataFrame. It is typed as Any because pandas' annotations leave the type of most values
open; docstrings describe the rows and columns."""
Column = Any
"""A pandas Series, typed as Any for the reason given at `Frame`."""


def metrics(lines: Iterable[Mapping[str, Any]]) -> Frame:
    """Return the lines of metrics.jsonl as a frame.

    Columns are round (1 is the first), client (None for a metric of the whole run), name and value.
    """
    frame = DataFrame(list(lines), columns=["round", "client", "name", "value"])
    return frame.assign(round=frame["round"] + 1)


def components(metrics: Frame) -> Frame:
    """Return the values of one metric: a row per client and round, in the order of the log.

    Columns are the keys of a mapping or the indices of a list; a plain number is in column 0.
    """
    index = MultiIndex.from_frame(metrics[["client", "round"]])
    return DataFrame(metrics["value"].tolist(), index=index)


def scores(result: Result, point: str | None = None) -> Frame:
    """Return a result's scores: a row per client, a column per metric.

    Args:
        result: one run's result.
        point: "trained" or "aggregated"; by default, the point that the method reports.
    """
    return DataFrame.from_dict(result[point or result["reports"]], orient="index")


def of_clients(result: Result, clients: Collection[str]) -> Result:
    """Return the result of some clients only, at the point that the method reports."""
    point = result["reports"]
    items = result["items"].get(point, {})
    scored = {name: score for name, score in result[point].items() if name in clients}
    selected = {name: values for name, values in items.items() if name in clients}
    return {**result, point: scored, "items": {point: selected}}


def over_runs(results: Sequence[Result], point: str | None = None) -> Frame:
    """Return the scores of several results: a row per run (0, 1, ...) and client; see `scores`."""
    frames = [scores(result, point) for result in results]
    return pd.concat(frames, keys=range(len(frames)), names=["run", "client"])


def mean_score(results: Sequence[Result], key: str, point: str | None = None) -> float:
    """Return the mean of a metric over clients, then over runs."""
    return float(over_runs(results, point)[key].groupby("run").mean().mean())


def std(values: Column) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    # Subtracting the first value makes the deviation of equal values exactly 0.
    return float((values - values.iloc[0]).std()) if len(values) > 1 else 0.0
