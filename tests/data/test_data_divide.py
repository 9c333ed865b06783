"""Division by label, by mixture and by Dirichlet shares; and what holds for every division."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
from divisions import divide, items, labels
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import write

from coterie.data.spec import DataSpec, Fractions

NEWS = Path(__file__).parents[3] / "shared" / "data" / "ag-news"
LABELS = ("World", "Sports", "Business", "Sci/Tech")


def write_records(file: Path, names: Any) -> None:
    """Records whose text is "label number", all alike in length."""
    write(file, *({"label": n, "text": f"{n!s:>8} {i:05d}"} for i, n in enumerate(names)))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """800 records, 200 of each label, and a test split of 120 more."""
    folder = tmp_path_factory.mktemp("news")
    write_records(folder / "records.jsonl", LABELS * 200)
    tests = [{"label": n, "text": f"{n} test {i}"} for i, n in enumerate(LABELS * 30)]
    write(folder / "test.jsonl", *tests)
    return folder


def ways(by: str, **options: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"by": st.just(by), **options})


MIXTURES = {"ann": {"World": 0.3, "Sports": 0.7}, "ben": {"Sports": 1}}
WAYS = st.one_of(
    ways("label"),
    ways("even", clients=st.integers(1, 9)),
    ways("mixture", share=st.floats(0.1, 1)),
    ways("mixtures", mixtures=st.sampled_from([MIXTURES, dict(reversed(MIXTURES.items()))])),
    ways("dirichlet", clients=st.integers(1, 5), alpha=st.floats(0.5, 9), balanced=st.booleans()),
)
MORE = {"held_out": st.just("uniform"), "test": st.just("test.jsonl"), "public": st.just(0.2)}


@settings(deadline=None, max_examples=25)
@given(WAYS, st.fixed_dictionaries({}, optional=MORE), st.integers(0, 99))
def test_no_record_is_used_twice_and_the_draw_follows_the_seed(root, way, more, seed) -> None:
    by = way["by"]
    if by == "even":
        more = {key: True if key == "public" else more[key] for key in more.keys() - {"held_out"}}
    divided = divide(root, seed=seed, **way, **more)
    assert list(divided) == sorted(divided)
    public = divided.public.train if divided.public else []
    assert bool(public) == ("public" in more)
    first = next(iter(divided.values()))
    if by == "even":
        assert all(
            (t.validation, t.test) == (first.validation, first.test) for t in divided.values()
        )
        used = list(chain(first.validation, first.test, *(t.train for t in divided.values())))
    else:
        used = items(*divided.values())
    used += public
    assert len(set(used)) == len(used)
    for name, texts in divided.items():
        assert by == "even" or divided.labels[name] == labels(texts.train)
        for split in vars(texts):
            kinds = {"test" in text for text in getattr(texts, split)}
            assert kinds == {split == "test" and "test" in more}
    whole = 800 + 120 * ("test" in more)
    if by in ("label", "dirichlet"):
        assert len(used) == whole
    assert len(used) <= whole
    assert divide(root, seed=seed, **way, **more) == divided
    assert divide(root, seed=seed + 1, **way, **more) != divided


def test_by_label_each_client_has_one_label(root) -> None:
    divided = divide(root, by="label")
    assert list(divided) == ["business", "sci-tech", "sports", "world"]
    for name, texts in divided.items():
        assert labels(texts.train).keys() == {"Sci/Tech" if name == "sci-tech" else name.title()}
        assert [len(split) for split in vars(texts).values()] == [160, 20, 20]
    assert divided["world"].train != sorted(divided["world"].train)  # shuffled


@pytest.mark.parametrize(("share", "own", "other"), [(0.75, 150, 16), (1, 200, 0), (0.25, 50, 50)])
def test_a_mixture_has_the_share_of_its_own_label(root, share, own, other) -> None:
    for name, texts in divide(root, by="mixture", share=share).items():
        counts = labels(items(texts))
        for label in LABELS:
            mine = label.lower().replace("/", "-") == name
            assert counts[label] == (own if mine else other)


def test_mixtures_are_equally_large_where_labels_are_not(tmp_path) -> None:
    write_records(tmp_path / "records.jsonl", ["a"] * 100 + ["b"] * 50 + ["c"] * 300)
    counts = [labels(items(t)) for t in divide(tmp_path, by="mixture", share=0.5).values()]
    sizes = [[count[label] for label in "abc"] for count in counts]
    assert sizes == [[25, 12, 12], [12, 25, 12], [12, 12, 25]]


@pytest.mark.parametrize(
    "options",
    [
        {"by": "label"},
        {"by": "mixture", "share": 0.7},
        {"by": "dirichlet", "clients": 3, "alpha": 1},
    ],
)
def test_uniform_held_out_has_as_much_of_every_label(root, options) -> None:
    data = DataSpec(fractions=Fractions(validation=0.2, test=0.1))
    divided = divide(root, data, held_out="uniform", **options)
    clients = len(divided)
    for texts in divided.values():
        assert labels(texts.validation) == dict.fromkeys(LABELS, 160 // (4 * clients))
        assert labels(texts.test) == dict.fromkeys(LABELS, 80 // (4 * clients))
        half = labels(texts.validation[: len(texts.validation) // 2])
        assert min(half.values()) >= 1  # mixed, not label after label: limits keep the start
        assert options["by"] != "label" or len(labels(texts.train)) == 1


def test_dirichlet_shares_are_skewed_at_small_alpha_and_even_at_large(root) -> None:
    def largest_shares(alpha: float) -> float:
        """The mean, over clients and seeds, of the largest label's share."""
        shares = []
        for seed in range(5):
            divided = divide(root, seed=seed, by="dirichlet", clients=4, alpha=alpha)
            assert list(divided) == ["client-1", "client-2", "client-3", "client-4"]
            for texts in divided.values():
                counts = labels(items(texts))
                assert counts.total() >= 10
                shares.append(max(counts.values()) / counts.total())
        return sum(shares) / len(shares)

    assert largest_shares(0.1) > 0.65
    assert largest_shares(100) < 0.32


def test_labels_become_client_names(tmp_path) -> None:
    write_records(tmp_path / "records.jsonl", ["Économie & Droit", "世界", 3, "..."] * 9)
    assert list(divide(tmp_path, by="label")) == ["label-1", "3", "economie-droit", "label-4"]
    write_records(tmp_path / "records.jsonl", [-1, 0, 1] * 20)
    assert set(divide(tmp_path, by="label")) == {"minus-1", "0", "1"}


def test_class_names_of_a_hub_data_set_are_labels(root, hub) -> None:
    text, names = datasets.Value("string"), datasets.ClassLabel(names=["no", "yes"])
    rows = {"label": [0, 1] * 20, "text": [f"text {i}" for i in range(40)]}
    asked = hub(lambda _: rows, datasets.Features({"label": names, "text": text}))
    divided = divide(root, by="label", source="some/news", subset="small", split="train[:40]")
    assert asked == [("some/news", "small", "train[:40]")]
    assert {name: len(texts.train) for name, texts in divided.items()} == {"no": 16, "yes": 16}
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.skipif(not NEWS.exists(), reason="needs the AG News texts beside the repository")
def test_ag_news_as_comigs_divides_it() -> None:
    data = DataSpec(text=["title", "description"])
    divided = divide(NEWS, data, source="ag_news.jsonl", by="label", held_out="uniform")
    assert list(divided) == ["business", "sci-tech", "sports", "world"]
    rows = [json.loads(line) for line in (NEWS / "ag_news.jsonl").read_text().splitlines()]
    label = {f"{row['title']}\n{row['description']}": row["label"] for row in rows}
    for texts in divided.values():
        assert len({label[text] for text in texts.train}) == 1
        assert len(set(Counter(label[text] for text in texts.test).values())) == 1
