"""Figure of samples' relevance to FedAMoLE's experts, and of each client's number of experts.

A point reveals something about a private sample, so a report includes the figure only on request.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.relevance import SAMPLES, LayerRelevance, Relevances
from coterie.analysis.tables import Table, listed
from coterie.errors import CoterieError
from coterie.files import path_part
from coterie.report.plots import entry
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture

TITLE = "Samples and experts"


def relevance(results: Relevances) -> Iterator[Picture | LeftOut]:
    """Yield, for each label in `results`, a figure of the relevance of training samples to experts.

    A label is a method with its settings.

    Args:
        results: The return value of `sample_relevance`.
    """
    if not results:
        yield LeftOut(TITLE, "no run uses a method whose experts choose clients by relevance")
    for label, layers in results.items():
        if isinstance(layers, CoterieError):
            yield LeftOut(f"{TITLE}, {label}", str(layers))
        else:
            yield _picture(label, layers)


def _picture(label: str, layers: Sequence[LayerRelevance]) -> Picture:
    clients = list(layers[0].points)

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(2 * len(layers), 3.4, (1, 2))
        colours = [canvas.series(i)["color"] for i in range(len(clients))]
        for n, layer in enumerate(layers):
            points, bars = axes[2 * n : 2 * n + 2]
            for i, (client, xy) in enumerate(layer.points.items()):
                style: dict[str, Any] = canvas.series(i) | {"linestyle": ""}
                points.plot(*xy.T, **style, markersize=3.5, alpha=0.75, label=entry(client))
            points.set_title(layer.layer, loc="left", fontsize=9)
            points.set(xticks=[], yticks=[])
            counts = [layer.experts.get(client, 0) for client in clients]
            bars.barh(range(len(clients)), counts, color=colours, tick_label=clients)
            bars.invert_yaxis()
            bars.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            bars.set_title("experts in the next round", loc="left", fontsize=9)
        canvas.legend(figure, axes[0])
        return figure

    rows = [
        [client, *(str(layer.experts.get(client, 0)) for layer in layers)] for client in clients
    ]
    return Picture(
        f"relevance-{path_part(label)}",
        f"{TITLE}, {label}",
        "Each point represents one training sample: its relevance, after the last round, to all "
        "domain experts of the layer (FedAMoLE, equation 20). The relevances are reduced to two "
        f"dimensions by {layers[0].reduced_by}. There are at most {SAMPLES} points per client. "
        f"Bars: number of experts that would choose the client for the next round. {SMALLEST_SEED}",
        f"Scatter plots of training samples of {listed(clients)}, and bar charts of each client's "
        "number of experts; the table lists these numbers.",
        draw,
        Table("Experts in the next round", ["client", *(layer.layer for layer in layers)], rows),
    )
