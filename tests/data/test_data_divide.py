import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from coterie.data.division.divide import divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec, Fractions
from coterie.data.texts import Texts
from coterie.errors import CoterieError

NEWS = Path(__file__).parents[3] / "shared" / "data" / "ag-news"
LABELS = ("World", "Sports", "Business", "Sci/Tech")


def write_records(file: Path, labels: Sequence[object]) -> None:
    """Records whose text is "label number", all alike in length."""
    lines = [
        json.dumps({"label": label, "text": f"{label!s:>8} {i:05d}"})
        for i, label in enumerate(labels)
    ]
    file.write_text("\n".join(lines))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """800 records, 200 of each label."""
    write_records(tmp_path / "news.jsonl", LABELS * 200)
    return tmp_path


def divide(
    root: Path, seed: int = 0, data: DataSpec | None = None, **options: Any
) -> dict[str, Texts]:
    spec = DivideSpec.model_validate({"source": "news.jsonl", **options})
    return divided_texts(spec, data or DataSpec(), root, seed)


def labels(texts: list[str]) -> Counter[str]:
    return Counter(text.split()[0] for text in texts)


def everything(divided: dict[str, Texts]) -> list[str]:
    return [text for texts in divided.values() for split in vars(texts).values() for text in split]


def test_by_label_each_client_has_one_label(root: Path) -> None:
    divided = divide(root, by="label")
    assert list(divided) == ["business", "sci-tech", "sports", "world"]
    for name, texts in divided.items():
        assert labels(texts.train).keys() == {"Sci/Tech" if name == "sci-tech" else name.title()}
        assert [len(split) for split in vars(texts).values()] == [160, 20, 20]
    assert len(set(everything(divided))) == len(everything(divided)) == 800


def test_the_division_follows_the_seed_and_is_shuffled(root: Path) -> None:
    divided = divide(root, by="label")
    assert divide(root, by="label") == divided
    assert divide(root, by="label", seed=1) != divided
    assert divided["world"].train != sorted(divided["world"].train)


@pytest.mark.parametrize(("share", "own", "other"), [(0.75, 150, 16), (1, 200, 0), (0.25, 50, 50)])
def test_a_mixture_has_the_share_of_its_own_label(
    root: Path, share: float, own: int, other: int
) -> None:
    divided = divide(root, by="mixture", share=share)
    for name, texts in divided.items():
        counts = labels(texts.train + texts.validation + texts.test)
        for label in LABELS:
            mine = label.lower().replace("/", "-") == name
            assert counts[label] == (own if mine else other)
    assert len(set(everything(divided))) == len(everything(divided))


def test_mixtures_are_equally_large_where_labels_are_not(tmp_path: Path) -> None:
    write_records(tmp_path / "news.jsonl", ["a"] * 100 + ["b"] * 50 + ["c"] * 300)
    divided = divide(tmp_path, by="mixture", share=0.5)
    counts = [labels(t.train + t.validation + t.test) for t in divided.values()]
    assert [dict(count) for count in counts] == [
        {"a": 25, "b": 12, "c": 12},
        {"a": 12, "b": 25, "c": 12},
        {"a": 12, "b": 12, "c": 25},
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"by": "label"},
        {"by": "mixture", "share": 0.7},
        {"by": "dirichlet", "clients": 3, "alpha": 1},
    ],
)
def test_uniform_held_out_has_as_much_of_every_label(root: Path, options: dict[str, Any]) -> None:
    data = DataSpec(fractions=Fractions(validation=0.2, test=0.1))
    divided = divide(root, data=data, held_out="uniform", **options)
    clients = len(divided)
    for texts in divided.values():
        assert labels(texts.validation) == dict.fromkeys(LABELS, 160 // (4 * clients))
        assert labels(texts.test) == dict.fromkeys(LABELS, 80 // (4 * clients))
        half = labels(texts.validation[: len(texts.validation) // 2])
        assert min(half.values()) >= 1  # mixed, not label after label: limits keep the start
    assert len(set(everything(divided))) == len(everything(divided))
    if options["by"] == "label":
        assert all(len(labels(texts.train)) == 1 for texts in divided.values())


def test_dirichlet_shares_are_skewed_at_small_alpha_and_even_at_large(root: Path) -> None:
    def largest_shares(alpha: float) -> float:
        """The mean, over clients and seeds, of the largest label's share."""
        shares = []
        for seed in range(5):
            divided = divide(root, seed=seed, by="dirichlet", clients=4, alpha=alpha)
            assert list(divided) == ["client-1", "client-2", "client-3", "client-4"]
            assert len(set(everything(divided))) == len(everything(divided)) == 800
            for texts in divided.values():
                counts = labels(texts.train + texts.validation + texts.test)
                assert counts.total() >= 10
                shares.append(max(counts.values()) / counts.total())
        return sum(shares) / len(shares)

    assert largest_shares(0.1) > 0.65
    assert largest_shares(100) < 0.32


def test_dirichlet_gives_up_where_records_do_not_suffice(tmp_path: Path) -> None:
    write_records(tmp_path / "news.jsonl", ["a", "b"] * 20)
    with pytest.raises(
        CoterieError, match=r"alpha 1\.0 never gave each of 5 clients at least 10 of the 40 records"
    ):
        divide(tmp_path, by="dirichlet", clients=5, alpha=1)


def test_labels_become_client_names(tmp_path: Path) -> None:
    write_records(tmp_path / "news.jsonl", ["Économie & Droit", "世界", 3, "..."] * 9)
    assert list(divide(tmp_path, by="label")) == ["label-1", "3", "economie-droit", "label-4"]
    write_records(tmp_path / "news.jsonl", ["Sci/Tech", "sci tech"] * 9)
    with pytest.raises(
        CoterieError, match="'Sci/Tech' and 'sci tech' both give the client name sci-tech"
    ):
        divide(tmp_path, by="label")


def test_what_cannot_be_divided_is_said(root: Path) -> None:
    with pytest.raises(CoterieError, match=r"divide: line 1 of .* no field topic; .* label, text"):
        divide(root, by="label", label="topic")
    with pytest.raises(CoterieError, match=r"no field txt \(did you mean text\?"):
        divide(root, by="label", data=DataSpec(text="txt"))
    few = DataSpec(fractions=Fractions(validation=0.01))
    with pytest.raises(CoterieError, match="takes 0 records with the label Business for the valid"):
        divide(root, by="label", held_out="uniform", data=few)
    write_records(root / "news.jsonl", ["a"] * 500 + ["b"] * 20)
    with pytest.raises(
        CoterieError,
        match=r"13 records with the label b for the valid.* fewer than all 20 in total",
    ):
        divide(root, by="label", held_out="uniform")
    write_records(root / "news.jsonl", ["a"] * 500)
    with pytest.raises(CoterieError, match="needs at least two labels, but there is only one"):
        divide(root, by="mixture", share=0.5)
    write_records(root / "news.jsonl", ["a", None])
    with pytest.raises(CoterieError, match=r"line 2 of .* field label contains None, not a label"):
        divide(root, by="label")
    (root / "news.jsonl").write_text('{"label": "a", "text": ""}')
    with pytest.raises(CoterieError, match=r"news\.jsonl has no records that contain text"):
        divide(root, by="label")
    (root / "notes.txt").write_text("text")
    with pytest.raises(CoterieError, match=r"notes\.txt is plain text without labels"):
        divide(root, by="label", source=".")


def test_a_hub_data_set_has_its_class_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features(
        {"label": datasets.ClassLabel(names=["no", "yes"]), "text": datasets.Value("string")}
    )
    rows = {"label": [0, 1] * 20, "text": [f"text {i}" for i in range(40)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    asked = []

    def load(*names: object, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    divided = divide(root, by="label", source="some/news", subset="small", split="train[:40]")
    assert asked == [("some/news", "small", "train[:40]")]
    assert {name: len(texts.train) for name, texts in divided.items()} == {"no": 16, "yes": 16}
    assert not datasets.are_progress_bars_disabled()


def test_a_source_that_is_nowhere_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*names: object, split: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    wanted = (
        r"some/news is neither a file or folder under .* on the hub \(no network\); set data_root"
    )
    with pytest.raises(CoterieError, match=wanted):
        divide(root, by="label", source="some/news")

    def unasked(*names: object, split: str) -> None:
        pytest.fail("the hub must not be asked for a path")

    monkeypatch.setattr(datasets, "load_dataset", unasked)
    for source in ("gone.jsonl", "./gone", "/gone/away"):
        with pytest.raises(CoterieError, match="is neither a file or folder under"):
            divide(root, by="label", source=source)


@pytest.mark.skipif(not NEWS.exists(), reason="needs the AG News texts beside the repository")
def test_ag_news_as_comigs_divides_it() -> None:
    spec = DivideSpec(source="ag_news.jsonl", by="label", held_out="uniform")
    data = DataSpec(text=["title", "description"])
    divided = divided_texts(spec, data, NEWS, seed=0)
    assert list(divided) == ["business", "sci-tech", "sports", "world"]
    rows = [json.loads(line) for line in (NEWS / "ag_news.jsonl").read_text().splitlines()]
    label = {f"{row['title']}\n{row['description']}": row["label"] for row in rows}
    for texts in divided.values():
        assert len({label[text] for text in texts.train}) == 1
        assert len(set(Counter(label[text] for text in texts.test).values())) == 1
