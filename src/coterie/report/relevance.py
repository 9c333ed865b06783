"""Samples by their relevance to the domain experts, beside how many experts each client gets.

A point tells something of a private sample, so a report holds it only where it is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.relevance import SAMPLES, LayerRelevance
from coterie.analysis.tables import Table, listed
from coterie.errors import CoterieError
from coterie.files import path_part
from coterie.report.plots import entry
from coterie.report.style import Canvas, LeftOut, Picture

TITLE = "Samples and experts"


def relevance(
    found: Mapping[str, Sequence[LayerRelevance] | CoterieError],
) -> Iterator[Picture | LeftOut]:
    """Yield a picture for each label whose experts choose by relevance.

    Args:
        found: see `sample_relevance`.
    """
    if not found:
        yield LeftOut(TITLE, "no run uses a method whose experts choose clients by relevance")
    for label, seen in found.items():
        if isinstance(seen, CoterieError):
            yield LeftOut(f"{TITLE}, {label}", str(seen))
        else:
            yield _picture(label, seen)


def _picture(label: str, seen: Sequence[LayerRelevance]) -> Picture:
    clients = list(seen[0].points)

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(2 * len(seen), 3.4, (1, 2))
        colours = [canvas.series(i)["color"] for i in range(len(clients))]
        for n, one in enumerate(seen):
            points, bars = axes[2 * n : 2 * n + 2]
            for i, (client, at) in enumerate(one.points.items()):
                look: dict[str, Any] = canvas.series(i) | {"linestyle": ""}
                points.plot(*at.T, **look, markersize=3.5, alpha=0.75, label=entry(client))
            points.set_title(one.layer, loc="left", fontsize=9)
            points.set(xticks=[], yticks=[])
            given = [one.experts.get(client, 0) for client in clients]
            bars.barh(range(len(clients)), given, color=colours, tick_label=clients)
            bars.invert_yaxis()
            bars.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            bars.set_title("experts in the next round", loc="left", fontsize=9)
        canvas.legend(figure, axes[0])
        return figure

    rows = [[client, *(str(one.experts.get(client, 0)) for one in seen)] for client in clients]
    return Picture(
        f"relevance-{path_part(label)}",
        f"{TITLE}, {label}",
        f"A point is one training sample, by its relevance to all domain experts of the layer "
        f"(equation 20), reduced by {seen[0].reduced_by}; up to {SAMPLES} samples per client, with "
        "the experts as the last round left them. Bars: experts that would choose the client for "
        "the next round. First seed only.",
        f"Scatter plots of samples of {listed(clients)}, and bar charts of their numbers of "
        "experts; the table has these.",
        draw,
        Table("Experts in the next round", ["client", *(one.layer for one in seen)], rows),
    )
