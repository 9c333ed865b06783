"""Captions of the figures of a filled-in table; `reproduce.drawing` draws them."""

from coterie.analysis.tables import Summary, listed
from coterie.evaluation.metrics import metric_named
from reproduce.table_file import slug

HOLLOW = {
    "dots": "filled markers are ours, on the lower scale; hollow ones the paper's, on the upper",
    "lines": "dotted lines with hollow markers are the paper's",
    "heat map": "ours beside the paper's",
}
"""How the paper's figures are told from ours, by the kind of figure."""


def kind_of(summary: Summary) -> str | None:
    """How a table is drawn: as its file says, or as dots; None if it shows no scores."""
    if summary["shows"] != "scores":
        return None
    return (summary.get("figure") or {"kind": "dots"})["kind"]


def compared(summary: Summary) -> bool:
    """Whether the paper has any figure."""
    return any(row["paper"] is not None for column in summary["columns"] for row in column["rows"])


def figures(summary: Summary, name: str) -> dict[str, str]:
    """What the pictures of a table show, for those who do not see it, by the pictures' names.

    A table's only picture has this name; of curves, there is one for each column.
    """
    kind = kind_of(summary)
    if kind is None:
        return {}
    columns = [column["name"] for column in summary["columns"]]
    labels = dict.fromkeys(metric_named(column["metric"]).label for column in summary["columns"])
    what = f"{kind.capitalize()} of mean {summary['split']} {listed(labels)}"
    if kind == "curves":
        return {
            f"{name}-{slug(column)}": f"{what} by round on {column}, a line for each row, with a "
            "panel for the mean and one for each client."
            for column in columns
        }
    how = {
        "lines": f"over {listed(columns)}, a line for each row",
        "heat map": "by row and column",
        "dots": f"by row, with a panel for each of {listed(columns)}",
    }[kind]
    beside = f"; {HOLLOW[kind]}" if compared(summary) else ""
    return {name: f"{what} {how}{beside}. The tables list all values."}
