"""FDLoRA: the stage alone, the server's outer steps, the private adapter and the fusion."""

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tensors import close_to, equal, mean_of
from turns import nth

from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss
from coterie.messages import Message, State
from coterie.methods.fdlora import FDLora
from coterie.methods.tensors import copied
from coterie.seeding import generator
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import close, down, joined, one_round, step, take


def sides(run, method) -> Any:
    return joined(run.model_copy(update={"method": method}))


@pytest.fixture
def unfused(monkeypatch) -> None:
    """For tests of what does not depend on the weights."""
    monkeypatch.setattr("coterie.methods.fdlora.FDLoraClient._fuse", lambda *_: None)


def rounds(local, count: int, first: int = 0):
    """Execute rounds of the poet and the whaler; yield the downloads and uploads of each."""
    for number in range(first, first + count):
        before = local.message("poet")["adapter"]
        uploads = one_round(local, number, ["poet", "whaler"])
        yield number, before, {name: upload["adapter"] for name, upload in uploads.items()}


def aggregated(local, number: int, uploads: dict[str, dict[str, torch.Tensor]]) -> None:
    """Aggregate uploads on the server, and end the round."""
    messages = {name: Message(number, {"adapter": sent}) for name, sent in uploads.items()}
    close(local, number, messages)


def test_the_server_takes_nesterov_steps_after_a_mean(config) -> None:
    local = sides(config(), FDLora(outer_learning_rate=0.7, outer_momentum=0.4))
    chance = torch.Generator().manual_seed(0)
    first = local.message("poet")["adapter"]
    naive = {}
    for number in range(4):
        local.open(nth(number), ["diarist", "poet"])
        uploads = {
            client: {n: torch.randn(t.shape, generator=chance) for n, t in first.items()}
            for client in ("diarist", "poet")
        }
        if number == 2:  # momentum survives a restart in the middle of a round
            state, local = local.value.state(), sides(config(), local.config.method)
            local.value = local.value.restored(State.decode(state.encode()))
            local.open(nth(number), ["diarist", "poet"])
        aggregated(local, number, uploads)
        for name in first:
            mean = mean_of(uploads.values())[name]
            if number == 0:
                parameter = mean.clone().requires_grad_()
                naive[name] = (parameter, torch.optim.SGD([parameter], 0.7, 0.4, nesterov=True))
            else:
                parameter, optimiser = naive[name]
                parameter.grad = parameter.detach() - mean
                optimiser.step()
            after = local.value.adapter[name].double()
            assert torch.allclose(after, naive[name][0].detach(), atol=1e-5)


def test_round_0_trains_the_private_adapter_alone_and_uploads_it(config, monkeypatch) -> None:
    local = sides(config(), FDLora(local_steps=3))
    client = local.clients["poet"]
    start = copied(client.private.tensors())
    assert equal(start, copied(client.adapter.tensors()))
    assert equal(start, copied(local.clients["whaler"].private.tensors()))
    logged = []
    monkeypatch.setattr(local.recorder, "log", lambda *_: None)
    object.__setattr__(client.context, "log", lambda name, value: logged.append(name))
    (first_round,) = rounds(local, 1)
    assert logged == ["loss/alone"] * 3 + ["fusion"]
    _, first, ups = first_round
    assert equal(first, start)
    assert equal(ups["poet"], copied(client.private.tensors()))
    assert not equal(ups["poet"], start)
    assert close_to(local.message("poet")["adapter"], mean_of(ups.values()), atol=1e-7)


def test_a_snapshot_is_taken_every_so_many_rounds(config, unfused) -> None:
    local = sides(config(rounds=6), FDLora(sync_every=2))
    private = local.clients["poet"].private
    before: dict[str, torch.Tensor] = {}
    for number, before_it, ups in rounds(local, 6):
        now = copied(private.tensors())
        assert not equal(ups["poet"], before_it)
        # alone, and then in the first round and every second
        assert equal(now, ups["poet"] if number in (0, 1, 3, 5) else before)
        before = now


def test_a_private_adapter_can_be_trained_on_its_own(config, unfused) -> None:
    local = sides(config(rounds=6), FDLora(private="trained"))
    client = local.clients["poet"]
    seen = [(copied(client.private.tensors()), ups["poet"]) for _, _, ups in rounds(local, 3)]
    assert all(not equal(before[0], after[0]) for before, after in pairwise(seen))
    assert not any(equal(private, upload) for private, upload in seen[1:])
    # What the server sends changes nothing in it.
    again = sides(config(rounds=6), FDLora(private="trained")).clients["poet"]
    for number in range(3):
        noise = {n: torch.full_like(t, 0.01) for n, t in seen[0][0].items()}
        again.receive(Message(number, {"adapter": noise}))
        again.train(nth(number))
    assert equal(copied(again.private.tensors()), seen[-1][0])


def cost(client, weights, round: int) -> float:
    """Return the loss of the weighted sum of both adapters plus the penalty of the weights."""
    context = client.context
    chance = generator(context.seed, "fusion", context.name, round)
    size = context.training.batch
    drawn = torch.randint(len(client.samples.ids), (5 * size,), generator=chance)
    ids = client.samples.ids[drawn]
    sum_of = client.method.adapter(context.base.model, context.seed, context.name)
    shared, private = copied(client.adapter.tensors()), copied(client.private.tensors())
    w1, w2 = weights
    with torch.no_grad():
        for name, parameter in sum_of.tensors().items():
            parameter.copy_(w1 * shared[name] + w2 * private[name])
        model = sum_of.attach(context.base.model)
        loss = sum(language_model_loss(model, part).item() for part in ids.split(size))
    return loss / 5 + 0.05 * (abs(w1) + abs(w2)) / 2


LEARNS: Any = {"steps": 10, "batch": 4, "precision": "fp32", "learning_rate": 0.02}
"""Enough for an adapter to be worth its weight's price."""


def test_fused_parameters_are_the_weighted_sum_of_both(config) -> None:
    run = config(training=LEARNS)
    method = FDLora(sync_every=9)
    local = sides(run, method)
    list(rounds(local, 3))
    client = local.clients["poet"]
    local.open(local.config.turn(3), ["poet"])
    step(local, "poet", 3)
    w1, w2 = client.weights
    assert max(abs(w1), abs(w2)) <= 1.5
    assert w1 != 0 or w2 != 0
    assert cost(client, (w1, w2), 3) < cost(client, (0.0, 0.0), 3)
    model = client.model()
    shared, private = copied(client.adapter.tensors()), copied(client.private.tensors())
    assert not equal(shared, private)
    for name, p in client.fused.tensors().items():
        assert torch.allclose(p, w1 * shared[name] + w2 * private[name], atol=1e-7)
        part = client.fused.parameters()[name]
        assert getattr(model.get_submodule(part.path).lora, part.factor) is p
    # A model that is restored needs no text to be fused.
    ids = torch.arange(3, 15)[None]
    logits = client.model()(input_ids=ids).logits
    state = client.state()
    assert state.values["fusion"] == [w1, w2]
    other = sides(run, method).clients["poet"]
    object.__setattr__(other.context, "data", None)
    other.restore(state)
    assert torch.equal(other.model()(input_ids=ids).logits, logits)
    assert_equal(other.state(), state, "client")


def test_weights_are_found_again_whatever_chance_was_used_for(config) -> None:
    pytest.importorskip("nevergrad")  # draws from NumPy's generator when it is first imported
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        local = sides(config(training=LEARNS, rounds=1), FDLora())
        list(rounds(local, 2))
        client = local.clients["poet"]
        trained, client.weights = client.weights, [9.0, 9.0]
        client.receive(down(local, "poet"))
        assert client.weights != [9.0, 9.0]
        results.append((trained, client.weights))
        assert np.random.random() == np.random.RandomState(seed).random()  # nothing was drawn
    assert results[0] == results[1]


def test_a_late_client_first_trains_alone_then_as_the_others(config, unfused) -> None:
    local = sides(config(rounds=6), FDLora())
    list(rounds(local, 2))
    download = local.message("diarist")
    assert download.exchange == 2
    late = local.clients["diarist"]
    upload = step(local, "diarist", 2, download)["adapter"]
    early = sides(config(rounds=6), FDLora())
    alone = step(early, "diarist", 0)["adapter"]
    assert equal(copied(late.private.tensors()), alone)
    assert not equal(upload, alone)
    sent = download["adapter"]
    assert all((t - sent[n]).abs().max() < 0.02 for n, t in upload.items())


def test_without_nevergrad_it_says_what_to_install(config, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    client = sides(config(), FDLora()).clients["poet"]
    with pytest.raises(CoterieError, match=r"coterie\[fdlora\]"):
        client.receive(Message(0, {"adapter": copied(client.adapter.tensors())}))


def test_both_are_weighed_anew_after_the_last_round_alone(config) -> None:
    local = sides(config(training=LEARNS, rounds=1), FDLora())
    client = local.clients["poet"]
    one_round(local, 0)
    trained = client.weights
    client.receive(down(local, "poet"))
    assert client.weights == trained  # not where a round is still to come
    client.train(nth(1))
    trained = client.weights
    local.open(local.config.turn(1), [])
    close(local, 1, {})
    take(local)
    assert client.weights != trained
    assert cost(client, client.weights, 2) < cost(client, (0.0, 0.0), 2)
