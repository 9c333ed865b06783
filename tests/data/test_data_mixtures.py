"""Division by given mixtures: shares in characters, equal amounts, nothing twice."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from divisions import divide, items, labels
from questions import write

from coterie.data.division.divide import Division
from coterie.data.spec import DataSpec, Fractions, Limits
from coterie.data.texts import PIECE
from coterie.data.tokens import tokenise

MIXTURES = {"cyd": {"nl": 1.0}, "anna": {"de": 0.7, "fr": 0.3}}
MIXTURES["ben"] = {"fr": 0.5, "de": 0.1, "nl": 0.4}
LONGEST = 300
"""Characters of the longest record."""
CHANCE = random.Random(0)
RECORDS = {
    label: [f"{label} {i:05d} ".ljust(CHANCE.randint(50, LONGEST), label[0]) for i in range(count)]
    for label, count in {"de": 500, "fr": 700, "nl": 600, "xx": 40}.items()
}
"""Texts of three labels, of 50 to 300 characters that name their label, and of a label more."""
FEW = DataSpec(fractions=Fractions(validation=0.01, test=0.02))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The records, label after label in records.jsonl, and label by label in de.jsonl, ..."""
    folder = tmp_path_factory.mktemp("mixtures")
    own = {k: [{"label": k, "text": text} for text in texts] for k, texts in RECORDS.items()}
    for label, records in own.items():
        write(folder / f"{label}.jsonl", *records)
    write(folder / "records.jsonl", *chain(*own.values()))
    return folder


def mixed(root: Path, data: DataSpec | None = None, **options: Any) -> Division:
    return divide(root, data, **{"by": "mixtures", "mixtures": MIXTURES, **options})


def characters(texts: list[str]) -> dict[str, int]:
    """Count the characters of each label."""
    return {k: sum(len(t) for t in texts if t.startswith(k)) for k in labels(texts)}


def test_every_split_has_its_shares_as_far_as_labels_allow(root) -> None:
    fractions = {"validation": 0.1, "test": 0.15, "train": 0.75}
    divided = mixed(root, DataSpec(fractions=Fractions(validation=0.1, test=0.15)))
    assert list(divided) == ["anna", "ben", "cyd"]
    supply = {label: sum(map(len, texts)) for label, texts in RECORDS.items()}
    # of the scarcest label, all is used: so much every client has
    size = min(supply["de"] / (0.7 + 0.1), supply["fr"] / (0.3 + 0.5), supply["nl"] / (1 + 0.4))
    for name, texts in divided.items():
        for split, fraction in fractions.items():
            counts = characters(getattr(texts, split))
            assert counts.keys() == MIXTURES[name].keys()
            for label, share in MIXTURES[name].items():
                # a record more or less; in training also what two other splits were off by
                slack = LONGEST if split != "train" else 3 * LONGEST
                assert abs(counts[label] - share * fraction * size) <= slack
    unused = supply["nl"] - characters(items(*divided.values()))["nl"]
    assert 0 <= unused <= 2 * LONGEST  # nl is the scarcest


def test_uniform_held_out_has_all_labels_and_training_the_mixture(root) -> None:
    divided = mixed(root, FEW, held_out="uniform")
    for name, texts in divided.items():
        for split, fraction in {"validation": 0.01, "test": 0.02}.items():
            each = int(fraction * sum(map(len, RECORDS.values())) / (4 * 3))
            assert labels(getattr(texts, split)) == dict.fromkeys(RECORDS, each)
        counts = characters(texts.train)
        for label, share in MIXTURES[name].items():
            assert abs(counts[label] - share * sum(counts.values())) <= 4 * LONGEST


def test_every_start_of_a_text_has_the_shares(root, tokenizer) -> None:
    divided = mixed(root)
    for name, texts in divided.items():
        for split in vars(texts).values():
            whole = characters(split)
            start = dict.fromkeys(whole, 0)
            for text in split:
                start[text[:2]] += len(text)
                reached = sum(start.values()) / sum(whole.values())
                for label in MIXTURES[name]:
                    assert abs(start[label] - reached * whole[label]) <= len(whole) * LONGEST
    limited, texts = DataSpec(limits=Limits(train=20_000)), divided["anna"]
    kept = str(tokenizer.decode(tokenise(texts, tokenizer, limited, "anna").train.ids.tolist()))
    counts = characters([text for text in texts.train if text in kept])
    assert sum(counts.values()) < 0.9 * sum(map(len, texts.train))
    assert abs(counts["de"] / sum(counts.values()) - 0.7) < 0.02


def test_neither_the_order_of_keys_nor_a_source_per_label_matters(root) -> None:
    divided = mixed(root)
    backwards = {name: dict(reversed(MIXTURES[name].items())) for name in reversed(MIXTURES)}
    assert mixed(root, mixtures=backwards) == divided
    sources = {label: f"{label}.jsonl" for label in RECORDS}
    for source in (sources, dict(reversed(sources.items()))):
        assert mixed(root, source=source) == divided
    by_label = divide(root, source=sources, by="label")
    assert {n: set(labels(t.train)) for n, t in by_label.items()} == {k: {k} for k in sources}


def test_text_files_are_cut_into_pieces_and_nothing_is_lost(tmp_path) -> None:
    numbers = range(3000)
    texts = {k: "".join(f"{k} line {i} of this text\n" for i in numbers) for k in ("de", "fr")}
    for label, text in texts.items():
        (tmp_path / f"{label}.txt").write_text(text)
    mixtures = {"anna": {"de": 0.75, "fr": 0.25}, "ben": {"de": 0.25, "fr": 0.75}}
    divided = mixed(tmp_path, source={"de": "de.txt", "fr": "fr.txt"}, mixtures=mixtures)
    parts = items(*divided.values())
    whole = [part for part in parts if not part.endswith("2999 of this text\n")]
    assert all(PIECE <= len(part) <= 2 * PIECE for part in whole)
    for label, text in texts.items():
        own = sorted((p for p in parts if p.startswith(label)), key=text.index)
        assert "".join(own) == text
    for name, shares in mixtures.items():
        counts = characters(divided[name].train)
        for label, share in shares.items():
            assert abs(counts[label] - 0.8 * share * len(texts[label])) <= 3 * 2 * PIECE


def test_a_label_may_come_from_a_subset_on_the_hub(root, hub) -> None:
    asked = hub(lambda _: {"text": [f"fr {i:03d}" for i in range(200)]})
    source = {"de": "de.jsonl", "fr": {"source": "some/wiki", "subset": "2023.fr"}}
    mixtures = {"anna": {"de": 0.5, "fr": 0.5}}
    divided = mixed(root, source=source, split="train[:200]", mixtures=mixtures)
    assert asked == [("some/wiki", "2023.fr", "train[:200]")]
    counts = characters(items(divided["anna"]))
    assert counts["fr"] == 200 * 6
    assert abs(counts["de"] - 200 * 6) <= 3 * LONGEST


@pytest.mark.parametrize(
    "how", [{"by": "mixture", "share": 0.7}, {"by": "dirichlet", "clients": 3, "alpha": 1.0}]
)
def test_the_start_of_a_text_has_the_shares_of_the_whole(root, how) -> None:
    data = DataSpec(fractions=Fractions(validation=0.02, test=0.02))
    for client in divide(root, data, held_out="uniform", **how).values():
        start = client.train[: len(client.train) // 5]
        whole, kept = labels(client.train), labels(start)
        for label in whole:
            share = whole[label] / len(client.train)
            assert abs(share - kept[label] / len(start)) <= 2 / len(start)
