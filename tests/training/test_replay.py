"""Replay: the divergence from the base on general samples, against dense distributions."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import VOCABULARY
from tensors import fill
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Adapter, detached
from coterie.adapters.full import FullAdapter
from coterie.bases import Base, load_tokenizer
from coterie.training import replay as module
from coterie.training.general import GeneralSamples, Replay
from coterie.training.replay import replayed
from coterie.training.spec import ReplaySpec, TrainingSpec


@pytest.fixture
def samples() -> list[Tensor]:
    """Three samples of 2 to 8 tokens."""
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=chance) for length in (8, 2, 5)]


@pytest.fixture
def loaded(base: PreTrainedModel) -> Base:
    """The base as clients load it."""
    return Base(base, load_tokenizer("tiny-gpt2"), "fp32", torch.device("cpu"))


def masks_of(samples: list[Tensor]) -> list[Tensor]:
    """Return masks in which the first token after the start does not count, unless it is alone."""
    masks = [torch.ones(len(ids) - 1, dtype=torch.bool) for ids in samples]
    for mask in masks:
        mask[0] = len(mask) == 1
    return masks


def dense(base: Base, model: PreTrainedModel, samples: list[Tensor]) -> Tensor:
    """Return KL(base || model) of each token, computed from all probabilities."""
    values: list[Tensor] = []
    for ids in samples:
        with torch.no_grad(), detached(base.model) as bare:
            target = bare(ids[None, :-1]).logits[0].log_softmax(-1)
        own = model(ids[None, :-1]).logits[0].log_softmax(-1)
        [mask] = masks_of([ids])
        values.append((target.exp() * (target - own)).sum(-1)[mask])
    return torch.cat(values)


def assert_dense(base: Base, adapter: Adapter | FullAdapter, samples: list[Tensor]) -> None:
    """Compare values and gradients with those of all probabilities."""
    with detached(base.model) as bare:
        general = GeneralSamples.of(base, bare, samples, masks_of(samples))
        assert general.drift(base, bare) == pytest.approx(0, abs=1e-12)
    model, chosen = adapter.attach(base.model), [2, 0]
    got = general.divergences(base, model, chosen)
    want = dense(base, model, [samples[number] for number in chosen])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7)
    assert got.mean() > 1e-3
    parameters = list(adapter.tensors().values())
    weights = torch.arange(1.0, len(got) + 1)
    grads = [torch.autograd.grad((values * weights).sum(), parameters) for values in (got, want)]
    for pair in zip(*grads, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6)
    mean = dense(base, model, samples).mean().item()
    assert general.drift(base, model) == pytest.approx(mean, abs=1e-7)


@pytest.mark.usefixtures("plain")
def test_divergences_are_those_of_all_probabilities(loaded, adapter, samples) -> None:
    assert_dense(loaded, adapter, samples)


def test_divergences_with_a_trained_head(loaded, samples) -> None:
    adapter = FullAdapter(loaded.model)
    fill(adapter.tensors(), 0.1, 3)
    adapter.require_grad(lambda _: True)
    assert_dense(loaded, adapter, samples)


def test_only_plain_heads_need_stored_states(loaded, plain, samples) -> None:
    with detached(loaded.model) as bare:
        general = GeneralSamples.of(loaded, bare, samples, masks_of(samples))
    assert len(general.states) == (len(samples) if plain else 0)


def context_of(ids: list[Tensor], **settings: Any) -> Any:
    training = TrainingSpec(steps=5, batch=3, micro_batch=2)
    replay = Replay(ReplaySpec(**settings), GeneralSamples(tuple(ids), tuple(masks_of(ids))))
    return SimpleNamespace(seed=0, name="ada", rounds=4, training=training, replay=replay)


def test_replay_begins_after_a_fraction_of_the_steps(samples) -> None:
    context: Any = context_of(samples, start=0.7, samples=3)
    model: Any = None
    pieces = [len(replayed(context, model, step, "joint", step, [])) for step in range(20)]
    assert pieces == [0] * 14 + [2] * 6  # three samples in pieces of at most two
    context.replay = None
    assert replayed(context, model, 19, "joint", 19, []) == []


def test_all_samples_are_read_before_one_is_read_again(samples) -> None:
    context = context_of([*samples, samples[0]], samples=3)

    def drawn(level: str) -> list[int]:
        updates = (module._chosen(context, context.replay, level, n) for n in range(8))
        return [number for update in updates for number in update]

    experts, routers = drawn("experts"), drawn("routers")
    for start in range(0, 24, 4):
        assert sorted(experts[start : start + 4]) == [0, 1, 2, 3]
    assert experts != routers
    assert len(Counter(tuple(experts[start : start + 4]) for start in range(0, 24, 4))) > 1
