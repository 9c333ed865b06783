"""The commands that look at methods, runs and tokenizers, and change none of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, RunFile, Settings
from coterie.errors import CoterieError, plural

if TYPE_CHECKING:
    from coterie.alignment import Vocabulary, VocabularyMap
    from coterie.analysis.tables import Table
    from coterie.report.page import Section

LONGEST = 32
"""Characters of a token that a table shows."""
WAYS = ("A -> B", "B -> A")

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
    plugins: Plugins = None,
    debug: Debug = False,
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
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Show what leaves a client in a round, what never does, and how many bytes each takes.

    The list comes from the method's declaration; the sizes are measured on real messages of one
    short round. A client without a path, as in a deployment, is given a text of the demo.
    """
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import read_values

    config = load_with_any_text(read_values(file, settings or ()))
    from coterie.analysis.audit import audit_run

    for table in audit_run(config):
        terminal.console.print(table)


Samples = Annotated[
    bool,
    typer.Option(
        "--samples/--no-samples",
        help="Include a point for each of some training samples of each client, by its relevance "
        "to the experts (FedAMoLE).",
    ),
]
Reported = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Run folders, or folders that contain them."),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of the report. Default: `report` in the first RUN."),
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
    bool,
    typer.Option(
        "--texts/--no-texts",
        help="Include clients' texts, with each token coloured by its expert.",
    ),
]


def report(
    runs: Reported,
    out: ReportFolder = None,
    layer: Layer = None,
    texts: Texts = False,
    samples: Samples = False,
    texts_from: TextsFrom = None,
    plugins: Plugins = None,
    debug: Debug = False,
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
    try:
        from coterie.report.page import PRIVATE, SINGLE, write_report
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2"):
            raise
        raise CoterieError(
            f"Reports need {error.name}; install the extra: pip install 'coterie[report]'."
        ) from None

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
        Path | None,
        typer.Option(help="Also write the results to this JSON file."),
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
    from coterie.alignment import read_vocabulary
    from coterie.files import write_json

    a, b = read_vocabulary(tokenizer_a), read_vocabulary(tokenizer_b)
    terminal.say(
        f"A is {tokenizer_a}: {len(a.tokens):,} tokens\nB is {tokenizer_b}: {len(b.tokens):,} "
        "tokens"
    )
    pairs = ((a, b), (b, a))
    found = [
        _map(source, target, way, not no_cache)
        for (source, target), way in zip(pairs, WAYS, strict=True)
    ]
    maps = [result for result, _ in found]
    ways = [
        _described(source, target, result, seconds, worst)
        for (source, target), (result, seconds) in zip(pairs, found, strict=True)
    ]
    terminal.console.print(_figures(ways))
    for way, described in zip(WAYS, ways, strict=True):
        if described["worst"]:
            terminal.console.print(_worst(way, described["worst"]))
    terminal.console.print(_roles(a, b, maps))
    if json is not None:
        names = {"A": tokenizer_a, "B": tokenizer_b}
        tokens = {"A": len(a.tokens), "B": len(b.tokens)}
        write_json(
            json, {"tokenizers": names, "tokens": tokens, **dict(zip(WAYS, ways, strict=True))}
        )
        terminal.say(f"\nSaved to {json}.")


def _map(
    source: "Vocabulary", target: "Vocabulary", way: str, cache: bool
) -> tuple["VocabularyMap", float | None]:
    """A map, and the seconds that it took; None: it was in the cache."""
    from rich.progress import Progress

    from coterie.alignment import vocabulary_map
    from coterie.alignment.cache import keep_map, kept_map

    if cache and (kept := kept_map(source, target)) is not None:
        return kept, None
    start = time.perf_counter()
    live = Progress(
        console=terminal.console, disable=not terminal.console.is_terminal, transient=True
    )
    with live:
        task = live.add_task(f"{way}: nearest tokens", total=1.0)
        found = vocabulary_map(source, target, lambda share: live.update(task, completed=share))
    seconds = time.perf_counter() - start
    if cache:
        keep_map(source, target, found)
    return found, seconds


def _described(
    source: "Vocabulary",
    target: "Vocabulary",
    found: "VocabularyMap",
    seconds: float | None,
    most: int,
) -> dict[str, Any]:
    """A map's figures and worst cases, for JSON; seconds is None if it was in the cache."""
    from coterie.alignment.summary import readable, summarise, worst

    cases = []
    for i in worst(source, found, most):
        nearest = int(found.ids[i])
        token, other = source.tokens[i], target.tokens[nearest]
        assert token is not None  # worst cases have bytes, as have their nearest
        assert other is not None
        cases.append(
            {
                "id": i,
                "token": readable(token),
                "nearest_id": nearest,
                "nearest": readable(other),
                "edited": int(found.distances[i]),
            }
        )
    return {**asdict(summarise(source, found)), "seconds": seconds, "worst": cases}


def _figures(ways: list[dict[str, Any]]) -> "Table":
    from coterie.alignment.summary import LAST
    from coterie.analysis.tables import Table

    edits = [*map(str, range(LAST)), f"{LAST}+"]
    return Table(
        "Tokens by edit distance in bytes to the nearest token",
        ["", "exact", *edits, "mean", "time"],
        [
            [
                name,
                f"{way['exact']:.1%}",
                *(f"{count:,}" for count in way["histogram"]),
                f"{way['mean']:.2f}",
                "cache" if way["seconds"] is None else f"{way['seconds']:.1f} s",
            ]
            for name, way in zip(WAYS, ways, strict=True)
        ],
        "Special tokens are excluded. Exact: the other tokenizer has the same token.",
    )


def _worst(way: str, cases: list[dict[str, Any]]) -> "Table":
    from coterie.analysis.tables import Table

    rows = [[_short(c["token"]), _short(c["nearest"]), str(c["edited"])] for c in cases]
    return Table(f"Worst matches, {way}", ["token", "nearest", "edits"], rows)


def _roles(a: "Vocabulary", b: "Vocabulary", maps: list["VocabularyMap"]) -> "Table":
    """The ids of special tokens in each vocabulary and where they are mapped."""
    from coterie.alignment.vocabulary import ROLES
    from coterie.analysis.tables import Table

    rows = []
    for role in ROLES:
        row = [role, _id(a.roles.get(role)), _id(b.roles.get(role))]
        for vocabulary, found in zip((a, b), maps, strict=True):
            own = vocabulary.roles.get(role)
            other = None if own is None or found.ids[own] < 0 else int(found.ids[own])
            row.append("-" if own is None else f"{own} -> {_id(other)}")
        rows.append(row)
    note = "Only these special tokens are mapped; -: no such token."
    return Table("Special tokens (ids)", ["role", "A", "B", *WAYS], rows, note)


def _id(token: int | None) -> str:
    return "-" if token is None else str(token)


def _short(token: str) -> str:
    return token if len(token) <= LONGEST else f'{token[: LONGEST - 2]}…"'
