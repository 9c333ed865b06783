"""Division by label, by mixture and by Dirichlet shares; and what holds for every division."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
from divisions import divide, items, labels
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import write

from coterie.data.division.divide import MINIMUM, Pools, _by_dirichlet
from coterie.data.spec import DataSpec, Fractions

LABELS = ("World", "Sports", "Business", "Sci/Tech")


def write_records(file: Path, names: Any) -> None:
    """Write records of equal length whose text is "label number"."""
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


@settings(max_examples=25)
@given(WAYS, st.fixed_dictionaries({}, optional=MORE), st.integers(0, 99))
def test_no_record_is_used_twice_and_the_draw_follows_the_seed(root, way, more, seed) -> None:
    by = way["by"]
    options: dict[str, Any] = {**way, **more}
    if by == "even":
        options = {k: v if k != "public" else True for k, v in options.items() if k != "held_out"}
    divided = divide(root, seed=seed, **options)
    assert list(divided) == sorted(divided)
    public = divided.public.train if divided.public else []
    assert bool(public) == ("public" in more)
    first = next(iter(divided.values()))
    if by == "even":
        held = first.validation, first.test
        assert all((t.validation, t.test) == held for t in divided.values())
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
    assert divide(root, seed=seed, **options) == divided
    assert divide(root, seed=seed + 1, **options) != divided


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
            is_own = label.lower().replace("/", "-") == name
            assert counts[label] == (own if is_own else other)


def test_mixtures_are_equally_large_where_labels_are_not(tmp_path) -> None:
    write_records(tmp_path / "records.jsonl", ["a"] * 100 + ["b"] * 50 + ["c"] * 300)
    counts = [labels(items(t)) for t in divide(tmp_path, by="mixture", share=0.5).values()]
    sizes = [[count[label] for label in "abc"] for count in counts]
    assert sizes == [[25, 12, 12], [12, 25, 12], [12, 12, 25]]


WITH_LABELS = [
    {"by": "label"},
    {"by": "mixture", "share": 0.7},
    {"by": "dirichlet", "clients": 3, "alpha": 1},
]


@pytest.mark.parametrize("options", WITH_LABELS)
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
        """Return the mean, over clients and seeds, of the largest label's share."""
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


CLIENTS = 4
SIZES = {"a": 300, "b": 90, "c": 210, "d": 60, "e": 140}


def pools() -> Pools:
    numbers = iter(range(sum(SIZES.values())))
    return {label: [next(numbers) for _ in range(size)] for label, size in SIZES.items()}


def table(parts: list[list[int]]) -> numpy.ndarray:
    """Count the records of each client (rows) and label (columns)."""
    label_of = {number: label for label, pool in pools().items() for number in pool}
    counts = [Counter(label_of[number] for number in part) for part in parts]
    return numpy.array([[count[label] for label in SIZES] for count in counts])


def naive(alpha: float, draw: numpy.random.Generator) -> numpy.ndarray:
    """Draw a division: a client with an even part gets no more, and the shares sum to one."""
    total = sum(SIZES.values())
    while True:
        held = numpy.zeros((CLIENTS, len(SIZES)))
        for column, size in enumerate(SIZES.values()):
            shares = draw.dirichlet([alpha] * CLIENTS)
            shares[held.sum(1) >= total / CLIENTS] = 0
            shares /= shares.sum()
            held[:, column] = numpy.diff((shares.cumsum() * size).round(), prepend=0)
        if held.sum(1).min() >= MINIMUM:
            return held


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_the_division_is_distributed_as_described(alpha: float) -> None:
    draw = numpy.random.default_rng(0)
    wanted = numpy.array([naive(alpha, draw) for _ in range(1500)])
    parts = (_by_dirichlet(pools(), CLIENTS, alpha, True, seed) for seed in range(1500))
    actual = numpy.array([table(part) for part in parts])

    def figures(tables: numpy.ndarray) -> numpy.ndarray:
        """Return the clients' sizes, largest first, and the spread and maximum of each label."""
        sizes = numpy.sort(tables.sum(2))[:, ::-1]
        return numpy.concatenate([sizes, (tables > 0).sum(1), tables.max(1)], axis=1)

    a, b = figures(wanted), figures(actual)
    error = numpy.sqrt((a.var(0) + b.var(0)) / 1500) + 1e-9
    assert (abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()


def full_clients_get_more(counts: numpy.ndarray) -> bool:
    before = counts.cumsum(1) - counts  # what each holds when a label is dealt
    return bool(((before >= counts.sum() / CLIENTS) & (counts > 0)).any())


@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_a_client_with_its_even_part_gets_no_more(alpha: float) -> None:
    seen = []
    for seed in range(40):
        parts = _by_dirichlet(pools(), CLIENTS, alpha, True, seed)
        dealt = sorted(number for part in parts for number in part)
        assert dealt == list(range(sum(SIZES.values())))  # all, and none twice
        assert min(map(len, parts)) >= MINIMUM
        assert not full_clients_get_more(table(parts))
        seen.append(full_clients_get_more(table(_by_dirichlet(pools(), CLIENTS, 1.0, False, seed))))
    assert any(seen)


def test_the_scarcest_of_chance_does_not_stop_it() -> None:
    # With an alpha this small, the shares of all clients but one are often exactly zero.
    records: Pools = {str(n): list(range(25 * n, 25 * n + 25)) for n in range(8)}
    for seed in range(20):
        assert min(map(len, _by_dirichlet(records, CLIENTS, 1e-6, True, seed))) >= 25


def test_the_run_file_s_key_balances(tmp_path) -> None:
    write_records(tmp_path / "records.jsonl", chain(*(k * n for k, n in SIZES.items())))

    def divided(**more: Any) -> list[list[int]]:
        options = {"by": "dirichlet", "clients": CLIENTS, "alpha": 1.0, **more}
        counts = [labels(items(t)) for t in divide(tmp_path, seed=3, **options).values()]
        return [[count[label] for label in SIZES] for count in counts]

    balanced = divided(balanced=True)
    assert numpy.sum(balanced) == sum(SIZES.values())
    assert not full_clients_get_more(numpy.array(balanced))
    assert divided() == divided(balanced=False) != balanced
