"""The paired bootstrap: against naive loops, its guards, and how often its interval is right."""

import math
from typing import Any

import numpy as np
import pytest
from outcomes import outcome

from coterie.analysis import significance
from coterie.analysis.significance import DRAWS, Difference, Unpaired, differences
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.metrics import Metric
from coterie.evaluation.perplexity import PERPLEXITY


def difference(row: list[Any], other: list[Any], metric: Metric) -> Difference:
    """Return the difference of two rows; raise Unpaired if they cannot be paired."""
    result = differences({"one": row, "other": other}, "other", metric)["one"]
    if isinstance(result, Unpaired):
        raise result
    return result


def windows(chance: np.random.Generator, count: int, of: str, shift: float = 0) -> dict[str, Any]:
    tokens = chance.integers(1, 9, count)
    nats = tokens * (2 + shift + chance.normal(size=count) / 4)
    return {"of": of, "nats": nats.tolist(), "tokens": tokens.tolist()}


def drawn(monkeypatch) -> dict[str, list[Any]]:
    """Return the indices that the bootstrap draws, by purpose, as it draws them."""
    draws: dict[str, list[Any]] = {}
    original = significance._generator

    class Spy:
        def __init__(self, *purpose: str) -> None:
            self.chance, self.key = original(*purpose), " ".join(purpose)
            draws[self.key] = []  # the same text draws the same again

        def integers(self, *args: Any, **options: Any) -> Any:
            draws[self.key].append(self.chance.integers(*args, **options))
            return draws[self.key][-1]

    monkeypatch.setattr(significance, "_generator", Spy)
    return draws


def test_the_difference_is_that_of_naive_loops(monkeypatch) -> None:
    chance = np.random.default_rng(0)
    sizes = {"ada": 5, "bob": 3}

    def row(shift: float) -> list[dict[str, Any]]:
        def texts(seed: int) -> dict[str, Any]:
            return {n: windows(chance, k, f"{n}{seed}", shift) for n, k in sizes.items()}

        return [outcome(seed, **texts(seed)) for seed in (4, 5, 6)]

    better, other = row(0.1), row(0)
    draws = drawn(monkeypatch)
    result = difference(better, other, PERPLEXITY)
    seeds = draws["seeds"][0]
    assert seeds.shape == (2, DRAWS)  # one less than there are
    naive = []
    for draw in range(DRAWS):
        by_seed = []
        for number, seed in enumerate((4, 5, 6)):
            by_client = []
            for name in sizes:
                picks = np.concatenate(draws[f"windows {name}{seed}"])[draw]
                values = []
                for results in (better, other):
                    items = results[number]["items"]["trained"][name]
                    nats = sum(items["nats"][pick] for pick in picks)
                    values.append(math.exp(nats / sum(items["tokens"][p] for p in picks)))
                by_client.append(values[0] - values[1])
            by_seed.append(sum(by_client) / 2)
        naive.append(sum(by_seed[pick] for pick in seeds[:, draw]) / 2)
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])))
    rarer = min(sum(n <= 0 for n in naive), sum(n >= 0 for n in naive))
    assert result.p == pytest.approx(min(1, 2 * (rarer + 1) / (DRAWS + 1)))
    rows = (better, other)
    scores = ([s["perplexity"] for r in row for s in r["trained"].values()] for row in rows)
    first, second = map(np.mean, scores)
    assert result.value == pytest.approx(first - second)


def test_shares_are_means_over_the_samples_that_have_them() -> None:
    right, wrong = [1.0, None, 1.0, 1.0, 0.0], [0.0, None, 0.0, 1.0, 0.0]
    base = windows(np.random.default_rng(1), 5, "x")
    better, other = (outcome(0, ada=base | {"accuracy": values}) for values in (right, wrong))
    result = difference([better], [other], ACCURACY)
    assert result.value == pytest.approx(3 / 4 - 1 / 4)
    assert 0 <= result.low < result.high == 1


def test_equal_rows_differ_by_nothing_and_far_ones_surely() -> None:
    chance = np.random.default_rng(2)
    near = outcome(0, ada=windows(chance, 50, "x"))
    far = outcome(0, ada=windows(chance, 50, "x", shift=2))
    same = difference([near], [near], PERPLEXITY)
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert not same.significant
    more = difference([far], [near], PERPLEXITY)
    assert more.significant
    assert more.low < more.value < more.high
    assert more.p == pytest.approx(2 / (DRAWS + 1))
    assert difference([far], [near], PERPLEXITY) == more
    less = difference([near], [far], PERPLEXITY)
    assert (less.value, less.low) == pytest.approx((-more.value, -more.high))


def test_clients_with_the_same_text_are_resampled_together() -> None:
    """Show that a second client narrows the interval only if its text is another."""
    chance = np.random.default_rng(7)
    better, worse = (windows(chance, 60, "x", shift) for shift in (0, 0.02))
    alone = difference([outcome(0, a=better)], [outcome(0, a=worse)], PERPLEXITY)
    pairs = ([outcome(0, a=x, b={**x, "of": of}) for x in (better, worse)] for of in "xy")
    shared, apart = (difference([run], [other], PERPLEXITY) for run, other in pairs)
    assert shared == alone
    assert apart.high - apart.low < 0.9 * (alone.high - alone.low)


def test_only_seeds_that_both_have_are_compared() -> None:
    chance = np.random.default_rng(3)
    runs = [outcome(seed, ada=windows(chance, 20, "x")) for seed in (0, 1, 2)]
    assert difference(runs[:2], [runs[1]], PERPLEXITY).value == 0  # seed 1 with itself
    with pytest.raises(Unpaired, match="no seed in common"):
        difference(runs[:1], runs[1:], PERPLEXITY)


def test_rows_are_compared_each_by_itself() -> None:
    chance = np.random.default_rng(6)
    a, b, c = ([outcome(s, ada=windows(chance, 20, "x")) for s in (0, 1)] for _ in "abc")
    other = [outcome(0, ada=windows(chance, 20, "y"))]
    compared = differences({"a": a, "b": b, "c": c, "d": c[1:], "e": other}, "b", PERPLEXITY)
    assert list(compared) == ["e", "a", "c", "d"]
    assert isinstance(compared.pop("e"), Unpaired)
    for name, row in {"a": a, "c": c, "d": c[1:]}.items():
        assert compared[name] == difference(row, b, PERPLEXITY)


OTHER = {"of": "x", "nats": [1], "tokens": [1]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"items": {}}, "deployed runs, and runs made with earlier versions of Coterie"),
        ({"items": {"trained": {"ada": OTHER}}}, "a different round"),
        ({"ada": "y"}, "different clients, texts, tokens or windows"),
        ({"bob": "x"}, "different clients, texts, tokens or windows"),
    ],
)
def test_windows_that_cannot_be_paired_are_refused(change, why) -> None:
    chance = np.random.default_rng(4)
    run = outcome(0, ada=windows(chance, 9, "x"))
    texts = {"ada": "x"} if "items" in change else change
    other = outcome(0, **{name: windows(chance, 9, of) for name, of in texts.items()})
    other |= change if "items" in change else {}
    for first, second in ((run, other), (other, run)):
        with pytest.raises(Unpaired, match=why):
            difference([first], [second], PERPLEXITY)


@pytest.mark.parametrize("nested", [False, True])
def test_an_interval_holds_the_truth_about_as_often_as_it_says(nested, monkeypatch) -> None:
    """Check rows of five seeds with a true difference and random windows and seeds.

    Args:
        nested: Whether the seed divides the text, so that every seed has a test text of its own.
        monkeypatch: Reduces the number of draws.
    """
    monkeypatch.setattr(significance, "DRAWS", 200)
    chance, seeds, count, held, tries = np.random.default_rng(5), 5, 30, 0, 200
    for _ in range(tries):
        hard = chance.normal(size=(seeds if nested else 1, count)) / 20
        rows: list[list[Any]] = [[], []]
        for seed in range(seeds):
            gain = hard[seed % len(hard)] + chance.normal() / 50 + chance.normal(size=count) / 20
            common = chance.normal(size=count)
            for row, shares in zip(rows, (0.5 + gain + common, common), strict=True):
                items = {"of": f"x{seed % len(hard)}", "nats": [1] * count, "tokens": [1] * count}
                row.append(outcome(seed, ada=items | {"accuracy": shares.tolist()}))
        result = difference(rows[0], rows[1], ACCURACY)
        held += result.low <= 0.5 <= result.high
    assert 0.85 <= held / tries <= 0.99
