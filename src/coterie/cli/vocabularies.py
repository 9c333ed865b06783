"""The output of `coterie align`: tables that compare two tokenizers."""

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
"""Maximum number of characters of a token that a table shows."""


def compare_vocabularies(
    tokenizer_a: str, tokenizer_b: str, most: int, json: Path | None, cache: bool
) -> None:
    """Compare two tokenizers, and print the results; see `coterie align`.

    Args:
        tokenizer_a: The first tokenizer, given as a file, a folder, or the name of a base.
        tokenizer_b: The second tokenizer.
        most: The maximum number of tokens to list for each direction (A to B, and B to A). The list
            begins with the token that differs most from its nearest token in the other vocabulary.
        json: The file to write the results to, if any.
        cache: Whether to use the cache of maps. There is a map for each direction, which assigns to
            each token the nearest token in the other vocabulary. If `cache` is true, maps that the
            cache contains are loaded, and maps that it lacks are computed and then saved there.
    """
    a, b = read_vocabulary(tokenizer_a), read_vocabulary(tokenizer_b)
    terminal.say(
        f"A is {tokenizer_a}: {len(a.tokens):,} tokens",
        f"B is {tokenizer_b}: {len(b.tokens):,} tokens",
    )
    maps: dict[str, VocabularyMap] = {}
    summaries: dict[str, dict[str, Any]] = {}
    for direction, source, target in (("A -> B", a, b), ("B -> A", b, a)):
        mapping, seconds = _map(source, target, direction, cache)
        maps[direction] = mapping
        matches = [_match(source, target, mapping, token) for token in worst(source, mapping, most)]
        summary = asdict(summarise(source, mapping))
        summaries[direction] = {**summary, "seconds": seconds, "worst": matches}
    terminal.console.print(_distances(summaries))
    for direction, summary in summaries.items():
        if summary["worst"]:
            terminal.console.print(_worst(direction, summary["worst"]))
    terminal.console.print(_roles(a, b, maps))
    if json is not None:
        names = {"A": tokenizer_a, "B": tokenizer_b}
        tokens = {"A": len(a.tokens), "B": len(b.tokens)}
        write_json(json, {"tokenizers": names, "tokens": tokens, **summaries})
        terminal.say(f"\nSaved to {json}.")


def _map(
    source: Vocabulary, target: Vocabulary, direction: str, cache: bool
) -> tuple[VocabularyMap, float | None]:
    """Load or compute the map from one vocabulary to another.

    Returns:
        The map, and the duration of its computation in seconds. The duration is None if the map was
        in the cache.
    """
    if cache and (cached := load_map(source, target)) is not None:
        return cached, None
    start = time.perf_counter()
    with terminal.progress(stage := f"{direction}: nearest tokens") as show:
        computed = vocabulary_map(source, target, lambda share: show(stage, share, 1.0))
    seconds = time.perf_counter() - start
    if cache:
        save_map(source, target, computed)
    return computed, seconds


def _match(
    source: Vocabulary, target: Vocabulary, mapping: VocabularyMap, number: int
) -> dict[str, Any]:
    """Return a token and the nearest token of another vocabulary as plain data for JSON.

    Args:
        source: The token's vocabulary.
        target: The vocabulary of the nearest token.
        mapping: The map from `source` to `target`.
        number: The token's id.
    """
    nearest = int(mapping.ids[number])
    return {
        "id": number,
        "token": readable(source.tokens[number] or b""),  # mapped tokens have bytes
        "nearest_id": nearest,
        "nearest": readable(target.tokens[nearest] or b""),
        "edited": int(mapping.distances[number]),
    }


def _distances(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for direction, summary in summaries.items():
        counts = [f"{count:,}" for count in summary["histogram"]]
        duration = "cache" if summary["seconds"] is None else f"{summary['seconds']:.1f} s"
        exact, mean = f"{summary['exact']:.1%}", f"{summary['mean']:.2f}"
        rows.append([direction, exact, *counts, mean, duration])
    return Table(
        "Number of tokens by edit distance (in bytes) from the other tokenizer's nearest token",
        ["", "exact", *map(str, range(LAST)), f"{LAST}+", "mean", "time"],
        rows,
        "Special tokens are excluded. Exact: the other tokenizer has an identical token.",
    )


def _worst(direction: str, matches: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[_short(m["token"]), _short(m["nearest"]), str(m["edited"])] for m in matches]
    return Table(f"Worst matches, {direction}", ["token", "nearest", "edits"], rows)


def _short(token: str) -> str:
    return token if len(token) <= LONGEST else f'{token[: LONGEST - 2]}…"'


def _roles(a: Vocabulary, b: Vocabulary, maps: Mapping[str, VocabularyMap]) -> Table:
    """Return a table of special tokens, with a row per role (such as `bos`).

    A row contains the ids of the role's token in A and in B. For each map, the row also contains a
    pair of ids: that of the role's token in the map's source vocabulary, and that of the token in
    the other vocabulary to which the map translates it.

    Args:
        a: The first vocabulary.
        b: The second vocabulary.
        maps: The maps "A -> B" and "B -> A".
    """
    rows = []
    for role in ROLES:
        tokens = (a.roles.get(role), b.roles.get(role))
        ids = ["-" if token is None else str(token) for token in tokens]
        rows.append([role, *ids, *map(_mapped, tokens, maps.values())])
    note = "Only these special tokens are mapped. A dash means that there is no such token."
    return Table("Special tokens (ids)", ["role", "A", "B", *maps], rows, note)


def _mapped(token: int | None, mapping: VocabularyMap) -> str:
    if token is None:
        return "-"
    other = int(mapping.ids[token])
    return f"{token} -> {other if other >= 0 else '-'}"
