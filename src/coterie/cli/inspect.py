"""The commands that look at methods, runs and tokenizers, and change none of them."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, RunFile, Settings
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.alignment import Vocabulary, VocabularyMap
    from coterie.results.tables import Table

LONGEST = 32
"""Characters of a token that a table shows."""
WAYS = ("A -> B", "B -> A")

Tokenizer = Annotated[
    str,
    typer.Argument(
        help="A folder with, or itself, a tokenizer.json, vocab.json, tokenizer.model or "
        "NAME.tiktoken; or the name of a base that ships, or on the hub.",
        show_default=False,
    ),
]


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show this method's settings.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """List every method, its paper and what it shares; or one method's settings."""
    from coterie.report.settings import method_table, methods_table

    if name is None:
        terminal.console.print(methods_table())
        terminal.say("\n`coterie methods NAME` shows a method's settings.")
        return
    table = method_table(name)
    terminal.console.print(table)
    filled = [(key, value) for key, value, _ in table.rows if value]
    if filled:
        (key, value), (*parts, last) = filled[0], filled[0][0].split(".")
        inside = f"{parts[0]}: {{{last}: {value}}}" if parts else f"{last}: {value}"
        terminal.say(f"\nIn a run file:        method: {{name: {name}, {inside}}}")
        terminal.say(f"On the command line:  --set method={name} --set method.{key}={value}")


def audit(file: RunFile = None, settings: Settings = None, debug: Debug = False) -> None:
    """Show everything that leaves a client in a round, and everything that never does.

    Read off the method's declaration and measured on the real messages of one short round. Where
    clients have no path, as in a deployment, a text of the demo stands in for theirs.
    """
    from coterie.config import load_with_any_text
    from coterie.report.audit import audit_run

    for table in audit_run(load_with_any_text(file, settings or ())):
        terminal.console.print(table)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Runs' folders, or folders that hold some."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Default: `report` in the first RUN.", show_default=False)
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="N|first|last",
            help="Colour texts by this layer's experts; default first and last.",
            show_default=False,
        ),
    ] = None,
    texts: Annotated[
        bool,
        typer.Option("--texts/--no-texts", help="Show clients' texts, with each expert's part."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Draw what runs have measured: one page that opens offline, and each figure as SVG and PNG.

    A run may still be in progress. Runs of the same method that differ in their seed are averaged.

    Example:

        coterie report runs/compare-mine --out report
    """
    try:
        from coterie.report.page import PRIVATE, write_report
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2"):
            raise
        raise CoterieError(
            f"Reports need {error.name}: install the extra, pip install 'coterie[report]'."
        ) from None

    written = write_report(runs, out or runs[0] / "report", texts, layer)
    for section in written.sections:
        terminal.say(f"{section.experiment.name}: {len(section.pictures)} figures")
        for item in section.left_out:
            terminal.say(f"  left out: {item.title}: {item.why}")
    if texts:
        terminal.say(PRIVATE)
    terminal.say(f"\nThe page is {written.page}; its figures are in {written.figures}.")


def align(
    tokenizer_a: Tokenizer,
    tokenizer_b: Tokenizer,
    worst: Annotated[
        int, typer.Option(min=0, help="Show so many of the tokens that are furthest apart.")
    ] = 10,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures here.", show_default=False)
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Find maps anew, and keep none.")
    ] = False,
) -> None:
    """Compare two tokenizers: for each token of one, the nearest token of the other.

    Models with different tokenizers teach each other through such maps (FedMKT). The nearest token
    is the one whose bytes need the fewest edits: " the" is " the" in any tokenizer that has it, and
    0 edits away. The more tokens are exact, the more of a teacher's predictions arrive unharmed.

    A map is found once and kept in ~/.cache/coterie, or in $COTERIE_CACHE.

    Example:

        coterie align tiny-gpt2 models/llama-2
    """
    from coterie.alignment import read_vocabulary
    from coterie.files import write_json

    a, b = read_vocabulary(tokenizer_a), read_vocabulary(tokenizer_b)
    terminal.say(
        f"A is {tokenizer_a}: {len(a.tokens):,} tokens\nB is {tokenizer_b}: {len(b.tokens):,}"
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
        terminal.say(f"\nAlso in {json}.")


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
    from coterie.results.tables import Table

    edits = [*map(str, range(LAST)), f"{LAST}+"]
    return Table(
        "Tokens by the bytes that are edited on the way to the nearest",
        ["", "exact", *edits, "mean", "found in"],
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
        "Special tokens apart. Exact: the other tokenizer has the same token.",
    )


def _worst(way: str, cases: list[dict[str, Any]]) -> "Table":
    from coterie.results.tables import Table

    rows = [[_short(c["token"]), _short(c["nearest"]), str(c["edited"])] for c in cases]
    return Table(f"Furthest apart, {way}", ["token", "nearest", "edits"], rows)


def _roles(a: "Vocabulary", b: "Vocabulary", maps: list["VocabularyMap"]) -> "Table":
    """The ids of special tokens in each vocabulary and where they are mapped."""
    from coterie.alignment.vocabulary import ROLES
    from coterie.results.tables import Table

    rows = []
    for role in ROLES:
        row = [role, _id(a.roles.get(role)), _id(b.roles.get(role))]
        for vocabulary, found in zip((a, b), maps, strict=True):
            own = vocabulary.roles.get(role)
            other = None if own is None or found.ids[own] < 0 else int(found.ids[own])
            row.append("-" if own is None else f"{own} -> {_id(other)}")
        rows.append(row)
    note = "Of special tokens, only these are mapped; -: there is none."
    return Table("Special tokens (ids)", ["role", "A", "B", *WAYS], rows, note)


def _id(token: int | None) -> str:
    return "-" if token is None else str(token)


def _short(token: str) -> str:
    return token if len(token) <= LONGEST else f'{token[: LONGEST - 2]}…"'
