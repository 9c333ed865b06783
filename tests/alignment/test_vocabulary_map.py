"""Maps against brute force, and their cache."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import edits
from real_vocabularies import REAL, real_vocabulary

from coterie.alignment import (
    Vocabulary,
    VocabularyMap,
    cached_map,
    mapping,
    read_vocabulary,
    vocabulary_map,
)
from coterie.alignment.cache import load_map
from coterie.alignment.summary import readable, summarise, worst
from coterie.errors import CoterieError

# Few different bytes, so that tokens come near one another and ties abound.
BYTES = st.text(alphabet="ab\xff\x00", max_size=7).map(lambda t: t.encode("latin-1"))
TOKENS = st.one_of(st.none(), BYTES)
VOCABULARIES = st.lists(TOKENS, max_size=14).map(lambda tokens: Vocabulary(tuple(tokens), {}))


def naive(source: Vocabulary, target: Vocabulary) -> tuple[list[int], list[int]]:
    """Compare all tokens with all others; break ties as the map's docstring describes."""
    ids, distances = [], []
    for token in source.tokens:
        candidates = [
            (edits(token, other), other, i)
            for i, other in enumerate(target.tokens)
            if token is not None and other is not None
        ]
        distance, _, i = min(candidates, default=(-1, b"", -1))
        ids.append(i)
        distances.append(distance)
    return ids, distances


def same(actual: VocabularyMap, expected: tuple[list[int], list[int]]) -> None:
    assert (actual.ids.dtype, actual.distances.dtype) == (torch.int32, torch.int16)
    assert (actual.ids.tolist(), actual.distances.tolist()) == expected


@given(VOCABULARIES, VOCABULARIES)
@settings(max_examples=250)
def test_the_map_is_that_of_brute_force(source, target) -> None:
    same(vocabulary_map(source, target), naive(source, target))


def test_memory_in_small_blocks_gives_the_same(monkeypatch) -> None:
    chance = torch.Generator().manual_seed(0)

    def some(size: int) -> Vocabulary:
        lengths = torch.randint(0, 9, (size,), generator=chance).tolist()
        draws = [torch.randint(97, 101, (n,), generator=chance).tolist() for n in lengths]
        return Vocabulary(tuple(map(bytes, draws)), {})

    source, target = some(150), some(60)
    monkeypatch.setattr(mapping, "BLOCK", 64)
    seen: list[float] = []
    same(vocabulary_map(source, target, seen.append), naive(source, target))
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_long_tokens(vocabulary) -> None:
    # The distances of long tokens do not fit into a byte.
    source = vocabulary(b"a" * 700, b"b" * 255, b"c" * 256)
    target = vocabulary(b"x", b"a" * 10, b"b", b"c" * 600)
    same(vocabulary_map(source, target), ([1, 2, 1], [690, 254, 256]))


def test_special_tokens_by_role(vocabulary) -> None:
    full = vocabulary(None, None, None, None, b"x", bos=0, eos=1, unk=2, pad=3)
    only_eos, only_bos = vocabulary(b"x", None, eos=1), vocabulary(b"x", None, bos=1)
    none = vocabulary(b"y", None)
    several = vocabulary(None, bos=0, eos=0, unk=0, pad=0)
    for source, target, ids, distances in (
        (full, full, [0, 1, 2, 3, 4], [0] * 5),
        (full, only_eos, [1, 1, -1, 1, 0], [0, 0, -1, 0, 0]),
        (full, only_bos, [1, 1, -1, -1, 0], [0, 0, -1, -1, 0]),
        (full, none, [-1, -1, -1, -1, 0], [-1, -1, -1, -1, 1]),
        (none, full, [4, -1], [1, -1]),
        (several, full, [1], [0]),  # the end first
    ):
        same(vocabulary_map(source, target), (ids, distances))


def test_nothing_to_map_to(vocabulary) -> None:
    source = vocabulary(b"a", b"", None)
    for target in (vocabulary(), vocabulary(None, None)):
        same(vocabulary_map(source, target), ([-1, -1, -1], [-1, -1, -1]))
    assert summarise(source, vocabulary_map(source, vocabulary())).histogram == (0, 0, 0, 0, 0)


def test_the_embedded_vocabulary_maps_to_itself() -> None:
    own = read_vocabulary("tiny-gpt2")
    first = {token: i for i, token in reversed(list(enumerate(own.tokens))) if token is not None}
    expected = [i if t is None else first[t] for i, t in enumerate(own.tokens)]
    same(vocabulary_map(own, own), (expected, [0] * len(expected)))


def test_figures_of_a_map(vocabulary) -> None:
    source = vocabulary(b"a", b"bb", b"cccc", b"ddddddd", None, b"", eos=4)
    target = vocabulary(b"a", None, eos=1)
    mapped = vocabulary_map(source, target)
    assert mapped.distances.tolist() == [0, 2, 4, 7, 0, 1]
    figures = summarise(source, mapped)
    assert (figures.tokens, figures.histogram) == (5, (1, 1, 1, 0, 2))
    assert figures.exact == pytest.approx(1 / 5)
    assert figures.mean == pytest.approx(14 / 5)
    assert worst(source, mapped, 3) == [3, 2, 1]
    assert worst(source, mapped, 99) == [3, 2, 1, 5]
    assert readable(b' "\\\n\xff' + "é\u2060".encode()) == '" "\\\\\\n\\xffé\\u2060"'


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "vocabulary-maps"


def counted(monkeypatch) -> list[int]:
    """Return a list that grows by one with each map that is not in the cache."""
    computed: list[int] = []

    def count(source: Vocabulary, target: Vocabulary) -> VocabularyMap:
        computed.append(1)
        return vocabulary_map(source, target)

    monkeypatch.setattr("coterie.alignment.cache.vocabulary_map", count)
    return computed


def test_a_map_is_found_once(cache, monkeypatch, vocabulary) -> None:
    made = counted(monkeypatch)
    source, target = vocabulary(b"a", b"bcd", None, eos=2), vocabulary(b"bc", None, eos=1)
    first, again = (cached_map(source, target) for _ in range(2))
    assert len(made) == 1
    same(again, (first.ids.tolist(), first.distances.tolist()))
    cached_map(target, source)  # another map
    cached_map(source, vocabulary(b"bc", None, bos=1))
    assert len(made) == 3
    assert {path.suffix for path in cache.iterdir()} == {".safetensors"}


def test_the_cache_lies_in_the_home_unless_told(monkeypatch, tmp_path, vocabulary) -> None:
    monkeypatch.delenv("COTERIE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    cached_map(vocabulary(b"a"), vocabulary(b"b"))
    assert len(list((tmp_path / ".cache/coterie/vocabulary-maps").glob("*.safetensors"))) == 1


def test_a_damaged_map_is_found_again(cache, monkeypatch, vocabulary) -> None:
    source, target = vocabulary(b"a", b"bcd"), vocabulary(b"b", b"c")
    expected = naive(source, target)
    same(cached_map(source, target), expected)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    made = counted(monkeypatch)
    for damaged in (b"", b"x" * 40, whole[:-3], whole[:20], bytes(flipped)):
        path.write_bytes(damaged)
        assert load_map(source, target) is None
        same(cached_map(source, target), expected)
        assert path.read_bytes() == whole
    assert len(made) == 5
    longer = vocabulary(b"a", b"b", b"c")
    cached_map(longer, target)
    wrong = next(p for p in cache.iterdir() if p != path)
    path.write_bytes(wrong.read_bytes())  # of another vocabulary's length
    assert load_map(source, target) is None


def test_a_cache_that_cannot_be_used_is_gone_without(monkeypatch, tmp_path, vocabulary) -> None:
    made = counted(monkeypatch)
    source, target = vocabulary(b"a"), vocabulary(b"b")
    file = tmp_path / "file"
    file.write_text("not a folder")
    folders = [file, file / "below"]
    if os.geteuid() != 0:  # nothing is closed to root
        (closed := tmp_path / "closed").mkdir(mode=0o500)
        folders.append(closed)
    for folder in folders:
        monkeypatch.setenv("COTERIE_CACHE", str(folder))
        same(cached_map(source, target), ([0], [1]))
    assert len(made) == len(folders)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COTERIE_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    same(cached_map(source, target), ([0], [1]))

    def full(path: Path, data: bytes) -> None:
        raise CoterieError("Could not write: no space left on device.")

    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr("coterie.alignment.cache.write_bytes", full)
    same(cached_map(source, target), ([0], [1]))


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the real tokenizers are not here")
def test_real_maps_are_exact() -> None:
    # Some random tokens of each vocabulary are compared with all tokens of the other.
    own = {name: real_vocabulary(name) for name in ("gpt2", "llama2", "qwen")}
    chance = torch.Generator().manual_seed(0)
    for name, source in own.items():
        drawn = torch.randperm(len(source.tokens), generator=chance)[:300].tolist()
        some = Vocabulary(tuple(source.tokens[i] for i in drawn), {})
        for other in own.keys() - {name}:
            mapped = vocabulary_map(some, own[other])
            words = [(token, i) for i, token in enumerate(own[other].tokens) if token is not None]
            for n in range(3):
                token = some.tokens[n]
                if token is not None:
                    best = min((edits(token, word), word, i) for word, i in words)
                    assert (mapped.distances[n], mapped.ids[n]) == (best[0], best[2])
        itself = vocabulary_map(source, source)
        ordinary = [i for i, token in enumerate(source.tokens) if token is not None]
        assert itself.ids[ordinary].tolist() == ordinary  # none is there twice
        assert (itself.distances[ordinary] == 0).all()
