"""Gradients that one level leaves for the other, as in CoMiGS's released code."""

from functools import partial
from typing import Any

import pytest
import torch
from tensors import equal
from transformers import PreTrainedModel

from coterie.adapters import of_roles
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.methods.adapter import AdapterClient
from coterie.methods.tensors import copied, copy
from coterie.runs import RunFolder
from coterie.training.local import LocalTraining

ROUNDS, STEPS, EVERY, TURNS = 4, 2, 3, 2
METHOD: dict[str, Any] = {
    "name": "comigs-2s",  # nothing is averaged, so a client's rounds are one training
    "router": {"every": EVERY, "steps": TURNS, "leftover_gradients": True},
}


LIMITS = {"max_grad_norm": 1e-3, "micro_batch": 1}


@pytest.fixture(params=[{}, LIMITS], ids=["plain", "clipped, in micro-batches"])
def run(request, config, values, tmp_path):
    training = {**values()["training"], **request.param}
    run = config(method=METHOD, rounds=ROUNDS, training=training)
    session = Session(run)
    return local_run(run, session.base, session.participants(run), RunFolder(tmp_path))


def trained_naively(client: AdapterClient) -> dict[str, torch.Tensor]:
    """Train with gradients of all parameters; each optimiser clears only its own."""
    training, adapter = client.training, client.adapter
    model: PreTrainedModel = client.model()
    levels = {level.name: level for level in training.levels}
    tensors = {name: adapter.tensors(level.selects).values() for name, level in levels.items()}
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.01)
    optimisers = {name: adamw(own) for name, own in tensors.items()}
    adapter.require_grad(of_roles("dense", "specialist", "router"))

    def update(name: str, step: int, turn: int) -> None:
        ids = training._batch(levels[name], step, turn).ids
        model(input_ids=ids, labels=ids).loss.backward()
        longest = training.context.training.max_grad_norm
        if longest is not None:
            assert torch.nn.utils.clip_grad_norm_(tensors[name], longest) > longest
        optimisers[name].param_groups[0]["lr"] = levels[name].learning_rate(step)
        optimisers[name].step()
        optimisers[name].zero_grad()

    for step in range(ROUNDS * STEPS):
        update("experts", step, 0)
        if (step + 1) % EVERY == 0:
            for turn in range(TURNS):
                update("routers", step, turn)
    return copied(adapter.tensors())


def test_an_optimiser_clears_its_own_gradients_alone(run) -> None:
    client = run.clients["poet"]
    start = copied(client.adapter.tensors())
    expected = trained_naively(client)
    copy(start, client.adapter.tensors())
    for parameter in client.adapter.tensors().values():
        parameter.grad = None
    training = LocalTraining(client.context, client.adapter, client.training.levels)
    for round in range(ROUNDS):
        training.run(round)
    trained = copied(client.adapter.tensors())
    torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-4)


def test_what_is_left_goes_with_the_state(run) -> None:
    # A round after a restored state has the same bits as the round of an uninterrupted run.
    client = run.clients["poet"]
    training, tensors = client.training, client.adapter.tensors()
    for round in range(2):  # step 3, the first of round 1, is a phase; step 4 clears what it left
        training.run(round)
    state, before = training.state(), copied(tensors)
    assert state.groups["leftover"]
    training.run(2)
    after = copied(tensors)
    again = LocalTraining(client.context, client.adapter, training.levels)
    copy(before, tensors)
    again.restore(state)
    again.run(2)
    assert equal(tensors, after)
