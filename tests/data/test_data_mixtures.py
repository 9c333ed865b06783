"""Division by given mixtures: shares in characters, equal amounts, nothing twice."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from coterie.data.division.divide import Division, divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec, Fractions, Limits
from coterie.data.texts import PIECE
from coterie.data.tokens import tokenise
from coterie.errors import CoterieError

MIXTURES = {
    "cyd": {"nl": 1.0},
    "anna": {"de": 0.7, "fr": 0.3},
    "ben": {"fr": 0.5, "de": 0.1, "nl": 0.4},
}
LONGEST = 300
"""Characters of the longest record."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Records of three labels, of 50 to 300 characters that name their label, and one label more.

    They lie label after label in records.jsonl, and label by label in de.jsonl, fr.jsonl, ...
    """
    chance = random.Random(0)
    lines: list[str] = []
    for label, count in {"de": 500, "fr": 700, "nl": 600, "xx": 40}.items():
        texts = [
            f"{label}{i:05d} ".ljust(chance.randint(50, LONGEST), label[0]) for i in range(count)
        ]
        own = [json.dumps({"label": label, "text": text}) for text in texts]
        (tmp_path / f"{label}.jsonl").write_text("\n".join(own))
        lines += own
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    return tmp_path


def divide(root: Path, seed: int = 0, data: DataSpec | None = None, **options: Any) -> Division:
    values = {"source": "records.jsonl", "by": "mixtures", "mixtures": MIXTURES, **options}
    return divided_texts(DivideSpec.model_validate(values), data or DataSpec(), root, seed)


def characters(texts: list[str]) -> dict[str, int]:
    """Of each label, by the two letters that every text begins with."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text[:2]] = counts.get(text[:2], 0) + len(text)
    return counts


def supply(root: Path, label: str) -> int:
    lines = (root / f"{label}.jsonl").read_text().splitlines()
    return sum(len(json.loads(line)["text"]) for line in lines)


def test_every_split_has_its_shares_within_a_record_as_large_as_the_labels_allow(
    root: Path,
) -> None:
    fractions = {"validation": 0.1, "test": 0.15, "train": 0.75}
    data = DataSpec(fractions=Fractions(validation=0.1, test=0.15))
    divided = divide(root, data=data)
    assert list(divided) == ["anna", "ben", "cyd"]
    # of the scarcest label, all is used: so much every client has
    size = min(
        supply(root, "de") / (0.7 + 0.1),
        supply(root, "fr") / (0.3 + 0.5),
        supply(root, "nl") / (1 + 0.4),
    )
    for name, texts in divided.items():
        for split, fraction in fractions.items():
            found = characters(getattr(texts, split))
            assert found.keys() == MIXTURES[name].keys()
            for label, share in MIXTURES[name].items():
                # a record more or less; in training also what two other splits were off by
                slack = LONGEST if split != "train" else 3 * LONGEST
                assert abs(found[label] - share * fraction * size) <= slack
    everything = [t for texts in divided.values() for split in vars(texts).values() for t in split]
    assert len(everything) == len(set(everything))
    unused = supply(root, "nl") - characters(everything)["nl"]
    assert 0 <= unused <= 2 * LONGEST  # nl is the scarcest


def test_records_of_each_label_are_counted(root: Path) -> None:
    few = DataSpec(fractions=Fractions(validation=0.01, test=0.02))
    ways: list[dict[str, Any]] = [
        {},
        {"held_out": "uniform"},
        {"by": "label", "mixtures": None},
        {"by": "mixture", "mixtures": None, "share": 0.5, "held_out": "uniform"},
    ]
    for options in ways:
        divided = divide(root, data=few, **options)
        for name, texts in divided.items():
            labels = [text[:2] for text in texts.train]
            assert divided.labels[name] == {label: labels.count(label) for label in set(labels)}


def test_uniform_held_out_has_all_labels_and_training_the_mixture(root: Path) -> None:
    data = DataSpec(fractions=Fractions(validation=0.01, test=0.02))
    divided = divide(root, data=data, held_out="uniform")
    records = 500 + 700 + 600 + 40
    for name, texts in divided.items():
        for split, fraction in {"validation": 0.01, "test": 0.02}.items():
            labels = [text[:2] for text in getattr(texts, split)]
            each = int(fraction * records / (4 * 3))
            assert all(labels.count(label) == each for label in ("de", "fr", "nl", "xx"))
        found = characters(texts.train)
        size = sum(found.values())
        for label, share in MIXTURES[name].items():
            assert abs(found[label] - share * size) <= 4 * LONGEST


def test_every_start_of_a_text_has_the_shares(root: Path) -> None:
    """A limit keeps the start of a split."""
    divided = divide(root)
    for name, texts in divided.items():
        for split in vars(texts).values():
            whole = characters(split)
            for count in range(1, len(split)):
                start = characters(split[:count])
                reached = sum(start.values()) / sum(whole.values())
                for label in MIXTURES[name]:
                    slack = len(whole) * LONGEST
                    assert abs(start.get(label, 0) - reached * whole[label]) <= slack


def test_a_limit_leaves_the_mixture(root: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = divide(root)["anna"]
    limited = DataSpec(limits=Limits(train=20_000))
    kept = str(tokenizer.decode(tokenise(texts, tokenizer, limited, "anna").train.ids.tolist()))
    found = characters([text for text in texts.train if text in kept])
    assert sum(found.values()) < 0.9 * sum(map(len, texts.train))
    assert abs(found["de"] / sum(found.values()) - 0.7) < 0.02


def test_the_division_follows_the_seed_and_no_order_of_keys(root: Path) -> None:
    divided = divide(root)
    backwards = {name: dict(reversed(MIXTURES[name].items())) for name in reversed(MIXTURES)}
    assert divide(root, mixtures=backwards) == divided
    assert divide(root, seed=1) != divided
    sources = {label: f"{label}.jsonl" for label in ("de", "fr", "nl")}
    mapped = divide(root, source=sources)
    assert divide(root, source=dict(reversed(sources.items()))) == mapped


def test_a_source_for_each_label_gives_what_labelled_records_give(root: Path) -> None:
    sources = {label: f"{label}.jsonl" for label in ("de", "fr", "nl", "xx")}
    assert divide(root, source=sources) == divide(root)
    by_label = divide(root, source=sources, by="label", mixtures=None)
    assert {name: set(characters(t.train)) for name, t in by_label.items()} == {
        label: {label} for label in sources
    }


def test_text_files_are_cut_into_pieces_and_nothing_is_lost(tmp_path: Path) -> None:
    texts = {
        label: "".join(f"{label} line {i} of this text\n" for i in range(3000))
        for label in ("de", "fr")
    }
    for label, text in texts.items():
        (tmp_path / f"{label}.txt").write_text(text)
    mixtures = {"anna": {"de": 0.75, "fr": 0.25}, "ben": {"de": 0.25, "fr": 0.75}}
    divided = divide(tmp_path, source={"de": "de.txt", "fr": "fr.txt"}, mixtures=mixtures)
    parts = [part for t in divided.values() for split in vars(t).values() for part in split]
    assert all(
        PIECE <= len(part) <= 2 * PIECE
        for part in parts
        if not part.endswith("2999 of this text\n")
    )
    for label, text in texts.items():
        own = sorted((p for p in parts if p.startswith(label)), key=text.index)
        assert "".join(own) == text
    for name, shares in mixtures.items():
        found = characters(divided[name].train)
        for label, share in shares.items():
            assert abs(found[label] - 0.8 * share * len(texts[label])) <= 3 * 2 * PIECE


def test_what_cannot_be_mixed_is_said(root: Path) -> None:
    wanted = r"client anna requests the label 'ed', .* \(labels: de, fr, nl, xx\); correct"
    with pytest.raises(CoterieError, match=wanted):
        divide(root, mixtures={"anna": {"ed": 0.5, "de": 0.5}})
    (root / "blank.jsonl").write_text('{"text": " "}')
    with pytest.raises(CoterieError, match=r"blank\.jsonl has no records that contain text"):
        divide(root, source={"de": "de.jsonl", "fr": "blank.jsonl"})


def test_a_label_may_come_from_a_subset_on_the_hub(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(*names: object, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": [f"fr{i:03d}" for i in range(200)]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = {"de": "de.jsonl", "fr": {"source": "some/wiki", "subset": "2023.fr"}}
    divided = divide(
        root, source=source, split="train[:200]", mixtures={"anna": {"de": 0.5, "fr": 0.5}}
    )
    assert asked == [("some/wiki", "2023.fr", "train[:200]")]
    texts = divided["anna"]
    everything = characters([*texts.train, *texts.validation, *texts.test])
    assert everything["fr"] == 200 * 5
    assert abs(everything["de"] - 200 * 5) <= 3 * LONGEST


@pytest.mark.parametrize(
    "how", [{"by": "mixture", "share": 0.7}, {"by": "dirichlet", "clients": 3, "alpha": 1.0}]
)
def test_the_start_of_a_client_s_text_has_the_shares_of_the_whole(root: Path, how: dict) -> None:
    values = {"source": "records.jsonl", "held_out": "uniform", **how}
    data = DataSpec(fractions=Fractions(validation=0.02, test=0.02))
    for client in divided_texts(DivideSpec.model_validate(values), data, root, 0).values():
        whole = [text[:2] for text in client.train]
        start = whole[: len(whole) // 5]
        for label in set(whole):
            share, kept = (part.count(label) / len(part) for part in (whole, start))
            assert abs(share - kept) <= 2 / len(start)
