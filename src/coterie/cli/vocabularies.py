"""Two tokenizers compared: what `coterie align` measures and shows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coterie.alignment import Vocabulary, VocabularyMap, read_vocabulary, vocabulary_map
from coterie.alignment.cache import load_map, save_map
from coterie.alignment.summary import LAST, readable, summarise, worst
from coterie.alignment.vocabulary import ROLES
from coterie.analysis.tables import Table
from coterie.cli import terminal
from coterie.files import write_json

LONGEST = 32
"""Characters of a token that a table shows."""


def compare_vocabularies(
    tokenizer_a: str, tokenizer_b: str, most: int, json: Path | None, cache: bool
) -> None:
    """See `coterie align`. most: worst matches to show."""
    a, b = read_vocabulary(tokenizer_a), read_vocabulary(tokenizer_b)
    terminal.say(
        f"A is {tokenizer_a}: {len(a.tokens):,} tokens",
        f"B is {tokenizer_b}: {len(b.tokens):,} tokens",
    )
    maps: dict[str, VocabularyMap] = {}
    ways: dict[str, dict[str, Any]] = {}
    for way, source, target in (("A -> B", a, b), ("B -> A", b, a)):
        maps[way], seconds = _map(source, target, way, cache)
        found = maps[way]
        cases = [_case(source, target, found, token) for token in worst(source, found, most)]
        ways[way] = {**asdict(summarise(source, found)), "seconds": seconds, "worst": cases}
    terminal.console.print(_figures(ways))
    for way, about in ways.items():
        if about["worst"]:
            terminal.console.print(_worst(way, about["worst"]))
    terminal.console.print(_roles(a, b, maps))
    if json is not None:
        names = {"A": tokenizer_a, "B": tokenizer_b}
        tokens = {"A": len(a.tokens), "B": len(b.tokens)}
        write_json(json, {"tokenizers": names, "tokens": tokens, **ways})
        terminal.say(f"\nSaved to {json}.")


def _map(
    source: Vocabulary, target: Vocabulary, way: str, cache: bool
) -> tuple[VocabularyMap, float | None]:
    """A map, and the seconds that it took; None: it was in the cache."""
    if cache and (kept := load_map(source, target)) is not None:
        return kept, None
    start = time.perf_counter()
    with terminal.progress(f"{way}: nearest tokens") as (_, progress):
        found = vocabulary_map(source, target, lambda share: progress(share, 1.0))
    seconds = time.perf_counter() - start
    if cache:
        save_map(source, target, found)
    return found, seconds


def _case(
    source: Vocabulary, target: Vocabulary, found: VocabularyMap, number: int
) -> dict[str, Any]:
    """A token and its nearest, for JSON."""
    nearest = int(found.ids[number])
    return {
        "id": number,
        "token": readable(source.tokens[number] or b""),  # it has bytes, as has its nearest
        "nearest_id": nearest,
        "nearest": readable(target.tokens[nearest] or b""),
        "edited": int(found.distances[number]),
    }


def _figures(ways: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for way, about in ways.items():
        counts = [f"{count:,}" for count in about["histogram"]]
        took = "cache" if about["seconds"] is None else f"{about['seconds']:.1f} s"
        rows.append([way, f"{about['exact']:.1%}", *counts, f"{about['mean']:.2f}", took])
    return Table(
        "Tokens by edit distance in bytes to the nearest token",
        ["", "exact", *map(str, range(LAST)), f"{LAST}+", "mean", "time"],
        rows,
        "Special tokens are excluded. Exact: the other tokenizer has the same token.",
    )


def _worst(way: str, cases: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[_short(c["token"]), _short(c["nearest"]), str(c["edited"])] for c in cases]
    return Table(f"Worst matches, {way}", ["token", "nearest", "edits"], rows)


def _short(token: str) -> str:
    return token if len(token) <= LONGEST else f'{token[: LONGEST - 2]}…"'


def _roles(a: Vocabulary, b: Vocabulary, maps: Mapping[str, VocabularyMap]) -> Table:
    """The ids of special tokens in each vocabulary and where they are mapped."""
    rows = []
    for role in ROLES:
        own = (a.roles.get(role), b.roles.get(role))
        ids = ["-" if token is None else str(token) for token in own]
        rows.append([role, *ids, *map(_mapped, own, maps.values())])
    note = "Only these special tokens are mapped; -: no such token."
    return Table("Special tokens (ids)", ["role", "A", "B", *maps], rows, note)


def _mapped(token: int | None, found: VocabularyMap) -> str:
    if token is None:
        return "-"
    other = int(found.ids[token])
    return f"{token} -> {other if other >= 0 else '-'}"
