"""Bounds of uploads of different sizes in one exchange."""

from typing import Any

import pytest
import torch
from both_ends import exchange_of
from tensors import Tensors

from coterie.exchanges.bounds import (
    Bound,
    bounded,
    exclusions_and_limits,
    figures_of,
    measured,
    medians_of_others,
    scaled,
)
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.spec import AggregationSpec
from coterie.exchanges.weights import TOKENS, with_tokens
from coterie.messages import Field, Groups, Message, Schema
from coterie.transforms.context import Memory

CHANCE = torch.Generator().manual_seed(0)
START: Groups = {"adapter": {"A": torch.randn(8, 64, generator=CHANCE), "B": torch.zeros(64, 8)}}
"""The download of all clients: A is large, and B is zero."""
STEP = {n: 0.01 * torch.randn(t.shape, generator=CHANCE) for n, t in START["adapter"].items()}
SCHEMA = Schema(
    up=(Field("adapter", "pairs", reduce="mean"), Field("logits", "predictions")),
    down=(Field("adapter", "pairs"),),
)


def trained(times: float = 1.0, seed: int = 0) -> Message:
    """Return an upload whose change is `times` as large as the others'."""
    return moved({n: times * t for n, t in plus_noise(0.002, seed, STEP).items()})


def moved(change: dict[str, torch.Tensor]) -> Message:
    return Message(0, {"adapter": {n: START["adapter"][n] + t for n, t in change.items()}})


def plus_noise(size: float, seed: int, tensors: Tensors) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=chance) for n, t in tensors.items()}


def times(message: Message, factor: float, only: str = "") -> Message:
    tensors = message["adapter"].items()
    return Message(0, {"adapter": {n: factor * t if only in n else t for n, t in tensors}})


def bounds(uploads: list[Message], **keys: Any) -> tuple[dict[str, str], dict[str, Bound]]:
    """Return why uploads of the clients a, b, c and so on are excluded, and others' limits."""
    return between(uploads, START, **keys)


def between(uploads: list[Message], start: Groups, **keys: Any) -> Any:
    measures = {n: measured(u, start, 1) for n, u in zip("abcdefg", uploads, strict=False)}
    return exclusions_and_limits(AggregationSpec(**keys), measures, Memory())


HOSTILE = {
    "x3": times(trained(), 3),
    "x9": times(trained(), 9),
    "x0.05": times(trained(), 0.05),
    "x-1": times(trained(), -1),
    "only B x9": times(trained(), 9, "B"),
    "only A x1.1": times(trained(), 1.1, "A"),
    "noise": Message(0, {"adapter": plus_noise(1, 1, trained()["adapter"])}),
    "change x9": trained(9),
    "reversed change x9": trained(-9),
    "change x4": trained(4),
}


@pytest.mark.parametrize("clients", range(2, 10))
def test_medians_of_others_are_medians_without_one_row(clients: int) -> None:
    rows = torch.randn(clients, 40, dtype=torch.float64).round(decimals=1)  # with ties
    expected = [torch.cat([rows[:i], rows[i + 1 :]]).quantile(0.5, dim=0) for i in range(clients)]
    torch.testing.assert_close(medians_of_others(rows), torch.stack(expected))


@pytest.mark.parametrize(
    ("by", "others", "excluded"),
    [
        *((2.9, 3, False), (9, 3, True), (-1.9, 3, False), (-2.1, 3, True), (-2.9, 3, True)),
        *((-2.9, 2, False), (-9, 2, True)),
    ],
)
def test_a_change_against_the_others_has_two_thirds_of_the_bound(by, others, excluded) -> None:
    # With two others, it is undecidable which change points against the others.
    uploads = [*(trained(seed=n) for n in range(others)), trained(by, seed=others)]
    refused, _ = bounds(uploads)
    assert [*refused] == (["abcdefg"[others]] if excluded else [])
    reason = " and points against the others'"
    assert all(text.endswith(reason) == (by < 0 and others > 2) for text in refused.values())


@pytest.mark.parametrize(("honest", "hostile"), [(3, 1), (4, 1), (5, 2), (7, 3)])
def test_only_hostile_clients_point_against_the_others(honest: int, hostile: int) -> None:
    # In a comparison with the sum of the others, an honest client would look hostile, too.
    common, chance = torch.randn(2000), torch.Generator().manual_seed(honest)
    measures, start = {}, {"adapter": {"A": torch.zeros(2000)}}
    for i in range(honest + hostile):
        change = common + torch.randn(2000, generator=chance)
        upload = Message(0, {"adapter": {"A": change if i < honest else -2.9 * change}})
        measures[f"{i}"] = measured(upload, start, 1)
    cosines = {name: figures["cosine"] or 0 for name, figures in figures_of(measures).items()}
    assert all((cosines[f"{i}"] > 0.05) == (i < honest) for i in range(honest + hostile))
    assert all(cosines[f"{i}"] < -0.2 for i in range(honest, honest + hostile))


@pytest.mark.parametrize("honest", [2, 3, 4])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_change_beyond_the_bound_is_excluded_and_no_other(hostile: str, honest: int) -> None:
    uploads = [trained(seed=n) for n in range(honest)]
    excluded, limits = bounds([*uploads, HOSTILE[hostile]])
    assert [*excluded] == ["abcdefg"[honest]]
    assert "the change of its adapter is " in next(iter(excluded.values()))
    assert not limits


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 1, 2.5], [0.01, 1, 1], [0, 1, 2], [0, 0, 1], [1]])
def test_uneven_clients_count_as_they_are(sizes: list[float]) -> None:
    assert bounds([trained(size) for size in sizes]) == ({}, {})


@pytest.mark.parametrize("small", [0.05, 0.2, 0.01])
@pytest.mark.parametrize("clients", [2, 4, 6])
def test_a_half_that_shrinks_its_changes_excludes_nobody(small: float, clients: int) -> None:
    half = clients // 2
    uploads = [trained(small, n) for n in range(half)] + [trained(seed=n) for n in range(half)]
    excluded, limits = bounds(uploads)
    assert not excluded
    larger = dict(list(zip("abcdefg", uploads, strict=False))[half:])
    assert limits.keys() == larger.keys()
    for name, upload in larger.items():
        change = bounded(name, upload, START, limits[name])["adapter"]["B"]  # which was zero
        cosine = torch.cosine_similarity(change.flatten(), upload["adapter"]["B"].flatten(), 0)
        assert cosine > 0.999
        # The larger ones are shortened to three times the smaller ones.
        ratio = float(change.norm() / uploads[0]["adapter"]["B"].norm())
        assert ratio == pytest.approx(3, rel=0.1)


def test_a_half_that_shrinks_its_uploads_is_scaled_to_the_others_changes() -> None:
    good = [trained(seed=n) for n in range(2)]
    excluded, limits = bounds([*good, *(times(upload, 0.05) for upload in good)])
    assert not excluded
    assert [*limits] == ["c", "d"]
    shrunk = bounded("c", times(good[0], 0.05), START, limits["c"])
    size, _ = measured(shrunk, START, 1).sizes["change", "adapter"]
    honest, _ = measured(good[0], START, 1).sizes["change", "adapter"]
    assert size == pytest.approx(2 * honest, rel=0.1)  # they point against the others'


def test_without_a_bound_everything_counts() -> None:
    assert bounds([trained(), trained(), trained(1e6)], largest_change=None) == ({}, {})


def test_other_numbers_are_bounded_by_their_norm() -> None:
    logits = [Message(0, {"logits": {"values": f * torch.ones(5)}}) for f in (1, 1, 9, 11)]
    assert [*bounds(logits)[0]] == ["d"]
    excluded, limits = bounds([logits[0], logits[3]])  # a half
    assert not excluded
    kept = bounded("b", logits[3], {}, limits["b"])["logits"]["values"]
    assert torch.allclose(kept, 10 * torch.ones(5))


def test_a_half_with_few_tokens_does_not_exclude_the_others() -> None:
    def exchange(clients: str) -> Exchange:
        running = exchange_of(SCHEMA, rules=AggregationSpec(weights="tokens"))
        running.strict = False
        for name in clients:
            tokens = {"a": 1, "b": 1, "c": 5000, "d": 90}[name]
            running.join(name, with_tokens(Message(), tokens))
            running.put(name, with_tokens(trained(), tokens), lambda *_: START)
        running.settle()
        return running

    two, four = exchange("ac"), exchange("abcd")
    assert {name: two.weight(name) for name in two.counted} == {"a": 1, "c": 100}
    assert two._stored("c").read().values[TOKENS.name] == 100
    assert four.refused == {"c": "its number of tokens is 5e+03 times the round's median"}


@pytest.mark.parametrize("rank", [8, 5, 1])
def test_a_change_is_measured_from_the_rows_that_a_client_still_has(rank: int) -> None:
    whole = trained()["adapter"]
    cut = Message(0, {"adapter": {"A": whole["A"][:rank], "B": whole["B"][:, :rank]}})
    change, count = measured(cut, START, 1).sizes["change", "adapter"]
    expected = [whole["A"][:rank] - START["adapter"]["A"][:rank], whole["B"][:, :rank]]
    together = torch.cat([t.flatten() for t in expected]).double()
    assert change == pytest.approx(float(together.norm()), rel=1e-9)
    assert count == len(together)


def test_scaling_reaches_the_start_and_leaves_whole_numbers() -> None:
    upload = trained()
    tensors = {**upload["adapter"], "n": torch.arange(3)}
    half = scaled(Message(0, {"adapter": tensors}), START, {"adapter": 0.5})["adapter"]
    for name, tensor in upload["adapter"].items():
        middle = (tensor.double() + START["adapter"][name].double()) / 2
        assert torch.allclose(half[name].double(), middle, atol=1e-7)
        assert half[name].dtype == tensor.dtype
    assert torch.equal(half["n"], torch.arange(3))
    none = scaled(upload, START, {"adapter": 0.0})["adapter"]
    assert torch.allclose(none["A"], START["adapter"]["A"], atol=1e-7)


def test_figures_have_the_ratio_and_the_cosine_to_the_others() -> None:
    uploads = {n: trained(seed=s) for s, n in enumerate("abc")} | {"d": trained(-2)}
    measures = {n: measured(u, START, 1) for n, u in uploads.items()}
    metrics = figures_of(measures)
    assert [round(metrics[n]["ratio"] or 0) for n in "abcd"] == [1, 1, 1, 2]
    assert all((metrics[n]["cosine"] or 0) > 0.5 for n in "abc")
    assert (metrics["d"]["cosine"] or 0) < -0.9
    assert figures_of({"a": measures["a"]}) == {"a": {"ratio": 1.0, "cosine": None}}
    assert figures_of({"a": measured(moved({}), START, 1)}) == {}


@pytest.mark.parametrize("counts", [(16, 16, 16, 3), (3, 3, 3, 48), (4, 16, 64, 64)])
@pytest.mark.parametrize("grows", [True, False])
def test_clients_of_different_ranks_are_no_outliers(counts: tuple[int, ...], grows: bool) -> None:
    # Norms may grow with the number of parameters, as with AdamW, or not.
    start: Groups = {"adapter": {"A": torch.zeros(64, 8)}}
    sizes = [(count, 1.0 if grows else count**-0.5) for count in counts]
    uploads = [Message(0, {"adapter": {"A": torch.full((n, 8), x)}}) for n, x in sizes]
    assert between(uploads, start, largest_change=1.01) == ({}, {})
    figures = figures_of({str(i): measured(u, start, 1) for i, u in enumerate(uploads)})
    assert all(round(f["ratio"] or 0, 6) <= 1 for f in figures.values())


def test_bounds_are_of_each_group_by_itself() -> None:
    sizes = ((1.0, 1.0), (1.0, 9.0), (9.0, 1.0), (1.0, 1.0))
    uploads = [Message(0, {g: {"w": torch.full((4,), x)} for g, x in zip("pq", s)}) for s in sizes]  # noqa: B905
    excluded, _ = between(uploads, {group: {"w": torch.zeros(4)} for group in "pq"})
    assert excluded == {
        "b": "the change of its q is 9 times the round's median",
        "c": "the change of its p is 9 times the round's median",
    }
