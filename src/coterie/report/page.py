"""The report: a self-contained HTML page, and its figures as SVG and PNG files."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from coterie.analysis.benchmarks import tables as scores_on_tasks
from coterie.analysis.comparison import Comparison
from coterie.analysis.experiments import Experiment, experiments
from coterie.analysis.relevance import SAMPLES, sample_relevance
from coterie.analysis.tables import Table, listed, marked_up
from coterie.analysis.texts import coloured_texts
from coterie.engines.floor import floor_in
from coterie.files import path_part, refuse_links, write_bytes, write_text, writing
from coterie.report.figures import FIGURES
from coterie.report.relevance import relevance
from coterie.report.style import DARK, LIGHT, THEMES, Canvas, LeftOut, Picture, Theme
from coterie.report.texts import TINTS, TextPicture, texts

PRIVATE = "This page contains clients' texts; use --no-texts to exclude them."
SINGLE = (
    f"This page contains a point for each of up to {SAMPLES} training samples of every client; "
    "use --no-samples to exclude these points."
)


@dataclass(frozen=True)
class Section:
    """A section of report.html: an experiment, or content added by the caller of `write_report`."""

    name: str
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    left_out: Sequence[LeftOut]


@dataclass(frozen=True)
class Report:
    """A written report: the path of the page, the folder of figures, and the page's sections."""

    page: Path
    figures: Path
    sections: Sequence[Section]


def write_report(
    paths: Sequence[Path],
    out: Path,
    with_texts: bool = False,
    layer: str | None = None,
    with_samples: bool = False,
    texts_from: Path | None = None,
    sections: Sequence[Section] = (),
) -> Report:
    """Write report.html and figures/ for the runs in some folders.

    Figures that an earlier report wrote to figures/ are removed.

    Args:
        paths: Run folders, or folders that contain run folders.
        out: The folder to write to.
        with_texts: Whether to show the clients' private texts.
        layer: The layer to show in figures of single layers. This is "first", "middle", "last", or
            the number of a layer, counted from 1. None selects the first, the middle and the last
            layer.
        with_samples: Whether to draw figures in which each point is a private sample of a client.
        texts_from: A folder of .txt files to show instead of the clients' texts. None shows the
            clients' texts if `with_texts` is set, and no texts otherwise.
        sections: Sections to place before the experiments.

    Raises:
        CoterieError: if a folder contains no run.
    """
    sections = list(sections)
    for experiment in experiments(paths):
        figures = [FIGURES.get(name)() for name in FIGURES.names()]
        items = [item for figure in figures for item in figure.pictures(experiment)]
        if with_samples:
            items += relevance(sample_relevance(experiment, layer))
        if with_texts or texts_from is not None:
            items += texts(coloured_texts(experiment, layer, texts_from))
        sections.append(_section(experiment, items))
    figures = out / "figures"
    refuse_links(out, figures.name)
    if out.parent in paths:  # the default folder, inside a run folder
        refuse_links(out.parent, out.name)
    with writing(figures):
        figures.mkdir(parents=True, exist_ok=True)
        for theme in THEMES:
            for old in figures.glob(f"*-{theme.name}.[ps][nv]g"):
                old.unlink()
    for section in sections:
        prefix = f"{path_part(section.name)}-" if len(sections) > 1 else ""
        for picture, theme in product(section.pictures, THEMES):
            name = f"{prefix}{picture.name}-{theme.name}"
            write_bytes(figures / f"{name}.svg", _svg(picture, theme))
            write_bytes(figures / f"{name}.png", picture.render(Canvas(theme), "png"))
    page = out / "report.html"
    notes = [PRIVATE] * (with_texts and texts_from is None) + [SINGLE] * with_samples
    write_text(page, _html(sections, " ".join(notes)))
    return Report(page, figures, sections)


def _section(experiment: Experiment, items: Sequence[Picture | LeftOut]) -> Section:
    tables = [_runs_table(experiment)]
    if experiment.finished:
        # A pooled run has no floor, as its one client holds all training data.
        outcomes = [run.result for run in experiment.all if run.result and not run.config["pooled"]]
        by_seed = {outcome["seed"]: floor_in(outcome) for outcome in outcomes}
        floor = [result for result in by_seed.values() if result["items"]["trained"]]
        metric, split = experiment.metric.name, experiment.split
        comparison = Comparison(experiment.name, experiment.finished, split, metric, floor=floor)
        tables += [comparison.table(), *(t for run in experiment.all for t in scores_on_tasks(run))]
    pictures = [item for item in items if isinstance(item, Picture)]
    left_out = [item for item in items if isinstance(item, LeftOut)]
    return Section(experiment.name, tables, pictures, left_out)


def _runs_table(experiment: Experiment) -> Table:
    rows = [
        [
            label,
            ", ".join(str(run.config["seed"]) for run in runs),
            listed(dict.fromkeys(str(run.config["rounds"]) for run in runs)),
            listed(run.progress for run in runs if not run.result) or "finished",
        ]
        for label, runs in experiment.runs.items()
    ]
    bases, server = experiment.bases
    server_note = f" Server's base: {server}." if server else ""
    note = f"Base: {listed(bases)}. Clients: {listed(experiment.clients)}.{server_note}"
    return Table("Runs", ["method", "seed", "rounds", "state"], rows, note)


def _html(sections: Sequence[Section], private: str) -> str:
    environment = Environment(
        loader=PackageLoader("coterie", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked_up"] = marked_up
    environment.globals |= {"source": _source, "is_text": lambda p: isinstance(p, TextPicture)}
    environment.globals |= {"light": LIGHT, "dark": DARK, "tints": TINTS}
    title = f"Report on {listed(section.name for section in sections)}"
    template = environment.get_template("page.html")
    return template.render(sections=sections, title=title, private=private)


@cache
def _svg(picture: Picture, theme: Theme, narrow: bool = False) -> bytes:
    """Render a figure as SVG.

    The SVG is cached, because it is used in report.html and also written to its own file.
    """
    return picture.render(Canvas(theme, narrow), "svg")


def _source(picture: Picture, theme: Theme, narrow: bool) -> str:
    """Return a figure as a data URI that contains an SVG image."""
    return f"data:image/svg+xml;base64,{b64encode(_svg(picture, theme, narrow)).decode()}"
