"""The commands that look at methods, bases, texts, runs and tokenizers, and change none of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import RunFile, Settings
from coterie.errors import CoterieError, plural
from coterie.network.flower import imports_for

if TYPE_CHECKING:
    from coterie.report.page import Section

Tokenizer = Annotated[
    str,
    typer.Argument(
        help="A tokenizer.json or vocab.json; a folder that contains one, or a tokenizer.model; or "
        "the name of a built-in base or a model on the hub."
    ),
]


TextsFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Colour the .txt files of this folder, in place of clients' texts."
    ),
]


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the settings of this method.")] = None,
) -> None:
    """List all methods with their papers and what they share, or show one method's settings."""
    from coterie.methods.registry import POOLED, check_name

    if name not in (None, POOLED):
        check_name(name)
    from coterie.analysis.settings import method_table, methods_table

    if name is None:
        terminal.console.print(methods_table())
        terminal.say("\n`coterie methods NAME` shows the settings of a method.")
        return
    table = method_table(name)
    terminal.console.print(table)
    filled = [(key, value) for key, value, _ in table.rows if value]
    if filled:
        (key, value), (*parts, last) = filled[0], filled[0][0].split(".")
        inside = f"{parts[0]}: {{{last}: {value}}}" if parts else f"{last}: {value}"
        terminal.say(f"\nIn a run file:        method: {{name: {name}, {inside}}}")
        terminal.say(f"On the command line:  --set method={name} --set method.{key}={value}")


def audit(
    file: RunFile = None,
    settings: Settings = None,
) -> None:
    """Show what leaves a client in a round, what never does, and how many bytes each takes.

    The list comes from the method's declaration; the sizes are measured on real messages of one
    short round. A client without a path, as in a deployment, is given a text of the demo.
    """
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import read_values

    config = load_with_any_text(read_values(file, settings or ()))
    from coterie.analysis.audit import audit_run

    terminal.console.print(*audit_run(config))


Samples = Annotated[
    bool,
    typer.Option(
        help="Include a point for each of some training samples of each client, by its relevance "
        "to the experts (FedAMoLE).",
    ),
]
Layer = Annotated[
    str | None,
    typer.Option(
        metavar="N|first|middle|last",
        help="Layer whose experts are shown with --texts and --samples. Default: first, "
        "middle and last.",
    ),
]
Texts = Annotated[
    bool, typer.Option(help="Include clients' texts, with each token coloured by its expert.")
]


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders that contain them.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report. Default: `report` in the first RUN.")
    ] = None,
    layer: Layer = None,
    texts: Texts = False,
    samples: Samples = False,
    texts_from: TextsFrom = None,
) -> None:
    """Plot the metrics of runs: one self-contained HTML page, and each figure as SVG and PNG.

    Unfinished runs are included. Runs of a method that differ only in their seed are averaged.

    Example:

        coterie report runs/compare-mine --out report
    """
    for run in runs:
        if not run.is_dir():
            raise CoterieError(f"{run} is neither a run's folder nor one that holds runs.")
    draw(runs, out or runs[0] / "report", layer, texts, samples, texts_from)


def draw(
    runs: Sequence[Path],
    out: Path,
    layer: str | None,
    texts: bool,
    samples: bool,
    texts_from: Path | None,
    sections: Callable[[], Sequence["Section"]] = tuple,
) -> None:
    """Write a report and say what it contains; sections: makes what stands before the runs."""
    with imports_for("A report", "report"):
        from coterie.report.page import PRIVATE, SINGLE, write_report

    written = write_report(runs, out, texts, layer, samples, texts_from, sections())
    for section in written.sections:
        terminal.say(f"{section.name}: {plural(len(section.pictures), 'figure')}")
        for item in section.left_out:
            terminal.say(f"  omitted: {item.title}: {item.why}")
    for note in [PRIVATE] * (texts and texts_from is None) + [SINGLE] * samples:
        terminal.say(note)
    terminal.say(f"\nReport: {written.page} (figures in {written.figures}).")


def align(
    tokenizer_a: Tokenizer,
    tokenizer_b: Tokenizer,
    worst: Annotated[int, typer.Option(min=0, help="Number of worst matches to show.")] = 10,
    json: Annotated[
        Path | None, typer.Option(help="Also write the results to this JSON file.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute the maps again, and do not cache them.")
    ] = False,
) -> None:
    """Compare two tokenizers: map each token of one to the nearest token of the other.

    FedMKT uses these maps for distillation between models with different tokenizers. The nearest
    token has the smallest edit distance in bytes; an exact match has distance 0. The more tokens
    match exactly, the more of a teacher's predictions are preserved.

    Maps are cached in ~/.cache/coterie, or in $COTERIE_CACHE.

    Example:

        coterie align tiny-gpt2 models/llama-2
    """
    from coterie.cli.vocabularies import compare_vocabularies

    compare_vocabularies(tokenizer_a, tokenizer_b, worst, json, not no_cache)


def base(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RUN.yaml",
            help="A base (built-in, a folder, or a name on the Hugging Face hub), or a run file.",
        ),
    ],
    settings: Settings = None,
) -> None:
    """Show a base, where adapters stand in it and, for a run file, the memory that a client needs.

    Only the base's configuration, its tokenizer and, in a folder, the headers of its weights are
    read: no weights are downloaded or loaded.

    Example:

        coterie base us.yaml --set base.weights=nf4
    """
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import located, read_values

    file = located(Path(what))
    is_run = file.suffix in (".yaml", ".yml")
    here = [] if is_run else [f"data_root={Path.cwd()}", f"base={what}"]
    values = read_values(file if is_run else None, [*here, *(settings or ())])
    config = load_with_any_text(values)
    from coterie.analysis.need import base_table, coverage_table, need_tables

    clients = [client.name for client in config.clients] or ["a client"]
    for spec, name in {config.base_of(name): name for name in reversed(clients)}.items():
        stands = coverage_table(spec, config, name if is_run else None)
        terminal.console.print(base_table(spec, config), stands)
    if is_run:
        terminal.console.print(*need_tables(config))


def data(
    file: RunFile = None,
    settings: Settings = None,
    json: Annotated[
        Path | None, typer.Option(help="Also write the results, texts included, to this JSON file.")
    ] = None,
) -> None:
    """Check the texts of a run: their sizes, empty and short records, and duplicates.

    Compares what each client trains on with its validation and test texts, and, where this machine
    has the texts of all clients, with theirs. Text files are compared in pieces of about two
    thousand characters. Only this terminal shows texts; nothing leaves the machine.

    Also shows what is left out (fields that are not used, skipped files) and the shares of unknown
    and control tokens. To leave out of training what is in a client's validation or test, set
    data.deduplicate.

    Example:

        coterie data mine.yaml
    """
    from coterie.config.read import load_here
    from coterie.config.values import read_values

    config = load_here(read_values(file, settings or ()))
    from coterie.cli.texts import compare_texts

    compare_texts(config, json)
