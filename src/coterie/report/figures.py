"""The interface of a figure of reports, and the registry of figures.

A built-in figure is imported when a report is written, because drawing needs matplotlib.
docs/use/reports.md describes how to write a figure.
"""

from collections.abc import Iterator
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from coterie.registry import Registry

if TYPE_CHECKING:
    from coterie.analysis.experiments import Experiment
    from coterie.report.style import LeftOut, Picture


class ReportFigure:
    """A figure of reports, which is drawn for each experiment whose runs have the required data.

    A subclass defines `name` and `pictures`, and is registered with `coterie.register` or loaded
    with `--plugin FILE.py`.
    """

    name: ClassVar[str]
    """The figure's name, which is unique among all figures."""

    def pictures(self, experiment: "Experiment") -> "Iterator[Picture | LeftOut]":
        """Yield the figure's pictures of one experiment.

        Args:
            experiment: The runs on the same texts and base, with their metrics and results.

        Yields:
            Pictures with different names. If the runs lack data for a picture, a `LeftOut` says why
            the picture is not drawn.
        """
        raise NotImplementedError


OWN = {
    "curves": "curves:Curves",
    "routing": "routing:Routing",
    "trust": "trust:Trust",
    "assignment": "assignment:Assignment",
    "teaching": "teaching:Teaching",
    "sweep": "curves:Sweep",
    "division": "division:Division",
    "uploads": "uploads:Uploads",
    "traffic": "cost:Traffic",
    "operations": "cost:Operations",
}
"""The module and class of each built-in figure, by the figure's name, in the order of the page."""
FIGURES: Registry[type[ReportFigure]] = Registry(
    noun="figure",
    builtin={name: partial(resolve_name, f"coterie.report.{kind}") for name, kind in OWN.items()},
    group="coterie.figures",
    base="coterie.report.figures:ReportFigure",
)
