"""Keys of the section `training`: each key changes the training, and defaults change nothing."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import equal
from torch import Tensor

import coterie
from coterie import CoterieError
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.data.windows import epoch_batch
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.evaluation.evaluate import evaluate
from coterie.methods.tensors import copied
from coterie.runs import RunFolder
from coterie.seeding import generator
from coterie.testing.rounds import joined, one_round, take
from coterie.training.spec import TrainingSpec

BASICS: dict[str, Any] = {"steps": 2, "batch": 4, "precision": "fp32"}
POET = [{"name": "poet", "path": "poet.txt"}]
TEXTS = {"template": "{{ instruction }}?", "answer": "{{ instruction }} {{ output }}"}
QUESTIONS: dict[str, Any] = {
    "data": {"window": 48, "instructions": TEXTS, "limits": {"test": 2, "validation": 2}},
    "clients": [{"name": "poet", "path": "poet.jsonl"}],
}
"""A run on prompts whose answers have unlike lengths."""
CHANGES: dict[str, dict[str, Any]] = {
    "steps": {"steps": 3},
    "batch": {"batch": 3},
    "micro_batch": {"micro_batch": 3},
    "sampling": {"sampling": "epochs"},
    "learning_rate": {"learning_rate": 1e-3},
    "final_learning_rate": {"final_learning_rate": 1e-3},
    "learning_rates": {"learning_rates": {"poet": 1e-3}},
    "schedule": {"schedule": "constant"},
    "schedule, cycle": {"schedule": "one-cycle", "warmup": 0.5},
    "warmup": {"warmup": 0.5},
    "initial_learning_rate": {"warmup": 0.5, "initial_learning_rate": 1e-4},
    "restart": {"restart": True},
    "learning_rate_decay": {"learning_rate_decay": 0.5},
    "reset_optimiser": {"reset_optimiser": True},
    "optimiser": {"optimiser": "sgd"},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "base_dropout": {"base_dropout": 0.2},
    "precision": {"precision": "bf16"},
}
"""The changes of `BASICS` that test a key, by key."""


SESSIONS: dict[str, Session] = {}
"""One session for all runs with equal texts and base."""


def trained(run: coterie.RunConfig, rounds: int = 2) -> dict[str, Tensor]:
    """Return a client's adapter after some rounds of a run."""
    sides = sides_of(run)
    for round in range(rounds):
        one_round(sides, round)
    client: Any = sides.clients["poet"]
    return copied(client.adapter.tensors())


def sides_of(run: coterie.RunConfig) -> LocalRun:
    """Return the sides of a run before its first round."""
    key = repr((run.data, run.clients, run.training.precision))
    session = SESSIONS.setdefault(key, Session(run))
    return local_run(run, session.base, session.participants(run), RunFolder(Path()))


def test_each_key_acts_and_defaults_do_nothing(config) -> None:
    method: dict[str, Any] = {"name": "fedavg", "mlp": {"rank": 2, "sets": 1}}
    make = partial(config, method=method, rounds=2, clients=POET)
    known = {key.partition(",")[0] for key in CHANGES}
    known |= {"checkpointing", "store_activations"}  # memory and time alone
    known |= {"dpo", "gate", "replay"}  # act on preferences, on who answers, and on general samples
    assert known == TrainingSpec.model_fields.keys()
    plain = trained(make(training=BASICS))
    explicit: dict[str, Any] = {"schedule": "cosine", "warmup": 0, "restart": False}
    explicit |= {"base_dropout": 0, "sampling": "replacement", "micro_batch": 4}
    assert equal(trained(make(training={**BASICS, **explicit, "checkpointing": True})), plain)
    assert equal(trained(make(training={**BASICS, "store_activations": True})), plain)
    no_dropout = make(training=BASICS, method={**method, "lora": {"dropout": 0}})
    assert equal(trained(no_dropout), plain)
    adapters = {key: trained(make(training={**BASICS, **given})) for key, given in CHANGES.items()}
    dead = [key for key, tensors in adapters.items() if equal(tensors, plain)]
    assert not dead
    for key in ("warmup", "schedule, cycle", "initial_learning_rate"):
        alike = [k for k, tensors in adapters.items() if k != key and equal(tensors, adapters[key])]
        assert not alike, key


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"learning_rate_decay": 0.9, "schedule": "one-cycle", "warmup": 0.3}, "mutually exclus"),
        ({"learning_rate_decay": 0.9, "schedule": "cosine"}, "mutually exclusive; remove one"),
        ({"checkpointing": True, "store_activations": True}, "mutually exclusive; remove one"),
        ({"schedule": "one-cycle"}, "training: `schedule: one-cycle` needs a warm-up"),
        ({"initial_learning_rate": 1e-4}, "initial_learning_rate has no effect without warmup"),
        ({"schedule": "constant", "restart": True}, "restart has no effect on a constant"),
        ({"warmup": 1}, "training.warmup should be less than 1"),
    ],
)
def test_what_contradicts_itself_is_refused(training, sentence, values) -> None:
    with pytest.raises(CoterieError) as error:
        parse(values(training=training))
    assert sentence in str(error.value)


def test_a_schedule_reaches_a_deployed_client_as_it_is(config) -> None:
    rates = {"learning_rates": {"poet": 4e-3}, "schedule": "one-cycle", "warmup": 0.1}
    run = config(training={**BASICS, **rates, "initial_learning_rate": 2e-4})
    visible = parse({**run.visible_to("poet"), "clients": [{"name": "poet", "path": "poet.txt"}]})
    assert visible.training == run.training_of("poet")
    assert visible.training.initial_learning_rate == pytest.approx(4e-4)


@pytest.mark.parametrize("kind", ["text", "instructions"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_batch_in_pieces_is_the_batch(config, questions, kind, micro_batch) -> None:
    # The parameters have a penalty, and pieces have different numbers of counted tokens.
    method = {"name": "hetlora", "gamma": 0.6, "penalty_weight": 3.0}
    run: dict[str, Any] = {"method": method, "clients": POET, "rounds": 1}
    if kind == "instructions":
        run |= {**QUESTIONS, "data_root": str(questions)}
    training = {**BASICS, "batch": 7, "optimiser": "sgd", "max_grad_norm": 0.1}
    whole = trained(config(**run, training=training), 1)
    pieces = trained(config(**run, training={**training, "micro_batch": micro_batch}), 1)
    moved = trained(config(**run, training={**training, "learning_rate": 1e-9}), 1)
    assert max((whole[n] - moved[n]).abs().max() for n in whole) > 1e-5
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_distillation_in_pieces_is_distillation(teachers) -> None:
    def taught(**training: Any) -> list[Tensor]:
        training |= {"optimiser": "sgd", "learning_rate": 0.1}
        sides: Any = joined(teachers(rounds=1, training={**BASICS, **training}))
        one_round(sides, 0)
        take(sides)
        adapters = [sides.value.own, sides.clients["poet"].adapter.tensors()]
        return [p.detach().clone() for tensors in adapters for p in tensors.values()]

    whole = taught()
    torch.testing.assert_close(taught(micro_batch=3), whole, rtol=1e-3, atol=1e-7)
    assert not all(map(torch.equal, taught(base_dropout=0.3), whole))


def order(epoch: int) -> torch.Generator:
    return generator(0, "epoch", epoch)


@pytest.mark.parametrize(("batch", "count"), [(4, 10), (10, 10), (25, 10), (1, 3)])
def test_an_epoch_holds_every_window_once(batch: int, count: int) -> None:
    window = 4
    stream = Tokens(torch.arange(count * window + 3, dtype=torch.int32), 0)
    drawn = [epoch_batch(stream, batch, window, n, order).ids for n in range(12)]
    assert all(ids.shape == (batch, window + 1) for ids in drawn)
    ids = torch.cat(drawn)
    assert torch.equal(ids, ids[:, :1] + torch.arange(window + 1))  # windows of the stream
    epochs = ids[:, 0].split(count)[: 12 * batch // count]
    assert all(sorted(epoch.tolist()) == list(range(0, count * window, window)) for epoch in epochs)
    assert len(epochs) < 2 or not torch.equal(epochs[0], epochs[1])


@pytest.fixture
def knobs(config) -> coterie.RunConfig:
    """Everything that draws, at once."""
    training = {**BASICS, "batch": 3, "micro_batch": 2, "sampling": "epochs", "base_dropout": 0.1}
    training |= {"schedule": "one-cycle", "warmup": 0.4, "restart": True, "checkpointing": True}
    method = {"name": "comigs-1g1s", "lora": {"dropout": 0.2}, "router": {"every": 2, "steps": 2}}
    clients = [{"name": name, "path": f"{name}.txt"} for name in ("diarist", "poet")]
    data = {"window": 16, "limits": {"train": 600, "validation": 100, "test": 34}}
    return config(training=training, method=method, rounds=2, clients=clients, data=data)


def test_turns_of_a_level_read_one_batch_of_the_epoch_after_another(knobs) -> None:
    client: Any = joined(knobs).clients["poet"]
    routers, text = client.training.levels[1], client.context.data.validation
    drawn = [client.training._batch(routers, step, turn) for step in (1, 3) for turn in (0, 1)]
    chance = partial(generator, knobs.seed, "epoch", "poet", routers.name)
    expected = [epoch_batch(text, 3, 16, number, chance) for number in range(4)]
    for batch, other in zip(drawn, expected, strict=True):
        assert torch.equal(batch.ids, other.ids)


def test_scores_have_no_dropout(knobs) -> None:
    # A model's score equals that of its adapter in a run without dropout.
    sides = sides_of(knobs)
    one_round(sides, 0)
    part, client = sides.clients.host("poet"), sides.clients["poet"]
    test = part.participant.data.test
    scored = [evaluate(part.base, client.model(), test, 16, 4).as_dict() for _ in range(2)]
    method = knobs.method.model_copy(update={"lora": type(knobs.method.lora)()})
    training = knobs.training.model_copy(update={"base_dropout": 0.0})
    plain = sides_of(knobs.model_copy(update={"method": method, "training": training}))
    other = plain.clients["poet"]
    other.restore(client.state())
    wanted = evaluate(part.base, other.model(), test, 16, 4).as_dict()
    assert scored == [wanted, wanted]
