"""What a run is said to need is what it needs."""

from dataclasses import replace

import pytest
import torch
from every_method import METHODS

from coterie.adapters.fused import storing_activations
from coterie.analysis.need import LiveTensors, Need, need_of
from coterie.bases import load_base
from coterie.bases.precision import autocast
from coterie.config.run import parse
from coterie.data.tokens import ClientData
from coterie.federation.participants import NOTHING, Participant, client_context
from coterie.losses.tokens import language_model_loss
from coterie.methods.adapter import AdapterClient
from coterie.methods.registry import available

MIB = 2**20


def test_bytes_are_counted_while_tensors_are_alive() -> None:
    with LiveTensors() as tensors:
        a = torch.zeros(1000)  # 4,000 bytes
        a.view(10, 100).add_(1)
        b = a + a
        del b
        c = torch.zeros(500)
        assert (tensors.now, tensors.peak) == (6000, 8000)
        del a, c
    assert (tensors.now, tensors.peak) == (0, 8000)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "stores"),
    [("comigs-1g1s", False), ("comigs-1g1s", True), ("fedit", False), ("fedavg", False)],
)
def test_a_need_is_what_a_real_step_holds(method, stores, precision, values) -> None:
    training = {"batch": 4, "precision": precision, "store_activations": stores}
    config = parse(values(method=method, training=training, evaluation={"batch": 1}))
    found = need_of(config, "poet")
    assert isinstance(found, Need)
    base = load_base(config.base, precision, config.data.window)
    empty = Participant("poet", ClientData(NOTHING, NOTHING, NOTHING), {})
    side = config.method.client(client_context(config, base, empty, lambda *_: None))
    assert isinstance(side, AdapterClient)
    tensors = {id(t): t.nbytes for t in (*base.model.parameters(), *base.model.buffers())}
    assert found.weights == sum(tensors.values())
    trained = sum(p.nbytes for p in side.adapter.tensors().values())
    assert found.adapter == 4 * trained  # values, gradients, AdamW's two moments
    assert found.traffic == sum(t.nbytes for *_, t in side.upload(0).tensors())
    for parameter in side.adapter.tensors().values():
        parameter.requires_grad_(True)
    model = side.model()
    with LiveTensors() as tensors:
        with autocast(precision, "cpu"), storing_activations(stores):
            loss = language_model_loss(model, torch.zeros(4, 17, dtype=torch.long))
        loss.backward()
    assert found.step == pytest.approx(tensors.peak, rel=0.02)


def test_what_makes_a_step_smaller_or_larger_changes_the_need(config) -> None:
    run = config(training={"batch": 8, "precision": "fp32"}, evaluation={"batch": 1})
    whole = need_of(run, "poet")
    small = run.training.model_copy(update={"micro_batch": 2})
    pieces = need_of(run.model_copy(update={"training": small}), "poet")
    few = run.training.model_copy(update={"checkpointing": True})
    again = need_of(run.model_copy(update={"training": few}), "poet")
    many = run.training.model_copy(update={"store_activations": True})
    stored = need_of(run.model_copy(update={"training": many}), "poet")
    assert isinstance(whole, Need)
    assert isinstance(pieces, Need)
    assert isinstance(again, Need)
    assert isinstance(stored, Need)
    assert pieces.step < 0.6 * whole.step
    assert again.step < whole.step < stored.step
    assert replace(pieces, step=0) == replace(again, step=0) == replace(whole, step=0)


@pytest.mark.parametrize("method", sorted(available()))
def test_every_method_has_an_estimate_or_none(method, config) -> None:
    found, whole = (need_of(config(method=METHODS[name]), "poet") for name in (method, "pcl-2"))
    assert isinstance(whole, Need)
    assert whole.traffic > 0  # though nothing is sent in the first rounds
    if method == "fedamole":
        assert found is None
    if method in ("hetlora", "flexlora", "fedavg", "fedit", "comigs-1g1s", "pcl-3"):
        assert isinstance(found, Need)
        assert found.weights == whole.weights


def test_what_is_frozen_has_neither_gradients_nor_moments(config) -> None:
    half = need_of(config(method="ffa-lora"), "poet")
    whole = need_of(config(method={"name": "fedavg", "mlp": {"rank": 16, "sets": 1}}), "poet")
    assert isinstance(half, Need)
    assert isinstance(whole, Need)
    assert half.traffic < whole.traffic  # B alone
    assert half.adapter < whole.adapter
