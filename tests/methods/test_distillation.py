"""A side's choice among made-up teachers, and what it then learns, position by position."""

import math
from collections.abc import Callable
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import some
from naive_distillation import TOP, counterpart, naive
from naive_transfer import dense
from tensors import fill

from coterie.alignment.knowledge import Knowledge, Positions
from coterie.bases import Base, load_base
from coterie.data.examples import Encoding, Examples
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import examples
from coterie.data.parts import bare_encoder
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss, soft_target_loss
from coterie.methods.contract import ClientContext
from coterie.methods.fedmkt.distillation import NO_TEACHER, Distiller
from coterie.methods.fedmkt.method import FedMKT
from coterie.seeding import generator
from coterie.training.schedule import learning_rate
from coterie.training.spec import TrainingSpec

ITEMS = [
    Instruction("Who purrs?\n", "the cat"),
    Instruction("Who trumpets? ", "a very old elephant"),
    Instruction("And elsewhere?", "naïve 😀"),
    Instruction("Nobody?\n", "no"),
    Instruction("Who barks?", "a dog"),
]
ELSE = Instruction("Who else?", "a bird")
TRAINING = TrainingSpec(steps=3, batch=2, learning_rate=1e-2, precision="fp32")
Make = Callable[..., Distiller]


@pytest.fixture(scope="module")
def base(bases: Path) -> Base:
    return load_base(str(bases / "llama"), "fp32", 64)


def encoded(base: Base, items: list[Instruction]) -> Examples:
    encoder, end = bare_encoder(base.tokenizer)
    ends = base.context_token, end
    return examples(items, Encoding(encoder, ends, 60, None, "The public text"))


def distiller_of(
    base: Base, items: list[Instruction], training: TrainingSpec = TRAINING, **method: Any
) -> Distiller:
    """Return a distiller whose adapter is not zero."""
    samples = encoded(base, items)
    data = ClientData(samples, samples, samples)
    context = ClientContext("ada", 3, base, data, 60, training, 2, lambda *_: None, samples)
    values: dict[str, Any] = {"attention": {"rank": 4}, "logits": TOP}
    chosen = FedMKT.model_validate(values | method)
    adapter = chosen.adapter(base.model, 0, "ada")
    fill(adapter.tensors(), 0.1, 5)
    return Distiller(chosen, context, adapter)


@pytest.fixture
def make(base: Base) -> Make:
    return lambda items=ITEMS, **changes: distiller_of(base, items, **changes)


def made_up(
    base: Base, seed: int, losses: list[float], items: list[Instruction] = ITEMS, k: int = TOP
) -> Knowledge:
    """Return random predictions with the same tokenizer; some positions are within characters."""
    of = Positions.of(encoded(base, items), base.tokenizer)
    chance = torch.Generator().manual_seed(seed)
    p, size = len(of.ends), len(base.tokenizer)
    tokens = torch.rand(p, size, generator=chance).topk(k).indices
    logprobs = 2 * torch.randn(p, k, generator=chance).sort(descending=True).values
    logprobs = (logprobs - logprobs.logsumexp(-1, keepdim=True) - 0.1).half()
    ends = of.ends.clone()
    ends[(torch.rand(p, generator=chance) < 0.2) & (ends != 0)] = -1
    return Knowledge(
        of.samples, torch.tensor(losses), of.starts, ends, tokens.int(), logprobs,
        logprobs.float().logsumexp(-1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "teachers"),
    [
        ({0: [1.0, 3.0, 1.5, 2.0, 2.5], 1: [1.1, 2.1, 1.4, 2.0, 0.5], 2: [0.9, 2.2, 1.6, 3.0, 0.4]},
         [2, NO_TEACHER, 1, NO_TEACHER, 2]),
        ({0: [1.0] * 5, 1: [1.0] * 5}, None),
    ],
    ids=["different losses", "equal losses"],
)  # fmt: skip
def test_of_each_sample_the_best_teaches_if_it_is_better(base, make, losses, teachers) -> None:
    # The order of offers makes no difference. The first of equal teachers teaches.
    distiller = make()
    own = made_up(base, 0, [2.0] * 5)
    offers = {number: made_up(base, number + 1, each) for number, each in losses.items()}
    for order in permutations(offers):
        distiller.begin(own)
        for number in order:
            distiller.offer(number, offers[number])
        expected = teachers or [order[0]] * 5
        best = [2.0 if n < 0 else losses[n][i] for i, n in enumerate(expected)]
        assert distiller.teachers.tolist() == expected
        assert distiller.best_losses.tolist() == pytest.approx(best)
        assert distiller.own_losses.tolist() == [2.0] * 5
        targets = naive(distiller, expected, offers, own)
        torch.testing.assert_close(dense(distiller.targets, len(base.tokenizer)), targets)


def test_teachers_may_know_other_samples_in_another_order(base, make) -> None:
    # A side that cannot predict a sample learns it from any teacher that has it.
    distiller = make()
    own = made_up(base, 0, [2.0, 2.0, 2.0], [ITEMS[4], ITEMS[0], ITEMS[3]])
    other = made_up(base, 1, [1.0, 9.0, 1.5, 3.0], [ELSE, ITEMS[2], ITEMS[0], ITEMS[4]])
    distiller.begin(own)
    assert distiller.own_losses.tolist() == [2, math.inf, math.inf, 2, 2]
    distiller.offer(0, other)
    assert distiller.teachers.tolist() == [0, NO_TEACHER, 0, NO_TEACHER, NO_TEACHER]
    expected = naive(distiller, distiller.teachers.tolist(), {0: other}, own)
    torch.testing.assert_close(dense(distiller.targets, len(base.tokenizer)), expected)


def test_a_sample_that_stands_twice_is_taught_twice(base, make) -> None:
    items = [ITEMS[1], ITEMS[0], ITEMS[1]]
    distiller = make(items)
    distiller.begin(made_up(base, 0, [2.0, 2.0], items[:2]))
    distiller.offer(0, made_up(base, 1, [1.0, 3.0], items[:2]))
    assert distiller.teachers.tolist() == [0, NO_TEACHER, 0]
    learns, starts = dense(distiller.targets, len(base.tokenizer)), distiller.positions.starts
    assert torch.equal(learns[: starts[1]], learns[starts[2] :])


@pytest.mark.parametrize("own", ["labels", "self", "mean"])
@pytest.mark.parametrize("temperature", some({2.0}, [1.0, 2.0]))
@pytest.mark.parametrize("mapped", [False, True])
def test_targets_are_those_of_each_position_alone(base, make, own, temperature, mapped) -> None:
    distiller = make(own=own, temperature=temperature)
    chance = torch.Generator().manual_seed(9)
    size = len(base.tokenizer)
    ids = torch.randint(-size // 2, size, (size,), generator=chance).clamp(min=-1).int()
    predictions = made_up(base, 0, [2.0, 1.0, 2.0, 0.5], ITEMS[:4])
    offers = {
        0: made_up(base, 1, [1.0, 3.0, 1.9, 1.0, 1.5], k=TOP + 2),  # more than asked: cut
        1: made_up(base, 2, [1.2, 0.2, 1.5, 1.0, 1.1], k=2),
    }
    distiller.begin(predictions)
    for number, offer in offers.items():
        distiller.offer(number, offer, ids if mapped else None)
    teachers = [0, 1, 1, NO_TEACHER, 1]
    assert distiller.teachers.tolist() == teachers
    expected = naive(distiller, teachers, offers, predictions, ids if mapped else None)
    torch.testing.assert_close(
        dense(distiller._mixed_targets(), len(base.tokenizer)), expected, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(distiller._mixed_targets().probs.sum(-1), torch.ones(len(expected)))


def test_quality_counts_what_was_taken_over(base, make) -> None:
    distiller = make()
    own = made_up(base, 0, [2.0] * 5)
    distiller.begin(own)
    assert distiller.quality() == {"samples": 0, "positions": 0, "mass": 0}
    offer = made_up(base, 1, [1.0, 3.0, 1.0, 3.0, 1.0])
    size = len(base.tokenizer)
    ids = torch.where(torch.arange(size) % 3 == 0, -1, torch.arange(size)).int()
    distiller.offer(0, offer, ids)
    mass = []
    for sample in (0, 2, 4):
        for place in range(*distiller.positions.starts[sample:][:2]):
            position = counterpart(distiller, sample, int(distiller.positions.ends[place]), offer)
            kept = ids[offer.tokens[position or 0].long()] >= 0
            probability = offer.logprobs[position or 0].float().exp()[kept].sum().item()
            mass.append(0.0 if position is None else probability)
    covered = [value for value in mass if value]
    assert 0 < len(covered) < len(mass)
    quality = distiller.quality()
    assert quality["samples"] == 3
    assert quality["positions"] == pytest.approx(len(covered) / len(mass))
    assert quality["mass"] == pytest.approx(sum(covered) / len(covered), rel=1e-4)


def test_what_a_side_knows_is_what_its_model_predicts(make) -> None:
    # Losses are per byte of the answer. A sample that occurs twice has one loss.
    items = [ITEMS[0], ITEMS[3], ITEMS[0], ITEMS[1]]
    distiller = make(items)
    known, samples = distiller.knowledge(), distiller.samples
    assert torch.equal(known.samples, distiller.positions.samples[[0, 1, 3]])
    size = len(distiller.context.base.tokenizer)
    Knowledge.received(known.tensors(), size, distiller.settings.logits)
    model = distiller.model()
    for n, number in enumerate((0, 1, 3)):
        places = (samples.starts[number], samples.answers[number], samples.starts[number + 1])
        start, answer, end = map(int, places)
        ids = samples.ids[start:end].long()
        with torch.no_grad():
            logprobs = model(ids[None, :-1]).logits[0, answer - start - 1 :].log_softmax(-1)
        nats = -logprobs.gather(1, ids[answer - start :, None]).sum().item()
        length = len(items[number].answer.encode())
        assert known.losses[n].item() == pytest.approx(nats / length, rel=1e-4)
        rows = slice(*known.starts[n : n + 2].tolist())
        values, tokens = logprobs.topk(TOP)
        assert torch.equal(known.tokens[rows].long(), tokens)
        torch.testing.assert_close(known.logprobs[rows].float(), values, rtol=0, atol=5e-3)
        torch.testing.assert_close(known.lognorm[rows], values.logsumexp(-1), rtol=0, atol=1e-4)


def test_targets_are_the_answers_tokens(make) -> None:
    distiller = make()
    batch: Any = distiller.samples.batch(range(len(ITEMS)))
    assert torch.equal(distiller.labels, batch.ids[:, 1:][batch.counted])


@pytest.fixture
def poisoned(bases) -> Base:
    """One token, which is in the third answer alone, has no finite embedding."""
    base = load_base(str(bases / "llama"), "fp32", 64)
    samples = encoded(base, ITEMS)
    rows = [set(samples.ids[a:b].tolist()) for a, b in pairwise(samples.starts.tolist())]
    token = min(rows[2].difference(*rows[:2], *rows[3:]))
    weight: Any = base.model.get_input_embeddings().weight
    weight.data[token] = torch.nan
    return base


def test_what_is_not_finite_is_left_out_and_named(poisoned, caplog) -> None:
    distiller = distiller_of(poisoned, ITEMS)
    known = distiller.knowledge()
    assert torch.equal(known.samples, distiller.positions.samples[[0, 1, 3, 4]])
    assert all(tensor.isfinite().all() for tensor in known.tensors().values())
    assert "ada has no finite predictions for 1 public samples" in caplog.text
    assert "The first excluded samples have the numbers 3 (numbers start at 1" in caplog.text
    distiller.begin(known)
    assert distiller.own_losses.isinf().tolist() == [False, False, True, False, False]


def test_a_side_that_knows_nothing_is_told_what_may_help(make) -> None:
    distiller = make()
    for parameter in distiller.adapter.tensors().values():
        parameter.data.fill_(torch.nan)
    with pytest.raises(CoterieError, match="learning_rate"):
        distiller.begin(distiller.knowledge())


def test_a_loss_that_is_not_finite_stops_the_distillation(poisoned) -> None:
    distiller = distiller_of(poisoned, ITEMS[2:3])
    distiller.begin(made_up(poisoned, 0, [2.0], ITEMS[2:3]))
    with pytest.raises(CoterieError, match=r"'ada'.*learning_rate"):
        distiller.distil(0)
    assert all(p.isfinite().all() for p in distiller.adapter.tensors().values())


@pytest.mark.parametrize("clip", some({0.05}, [None, 0.05]))
@pytest.mark.parametrize(
    ("task", "temperature", "own"),
    [(1.0, 1, "labels"), *product([0.3], [1, 2], ["labels", "none"]), (0.0, 1, "none")],
)
def test_distillation_is_training_on_both_losses(base, make, task, temperature, own, clip) -> None:
    # As published (own: none), the teachers' loss is a mean over the samples that are taught, also
    # if a batch is computed in pieces.
    limits = {"max_grad_norm": clip, "micro_batch": 1 if own == "none" else None}
    training = TRAINING.model_copy(update=limits)
    settings = {"task_weight": task, "temperature": temperature, "own": own}
    distiller = make(training=training, epochs=2, **settings)
    distiller.begin(made_up(base, 0, [2.0] * 5))
    distiller.offer(0, made_up(base, 1, [1.0, 3.0, 1.0, 3.0, 1.0]))
    mean_loss = distiller.distil(1)
    other = make(training=training)
    model, wanted = other.model(), dense(distiller.targets, len(base.tokenizer))
    parameters = list(other.adapter.tensors().values())
    other.adapter.require_grad(lambda _: True)
    optimiser = torch.optim.AdamW(
        parameters, lr=learning_rate(training, 2)(3), betas=(0.9, 0.95), weight_decay=0.01
    )
    losses = []
    for turn in range(2):
        order = torch.randperm(5, generator=generator(3, "public", "ada", 1, turn))
        for chosen in order.split(2):
            batch = other.samples.batch(chosen)
            loss = language_model_loss(model, *batch)
            if task < 1:
                rows = [n for s in chosen for n in range(*distiller.positions.starts[s:][:2])]
                logits = model(batch.ids[:, :-1]).logits[batch.counted]
                logprobs = (logits / temperature).log_softmax(-1)
                taught = -(wanted[rows] * logprobs).sum(-1)
                if own == "none":
                    sizes = distiller.positions.starts.diff()[chosen]
                    by = (distiller.teachers[chosen] != NO_TEACHER).repeat_interleave(sizes)
                    taught = taught[by] if by.any() else 0 * taught
                loss = task * loss + (1 - task) * taught.mean()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
    assert mean_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    tensors = (each.adapter.tensors() for each in (distiller, other))
    torch.testing.assert_close(*tensors, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("own", ["labels", "mean"])
def test_distillation_brings_the_model_nearer_to_its_teachers(base, make, own) -> None:
    distiller = make(task_weight=0.0, epochs=8, own=own)
    distiller.begin(made_up(base, 0, [2.0] * 5))
    distiller.offer(0, made_up(base, 1, [1.0, 3.0, 1.0, 3.0, 1.0]))
    learns, everything = distiller._mixed_targets(), distiller.samples.batch(range(5))

    @torch.no_grad()
    def loss() -> float:
        return soft_target_loss(distiller.model(), everything, learns.tokens, learns.probs).item()

    before = loss()
    distiller.distil(0)
    assert loss() < before - 0.05
