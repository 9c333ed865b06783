"""Samples of similar lengths are read together: less padding, the same figures as one by one."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import gpt2, llama
from tensors import fill
from torch import Tensor
from torch.nn import functional as F

from coterie.adapters import Adapter, AmoleAdapter, AmoleLayout, Layout, of_roles
from coterie.adapters.prompt import soft_prompt
from coterie.bases.sites import chosen_linears
from coterie.losses import tokens as loss_module
from coterie.losses.tokens import (
    Batch,
    language_model_loss,
    logits_in_pieces,
    soft_target_loss,
    token_losses,
)

LENGTHS = [9, 3, 14, 4, 9, 15, 2]
"""Tokens that samples read."""


@pytest.fixture
def batch() -> Batch:
    """Samples of these lengths, of which the last third is counted."""
    chance = torch.Generator().manual_seed(1)
    longest, lengths = max(LENGTHS), torch.tensor(LENGTHS)[:, None]
    place = torch.arange(longest)
    real = place < lengths
    ids = torch.randint(1, 61, (len(LENGTHS), longest + 1), generator=chance)
    ids[:, 1:] *= real
    return Batch(ids, real & (place >= lengths * 2 // 3), real)


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def base(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param().eval().double()


def mixture(base: Any) -> Adapter:
    layout = Layout(1, 3, rank=2, attention_rank=2)  # four experts, of which two work
    return Adapter(base, layout, seed=0, client="ada", common=lambda _: False)


def amole(base: Any, load: Any = "top_k") -> AmoleAdapter:
    layout = AmoleLayout(experts=5, rank=2, load=load)
    held = dict.fromkeys(chosen_linears(base, layout.targets), (0, 2, 3, 4))
    return AmoleAdapter(base, layout, 0, held)


def attached(adapter: Any, base: Any) -> Any:
    """Attach an adapter after its tensors are filled with values that are not zero."""
    fill(adapter.tensors(), 0.3, 5)
    roles = ("dense", "generalist", "specialist", "router", "shared", "domain")
    adapter.require_grad(of_roles(*roles))
    return adapter.attach(base)


def pieces(batch: Any, price: int) -> list[list[int]]:
    return [rows.tolist() for rows, _ in batch.pieces(price)]


def cost(parts: list[list[int]], price: int) -> int:
    return sum(len(part) * max(LENGTHS[n] for n in part) + price for part in parts)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all partitions of a list."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


@pytest.mark.parametrize("price", [0, 1, 5, 12, 1000])
def test_pieces_cost_least_of_all_ways_to_share_samples_out(batch: Any, price: int) -> None:
    chosen = pieces(batch, price)
    assert sorted(n for part in chosen for n in part) == list(range(len(LENGTHS)))
    least = min(cost(parts, price) for parts in partitions(list(range(len(LENGTHS)))))
    assert cost(chosen, price) == least
    assert (chosen == [list(range(len(LENGTHS)))]) == (price == 1000)


def test_pieces_hold_the_samples_and_no_more_padding_than_their_longest(batch: Any) -> None:
    for rows, part in batch.pieces(5):
        time = max(LENGTHS[n] for n in rows)
        assert part.real.sum(1).tolist() == [LENGTHS[n] for n in rows]
        assert torch.equal(part.ids, batch.ids[rows, : time + 1])
        assert torch.equal(part.counted, batch.counted[rows, :time])


def test_a_batch_without_padding_is_one_piece(batch: Any) -> None:
    assert pieces(Batch(batch.ids), 0) == [list(range(len(LENGTHS)))]
    [(_, part)] = Batch(batch.ids, batch.counted).pieces(0)
    assert torch.equal(part.ids, batch.ids)


def test_parts_of_a_batch_by_length_hold_similar_samples(batch: Any) -> None:
    parts: Any = batch.by_length().split(2)
    assert [n for part in parts for n in part.real.sum(1).tolist()] == sorted(LENGTHS)
    plain = Batch(batch.ids)
    assert plain.by_length() is plain


def alone(model: Any, batch: Any) -> list[Tensor]:
    """Return the logits of each sample's counted tokens without padding."""
    return [
        model(batch.ids[n : n + 1, :length]).logits[0, -length:][batch.counted[n, :length]]
        for n, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("price", [0, 5, 1000])
def test_figures_are_those_of_samples_alone_in_their_order(
    base: Any, batch: Any, price: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The figures are losses, logits, and losses of hard and soft targets, also with a soft prompt.
    monkeypatch.setitem(loss_module.PIECE_COST, "cpu", price)
    targets = batch.ids[:, 1:][batch.counted]
    soft = torch.stack([targets, (targets + 7) % 61], 1)
    chance = torch.Generator().manual_seed(2)
    probs = torch.rand(len(targets), generator=chance, dtype=torch.float64)
    probs = torch.stack([probs, 1 - probs], 1)
    for adapter in (mixture(base), soft_prompt(base, 3, 0, 0.5)):
        model = adapter.attach(base)
        with torch.no_grad():
            logits = torch.cat(alone(model, batch))
        expected = F.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(torch.cat(list(logits_in_pieces(model, batch))), logits)
        losses = token_losses(model, *batch)
        torch.testing.assert_close(losses[batch.counted], expected.float())
        assert (losses[~batch.counted] == 0).all()
        torch.testing.assert_close(language_model_loss(model, *batch), expected.mean())
        wanted = -(logits.log_softmax(-1).gather(1, soft) * probs).sum(1).mean()
        actual = soft_target_loss(model, batch, soft, probs)
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kind", ["mixture", "amole", "amole, first"])
def test_gradients_and_load_balance_do_not_change_with_pieces(
    base: Any, batch: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The load balance is computed over all tokens of a batch, not over its last piece.
    adapter: Any = mixture(base) if kind == "mixture" else amole(base, kind[7:] or "top_k")
    model = attached(adapter, base)
    wanted = [p for p in adapter.tensors().values() if p.requires_grad]
    results = []
    for price in (1000, 5, 0):
        monkeypatch.setitem(loss_module.PIECE_COST, "cpu", price)
        loss = language_model_loss(model, *batch)
        balance = adapter.load_balance(*(["uniform"] if kind == "mixture" else []))
        grads = torch.autograd.grad(loss + 10 * balance, wanted)
        results.append([loss.detach(), balance.detach(), *grads, *adapter.routing().values()])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_the_next_batch_begins_anew(base: Any, batch: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(loss_module.PIECE_COST, "cpu", 5)
    for adapter in (mixture(base), amole(base)):
        model = attached(adapter, base)
        language_model_loss(model, *batch.only(torch.arange(3)))
        language_model_loss(model, *batch)
        once = adapter.routing()
        language_model_loss(model, *batch)
        assert all(torch.equal(w, adapter.routing()[path]) for path, w in once.items())


def test_pieces_are_few_on_a_device_that_is_slow_to_start(batch: Any) -> None:
    prices = [0, 5, 12, 30, 100]
    counts = [len(pieces(batch, price)) for price in prices]
    assert counts[-1] == 1
    assert all(more >= fewer for more, fewer in pairwise(counts))
