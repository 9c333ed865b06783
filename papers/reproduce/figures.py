"""Captions of the figures of a filled-in table; `reproduce.drawing` draws them."""

from coterie.analysis.tables import Summary, listed
from coterie.evaluation.metrics import metric_named
from reproduce.table_file import slug

HOLLOW = {
    "dots": "filled markers are ours, on the lower scale; hollow ones the paper's, on the upper",
    "lines": "dotted lines with hollow markers are the paper's",
    "heat map": "ours beside the paper's",
}
"""The marks of the paper's figures, by kind of figure."""


def kind_of(summary: Summary) -> str | None:
    """Return the kind of a table's figure, by default dots; None if the table shows no scores."""
    if summary["shows"] != "scores":
        return None
    return (summary.get("figure") or {"kind": "dots"})["kind"]


def compared(summary: Summary) -> bool:
    """Return whether any row has a figure of the paper."""
    return any(row["paper"] is not None for column in summary["columns"] for row in column["rows"])


def figures(summary: Summary, name: str) -> dict[str, str]:
    """Return the alternative text of each picture of a table, by the picture's name.

    A table of curves has a picture for each column; any other has one, which is called `name`.
    """
    kind = kind_of(summary)
    if kind is None:
        return {}
    columns = [column["name"] for column in summary["columns"]]
    labels = dict.fromkeys(metric_named(column["metric"]).label for column in summary["columns"])
    means = f"{kind.capitalize()} of mean {summary['split']} {listed(labels)}"
    if kind == "curves":
        return {
            f"{name}-{slug(column)}": f"{means} by round on {column}, a line for each row, with a "
            "panel for the mean and one for each client."
            for column in columns
        }
    how = {
        "lines": f"over {listed(columns)}, a line for each row",
        "heat map": "by row and column",
        "dots": f"by row, with a panel for each of {listed(columns)}",
    }[kind]
    beside = f"; {HOLLOW[kind]}" if compared(summary) else ""
    return {name: f"{means} {how}{beside}. The tables list all values."}
