"""What runs have measured as pandas frames, from which all statistics and plots are computed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, MultiIndex

Result = Mapping[str, Any]
"""What a run's result.json holds, and what `RunFolder.outcome` adds to it."""
Frame = Any
"""A pandas DataFrame. By pandas' own annotations most of what is read from one may be anything, so
checkers are told nothing; docstrings say what its rows and columns are."""
Column = Any
"""A pandas Series, of which the same holds."""


def metrics(lines: Iterable[Mapping[str, Any]]) -> Frame:
    """The lines of metrics.jsonl: round (1 is the first), client (none: the run's), name, value."""
    found = DataFrame(list(lines), columns=["round", "client", "name", "value"])
    return found.assign(round=found["round"] + 1)


def parts(metrics: Frame) -> Frame:
    """The values of one figure's rows: a row per client and round, in the order in which they came.

    Columns are what the values are made of: a mapping's by key, a list's by place; a number's is 0.
    """
    index = MultiIndex.from_frame(metrics[["client", "round"]])
    return DataFrame(metrics["value"].tolist(), index=index)


def scores(result: Result, point: str | None = None) -> Frame:
    """The scores as the method reports them, or at a point: a row per client, a column per figure.

    point: trained or aggregated.
    """
    return DataFrame.from_dict(result[point or result["reports"]], orient="index")


def of_clients(result: Result, clients: Collection[str]) -> Result:
    """The result of these clients alone, at the point that the method reports."""
    point = result["reports"]
    items = result["items"].get(point, {})
    scored = {name: score for name, score in result[point].items() if name in clients}
    kept = {name: one for name, one in items.items() if name in clients}
    return {**result, point: scored, "items": {point: kept}}


def over_runs(results: Sequence[Result], point: str | None = None) -> Frame:
    """The same of several runs, by run (0, 1, ...) and client."""
    found = [scores(result, point) for result in results]
    return pd.concat(found, keys=range(len(found)), names=["run", "client"])


def mean_score(results: Sequence[Result], key: str, point: str | None = None) -> float:
    """The mean of a figure over clients, then over runs."""
    return float(over_runs(results, point)[key].groupby("run").mean().mean())


def std(values: Column) -> float:
    """The standard deviation of a sample; 0 of a single value."""
    # Less one of them, values that are all the same have none at all, whatever is rounded.
    return float((values - values.iloc[0]).std()) if len(values) > 1 else 0.0
