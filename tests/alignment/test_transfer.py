"""Predictions in another vocabulary, against dictionaries filled one token after another."""

import math

import naive_transfer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_transfer import in_dictionary
from torch import Tensor

from coterie.alignment.transfer import SoftTargets, first, mixed, translated

TEACHER, STUDENT = 9, 5
NONE = -math.inf
MAPS = st.lists(st.integers(-1, STUDENT - 1), min_size=TEACHER, max_size=TEACHER)
TEMPERATURES = st.sampled_from([0.5, 1.0, 2.0])


def dense(probs: SoftTargets) -> Tensor:
    return naive_transfer.dense(probs, STUDENT)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw tokens and log-probabilities of a few positions, the likeliest first, -1 for none."""
    k = draw(st.integers(1, 6))
    tokens, logprobs = [], []
    for _ in range(draw(st.integers(1, 4))):
        ids = st.lists(st.integers(0, TEACHER - 1), max_size=k, unique=True)
        row = draw(ids)
        if row and draw(st.booleans()):
            row[draw(st.integers(0, len(row) - 1))] = -1  # as a server's map leaves it
        raw = [draw(st.floats(-6, 0)) for _ in row]
        total = math.log(sum(map(math.exp, raw))) if raw else 0
        raw = [value - max(0, total) for value in sorted(raw, reverse=True)]
        tokens.append([*row, *[-1] * (k - len(row))])
        logprobs.append([*raw, *[NONE] * (k - len(row))])
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(logprobs)


def as_dict(probs: SoftTargets, row: int) -> dict[int, float]:
    pairs = zip(probs.tokens[row].tolist(), probs.probs[row].tolist(), strict=True)
    kept = [(token, prob) for token, prob in pairs if prob]
    assert len(dict(kept)) == len(kept)
    return dict(kept)


@given(rows(), MAPS, TEMPERATURES)
@settings(max_examples=200)
def test_predictions_are_those_of_a_dictionary(given_rows, ids, temperature) -> None:
    tokens, logprobs = given_rows
    lognorm = logprobs.logsumexp(-1)
    map_ids = torch.tensor(ids, dtype=torch.int32)
    got = translated(tokens, logprobs, lognorm, map_ids, temperature)
    dtypes = [tensor.dtype for tensor in (got.tokens, got.probs, got.mass)]
    assert dtypes == [torch.int64, torch.float32, torch.float32]
    assert got.tokens.shape == got.probs.shape == tokens.shape
    assert ((got.tokens >= 0) & (got.tokens < STUDENT)).all()
    for row in range(len(tokens)):
        probs, mass = in_dictionary(tokens[row].tolist(), logprobs[row].tolist(), ids, temperature)
        assert as_dict(got, row) == pytest.approx(probs, abs=1e-5)
        assert got.mass[row].item() == pytest.approx(mass, abs=1e-5)
        total = got.probs[row].sum().item()
        assert total == pytest.approx(1) if probs else total == 0


@given(rows())
@settings(max_examples=50)
def test_the_identity_changes_nothing(given_rows) -> None:
    tokens, logprobs = given_rows
    lognorm = logprobs.logsumexp(-1)
    mapped = translated(tokens, logprobs, lognorm, torch.arange(TEACHER, dtype=torch.int32))
    plain = translated(tokens, logprobs, lognorm)
    for name in ("tokens", "probs", "mass"):
        assert torch.equal(getattr(mapped, name), getattr(plain, name))
    assert torch.equal(plain.tokens, tokens.long().clamp(min=0))


@given(st.lists(st.lists(st.integers(-1, 3), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=50)
def test_first_of_equal_tokens_in_a_row(tokens) -> None:
    expected = [[row.index(token) == n for n, token in enumerate(row)] for row in tokens]
    assert first(torch.tensor(tokens)).tolist() == expected


def some(seed: int, p: int, k: int) -> SoftTargets:
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(STUDENT, (p, k), generator=chance)
    probs = torch.rand(p, k, generator=chance).softmax(-1)
    return SoftTargets(tokens, probs, torch.rand(p, generator=chance))


def test_of_labels_all_is_on_one_token() -> None:
    labels = torch.tensor([3, 0, 4], dtype=torch.int32)
    got = SoftTargets.of(labels, 3)
    assert got.tokens.shape == got.probs.shape == (3, 3)
    assert torch.equal(dense(got), torch.eye(STUDENT)[labels.long()])
    assert not got.mass.any()


@pytest.mark.parametrize(
    "positions",
    [torch.tensor([2, 0]), torch.tensor([False, True, True, False]), torch.zeros(0).long()],
)
def test_some_positions_are_taken_and_replaced(positions) -> None:
    probs, others = some(0, 4, 3), some(1, 4, 3)
    part = others[positions]
    numbers = torch.arange(4)[positions].tolist()
    assert torch.equal(dense(part), dense(others)[positions])
    assert torch.equal(part.mass, others.mass[positions])
    before, mass = dense(probs), probs.mass.clone()
    probs[positions] = part
    for row in range(4):
        replaced = row in numbers
        assert torch.equal(dense(probs)[row], (dense(others) if replaced else before)[row])
        assert probs.mass[row] == (others.mass if replaced else mass)[row]


def test_what_is_unknown_is_what_others_say() -> None:
    probs, others = some(0, 4, 3), some(1, 4, 3)
    probs.probs[[1, 3]] = 0
    got = probs.or_else(others)
    for row, source in enumerate([probs, others, probs, others]):
        assert torch.equal(dense(got)[row], dense(source)[row])
        assert got.mass[row] == source.mass[row]


@pytest.mark.parametrize("weight", [torch.tensor([0.0, 0.25, 0.5, 1.0]), torch.tensor(0.3)])
def test_a_mean_weighs_both(weight) -> None:
    a, b = some(0, 4, 3), some(1, 4, 2)
    got = mixed(a, b, weight)
    assert got.tokens.shape == got.probs.shape == (4, 5)
    w = weight if weight.dim() else weight.repeat(4)
    torch.testing.assert_close(dense(got), w[:, None] * dense(a) + (1 - w[:, None]) * dense(b))
    torch.testing.assert_close(got.mass, w * a.mass + (1 - w) * b.mass)
    torch.testing.assert_close(got.probs.sum(-1), torch.ones(4))
