from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.kinds.text import pieces
from coterie.data.spec import ClientSpec, DataSpec, Fractions
from coterie.data.texts import PIECE, client_texts, split_by_fractions
from coterie.seeding import generator

SHARE = st.floats(0.05, 0.45)
DEMO = Path(__file__).parents[2] / "src" / "coterie" / "assets" / "demo-writers"


@given(st.text(alphabet="ab \n😀é", max_size=300), st.integers(1, 50))
def test_pieces_lose_nothing_and_are_bounded(text: str, size: int) -> None:
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert all(size <= len(piece) <= 2 * size for piece in cut[:-1])
    assert all(0 < len(piece) < 2 * size + 1 for piece in cut)


def test_pieces_end_with_lines_where_there_are_lines() -> None:
    text = "".join(f"line {i} of the text\r\n" for i in range(1000))
    assert all(piece.endswith("\r\n") for piece in pieces(text, 200))
    assert all(piece.endswith(" ") for piece in list(pieces("word " * 500, 200))[:-1])


def test_a_text_file_is_split_near_the_fractions_and_completely() -> None:
    text = (DEMO / "whaler.txt").read_bytes().decode()
    data = DataSpec(fractions=Fractions(validation=0.2, test=0.1))
    texts = client_texts(ClientSpec(name="whaler", path="whaler.txt"), data, DEMO, seed=1)
    sizes = {split: sum(map(len, parts)) for split, parts in vars(texts).items()}
    assert sum(sizes.values()) == len(text)
    assert sizes["validation"] == pytest.approx(0.2 * len(text), abs=PIECE / 2)
    assert sizes["test"] == pytest.approx(0.1 * len(text), abs=PIECE / 2)
    everything = sorted(texts.train + texts.validation + texts.test, key=text.index)
    assert "".join(everything) == text
    for parts in vars(texts).values():
        places = [text.index(part) for part in parts]
        assert places == sorted(places)


def test_adjacent_pieces_of_a_split_stay_one_document() -> None:
    lines = "".join(f"{i:06d} line\n" for i in range(5000))
    texts = split_by_fractions([pieces(lines, PIECE)], {"test": 0.2}, generator(0, "split"))
    for part in texts["train"][:-1]:
        following = lines.index(part) + len(part)
        assert any(lines.startswith(other, following) for other in texts["test"])


@given(st.lists(st.integers(1, 500), min_size=30, max_size=60), SHARE, SHARE)
def test_records_are_dealt_whole_in_order_and_near_the_fractions(lengths, validation, test) -> None:
    documents = [f"{i:03d}" + "x" * n for i, n in enumerate(lengths)]
    fractions = {"validation": validation, "test": test}
    chance = generator(3, "split", "anna")
    splits = split_by_fractions([[document] for document in documents], fractions, chance)
    assert sorted(chain(*splits.values())) == documents
    total = sum(map(len, documents))
    for split, fraction in fractions.items():
        assert splits[split] == sorted(splits[split])
        assert abs(sum(map(len, splits[split])) - fraction * total) <= 503


def test_splits_follow_seed_and_name_and_nothing_else(tmp_path: Path) -> None:
    for name in ("anna", "ben"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_bytes((DEMO / "poet.txt").read_bytes())

    def splits(name: str, seed: int = 0) -> dict[str, list[str]]:
        spec = ClientSpec(name=name, path=name)
        return vars(client_texts(spec, DataSpec(), tmp_path, seed))

    before = splits("anna")
    assert splits("anna") == before
    assert splits("ben") != before
    assert splits("anna", seed=1) != before
    (tmp_path / "ben" / "notes.txt").unlink()
    assert splits("anna") == before


def test_given_splits_are_whole_files_and_missing_ones_come_off_train(tmp_path: Path) -> None:
    (tmp_path / "given" / "b").mkdir(parents=True)
    train = "".join(f"train {i}\n" for i in range(5000))
    for name, text in {"b/two": "two\n", "a": "one\n", ".hidden": "x", "../train": train}.items():
        (tmp_path / "given" / f"{name}.txt").write_text(text)
    spec = ClientSpec(name="anna", train="train.txt", test="given")
    texts = client_texts(spec, DataSpec(), tmp_path, seed=0)
    assert texts.test == ["one\n", "two\n"]
    assert sorted("".join(texts.train + texts.validation)) == sorted(train)
    assert sum(map(len, texts.validation)) == pytest.approx(len(train) / 10, abs=PIECE / 2)

    spec = ClientSpec(name="anna", train="train.txt", validation="given/a.txt", test="given")
    assert client_texts(spec, DataSpec(), tmp_path, seed=0).train == [train]
