"""A report on runs with a section for each table of a paper: `python -m reproduce.report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import inspect, main
from coterie.cli.options import Command
from coterie.errors import CoterieError
from coterie.files import refuse_links

if TYPE_CHECKING:
    from coterie.report.page import Section

Reported = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Folders of tables or runs, folders that contain them, or result files of tables "
        "(JSON).",
    ),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the report. Default: `report` in the first RUN, or beside it if it is a "
        "file.",
        show_default=False,
    ),
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(cls=Command)
def report(
    runs: Reported,
    out: ReportFolder = None,
    layer: inspect.Layer = None,
    texts: inspect.Texts = False,
    samples: inspect.Samples = False,
    texts_from: inspect.TextsFrom = None,
) -> None:
    """Plot papers' tables, and the metrics of their runs as `coterie report` does, on one page.

    A table is drawn as its file says (`figure`), or as dots.

    Examples:

        python -m reproduce.report runs/small-comigs-table4

        python -m reproduce.report results/comigs-table4.json --out report
    """
    for run in runs:
        if not run.is_dir() and not (run.suffix == ".json" and run.exists()):
            raise CoterieError(
                f"{run} is neither a run's folder, nor one that holds runs, nor a table's result "
                "file (.json)."
            )
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    folders = [run for run in runs if run.is_dir()]
    out = out or first / "report"
    inspect.draw(folders, out, layer, texts, samples, texts_from, lambda: sections(runs))


def sections(paths: Sequence[Path]) -> list["Section"]:
    """Make a section for each result file, and for each folder of a table."""
    from coterie.report.page import Section
    from coterie.report.style import LeftOut
    from reproduce.drawing import pictures
    from reproduce.pages import read_result, runs_name, shown

    result = list[Section]()
    for path in paths:
        refuse_links(path, "table.json")
        file = path / "table.json" if path.is_dir() else path
        if file.exists():
            summary = read_result(file)
            drawn, left_out = [], []
            try:
                drawn = pictures(summary)
            except CoterieError as error:
                left_out.append(LeftOut(summary["table"], str(error)))
            result.append(Section(runs_name(summary), shown(summary)[:1], drawn, left_out))
    return result


if __name__ == "__main__":
    main(app)
