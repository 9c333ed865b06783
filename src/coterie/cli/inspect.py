"""Commands that inspect methods, bases, texts, runs and tokenizers, without changing them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import RunFile, Settings
from coterie.errors import CoterieError, imports_for, plural

if TYPE_CHECKING:
    from coterie.config.run import RunConfig
    from coterie.report.page import Section

Tokenizer = Annotated[
    str,
    Argument(
        help="Tokenizer: a file (tokenizer.json or vocab.json); a folder with one of these files "
        "or tokenizer.model; or a name (of a built-in base, or of a model on the Hugging Face hub)."
    ),
]


TextsFrom = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Folder of .txt files to show with coloured tokens, instead of clients' texts.",
    ),
]


def methods(
    name: Annotated[
        str | None, Argument(help="Method whose settings are listed. Default: all methods.")
    ] = None,
) -> None:
    """List all methods with their papers and summaries, or list the settings of one method."""
    from coterie.methods.registry import POOLED, check_name

    if name not in (None, POOLED):
        check_name(name)
    from coterie.analysis.settings import method_table, methods_table

    if name is None:
        terminal.console.print(methods_table())
        terminal.say("\n`coterie methods NAME` lists the settings of a method.")
        return
    table = method_table(name)
    terminal.console.print(table)
    defaults = [(key, value) for key, value, _ in table.rows if value]
    if defaults:
        (key, value), (*section, last) = defaults[0], defaults[0][0].split(".")
        example = f"{section[0]}: {{{last}: {value}}}" if section else f"{last}: {value}"
        terminal.say(f"\nIn a run file:        method: {{name: {name}, {example}}}")
        terminal.say(f"On the command line:  --set method={name} --set method.{key}={value}")


def audit(file: RunFile = None, settings: Settings = None) -> None:
    """Show what a client sends and receives in a round, and what never leaves the client.

    The first table lists the fields that the method declares for messages; messages contain no
    other fields. Further tables list the contents of messages, with sizes in bytes. The sizes are
    measured on the messages of one short round. If the run file gives no path for a client, as in
    a deployment, a text of the built-in demo takes the place of the client's text.

    Before the base is loaded, two tables show what the run needs, computed from the shapes of
    tensors: a client's memory, the largest messages, the server's memory and the disk space.

    For example:

        coterie audit mine.yaml
    """
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import read_values

    config = load_with_any_text(read_values(file, settings or ()))
    from coterie.analysis.audit import audit_run
    from coterie.analysis.base_tables import need_tables

    terminal.console.print(*need_tables(config))
    terminal.console.print(*audit_run(config))


Samples = Annotated[
    bool,
    Option(
        help="For runs of FedAMoLE: plot some training samples of each client as points, whose "
        "positions show the samples' relevance to the experts."
    ),
]
Layer = Annotated[
    str | None,
    Option(
        metavar="N|first|middle|last",
        help="Layer whose experts are shown by --texts and --samples: first, middle, last, or the "
        "layer's number N (1 for the first). Default: the first, the middle and the last layer.",
    ),
]
Texts = Annotated[
    bool,
    Option(
        help="Show clients' texts, with each token coloured by the expert that the router scores "
        "highest."
    ),
]


def report(
    runs: Annotated[
        list[Path], Argument(metavar="RUN", help="Run folders, or folders of run folders.")
    ],
    out: Annotated[
        Path | None, Option(help="Folder of the report. Default: `report` in the first RUN.")
    ] = None,
    layer: Layer = None,
    texts: Texts = False,
    samples: Samples = False,
    texts_from: TextsFrom = None,
) -> None:
    """Write a report on runs: a self-contained HTML page, and its figures as SVG and PNG.

    Unfinished runs are included. Runs that differ only in their seed are averaged.

    For example:

        coterie report runs/compare-mine --out report
    """
    for run in runs:
        if not run.is_dir():
            raise CoterieError(
                f"{run} is not a folder; give run folders, or folders of run folders."
            )
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
    """Write a report, and print the number of figures in each section.

    Args:
        runs: Run folders, or folders of run folders.
        out: The folder of the report.
        layer: The layer to show in figures that show a single layer; see `write_report`.
        texts: Whether to show clients' texts.
        samples: Whether to plot clients' samples.
        texts_from: A folder of texts to show instead of clients' texts.
        sections: Function that returns additional sections. They precede the report's sections on
            runs.
    """
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
    worst: Annotated[
        int,
        Option(
            min=0,
            help="Number of tokens to list for each direction (A -> B and B -> A). The tokens that "
            "differ most from their nearest token come first.",
        ),
    ] = 10,
    json: Annotated[Path | None, Option(help="JSON file to write the results to.")] = None,
    no_cache: Annotated[
        bool, Option("--no-cache", help="Compute the maps without reading or writing the cache.")
    ] = False,
) -> None:
    """Compare two tokenizers: map each token of one to the nearest token of the other.

    FedMKT uses these maps for distillation between models with different tokenizers. The nearest
    token has the smallest edit distance in bytes; an exact match has a distance of 0. The more
    tokens match exactly, the more of a teacher's predictions are preserved.

    The maps are cached in ~/.cache/coterie, or in $COTERIE_CACHE.

    For example:

        coterie align tiny-gpt2 models/llama-2
    """
    from coterie.cli.vocabularies import compare_vocabularies

    compare_vocabularies(tokenizer_a, tokenizer_b, worst, json, not no_cache)


def base(
    base_or_run: Annotated[
        str,
        Argument(
            metavar="BASE|RUN.yaml",
            help="Base (built-in, a folder, a GGUF file, or a name on the Hugging Face hub) or run "
            "file.",
        ),
    ],
    settings: Settings = None,
    to: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Convert a base in GGUF to safetensors in this folder, and exit."
        ),
    ] = None,
    fit: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory of a GPU, such as 24GB (24 x 10^9 bytes) or 24GiB. Only the settings with "
            "which a client fits on this GPU are shown.",
        ),
    ] = None,
) -> None:
    """Show a base, the layers that adapters cover, and the memory that a run file's clients need.

    No weights are downloaded or loaded: the command reads only the base's configuration, its
    tokenizer and, if the base is a folder, the headers of its weight files. A GGUF file is
    converted when it is first used; --to saves the converted base in a folder of your choice.

    --fit prints a table of candidates, and lines for the run file with the first candidate that
    fits: the format of the weights, the numbers of samples at once, and checkpointing. If a base is
    given instead of a run file, the method is auto, and a window has 1,024 tokens, but at most the
    base's context length.

    For example:

        coterie base us.yaml --set base.weights=nf4

        coterie base us.yaml --fit 24GB

        coterie base llama.Q4_K_M.gguf --to llama
    """
    if to is not None:
        return _convert(base_or_run, to)
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import located, read_values

    file = located(Path(base_or_run))
    is_run = file.suffix in (".yaml", ".yml")
    base_keys = [] if is_run else [f"data_root={Path.cwd()}", f"base={base_or_run}"]
    values = read_values(file if is_run else None, [*base_keys, *(settings or ())])
    config = load_with_any_text(values)
    if fit is not None:
        return _fit(config, fit, is_run)
    from coterie.analysis.base_tables import base_table, coverage_table, need_tables
    from coterie.analysis.sizes import clients_by_base

    for spec, name in clients_by_base(config).items():
        coverage = coverage_table(spec, config, name if is_run else None)
        terminal.console.print(base_table(spec, config), coverage)
    if is_run:
        terminal.console.print(*need_tables(config))


def _fit(config: "RunConfig", size: str, is_run: bool) -> None:
    """Print the settings with which a client of each base of a run fits on a GPU."""
    from coterie.analysis.fit import fitting, parsed_size, with_longest_window
    from coterie.analysis.sizes import clients_by_base

    memory = parsed_size(size)
    config = config if is_run else with_longest_window(config)
    for name in clients_by_base(config).values():
        table, lines = fitting(config, name, memory)
        terminal.console.print(table)
        terminal.say(f"\nLines for the run file:\n\n{lines}")


def _convert(base: str, folder: Path) -> None:
    """Convert a base in GGUF to a new folder."""
    from coterie.bases.gguf import SMOLLM2, convert, find_gguf, packaged_smollm2

    file = packaged_smollm2() if base == SMOLLM2 else find_gguf(Path(base))
    if file is None:
        raise CoterieError(f"--to converts a GGUF file, and {base} is none.")
    if folder.exists():
        raise CoterieError(f"{folder} already exists; choose another folder with --to.")
    convert(file, folder)
    terminal.say(f"The base is in {folder}. To use it, set base: {folder}")


def data(
    file: RunFile = None,
    settings: Settings = None,
    json: Annotated[
        Path | None, Option(help="JSON file for the results, which also list the duplicated texts.")
    ] = None,
) -> None:
    """Check the texts of a run: sizes, empty and short records, duplicates, and special tokens.

    Each client's training text is compared with its validation and test texts and, if this machine
    has the texts of several clients, with the texts of the other clients. Text files are compared
    in pieces of about 2,000 characters. The output also lists unused fields and skipped files.
    Nothing leaves this machine.

    To exclude training texts that are duplicated in the client's validation or test text, set
    data.deduplicate.

    For example:

        coterie data mine.yaml
    """
    from coterie.config.read import load_here
    from coterie.config.values import read_values

    config = load_here(read_values(file, settings or ()))
    from coterie.cli.texts import compare_texts

    compare_texts(config, json)
