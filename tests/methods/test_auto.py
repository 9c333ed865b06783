"""Auto: trials and means equal a slow version; the decision keeps the better of two trainings."""

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from auto_runs import (
    NAMES,
    altered,
    auto,
    chosen,
    copies,
    equal,
    forged_round,
    judging_windows,
    noise,
    trial,
    window_losses,
)
from torch import Tensor

from coterie.messages import Message, State
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined, one_round

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}
TOKENS = {"diarist": 900, "poet": 2000, "whaler": 90_000}


def judged(client: Any, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of the tensors by which clients judge one another."""
    names = [n for n, p in client.parameters().items() if client.method.judges(p)]
    return copies({n: (client.adapter.tensors() if tensors is None else tensors)[n] for n in names})


def whole(client: Any, tensors: Mapping[str, Tensor], round: int = 1, **more: Any) -> Message:
    """Return a download with values for all tensors that the server sends after a round."""
    parameters, method = client.parameters(), client.method
    sent = {n: tensors[n] for n in client.shared if method.sends(parameters[n], round - 1)}
    return Message(round, {"adapter": sent}, **more)


def along_gradient(client: Any, windows: list[Tensor], initial: Mapping[str, Tensor], by: float):
    """Return the pairs after a step along the gradient of the loss, at a small change."""
    start = {n: t + 0.02 * torch.ones_like(t) for n, t in initial.items()}
    tensors = {n: client.adapter.tensors()[n].requires_grad_() for n in initial}
    before = copies(tensors)
    for name, tensor in tensors.items():
        tensor.data.copy_(start[name])
    loss = torch.stack(window_losses(client, windows)).mean()
    gradients = torch.autograd.grad(loss, [*tensors.values()])
    for name, tensor in tensors.items():
        tensor.data.copy_(before[name])
    return {n: initial[n] + by * g for n, g in zip(tensors, gradients, strict=True)}


@pytest.mark.parametrize(
    ("kinds", "settings", "covers"),
    [
        pytest.param("random random", {}, lambda t: not t.fell_back, id="random changes"),
        pytest.param(
            "random random",
            {"trust": 0.0},
            lambda t: t.row["whaler"] == pytest.approx(6000 / 8900),
            id="prior alone",
        ),
        pytest.param(
            "helps hurts",
            {"trust": 1.5, "samples": 4},
            lambda t: t.limited == 3 and t.dropped,
            id="one helps, one hurts",
        ),
        pytest.param(
            "helps hurts",
            {"trust": 0.2, "samples": 4},
            lambda t: t.limited == 3 and not t.dropped,
            id="one helps, one hurts, little trust",
        ),
        pytest.param(
            "hurts hurts", {"trust": 3.0}, lambda t: t.fell_back and not t.dropped, id="both hurt"
        ),
        pytest.param(
            "helps random", {"attention": None}, lambda t: t.ignored == 2, id="by experts"
        ),
    ],
)
def test_a_trial_follows_the_equations(kinds, settings, covers, config) -> None:
    local: Any = joined(config(method=auto(**settings)))
    poet = local.clients["poet"]
    windows = judging_windows(local, "poet", settings.get("samples", 16))
    initial, shared = judged(poet), copies(poet.shared)
    by = {"helps": -0.3, "hurts": 0.3}
    peers = {
        name: along_gradient(poet, windows, initial, by[kind])
        if kind in by
        else {n: initial[n] + t for n, t in noise(initial, 0.03, seed).items()}
        for seed, (name, kind) in enumerate(zip(("diarist", "whaler"), kinds.split(), strict=True))
    }
    own = {n: initial[n] + t for n, t in noise(initial, 0.03, 9).items()}
    for name, tensor in own.items():
        poet.adapter.tensors()[name].data.copy_(tensor)
    tokens = TOKENS | {"poet": len(poet.context.data.train.ids)}
    expected = trial(poet, windows, initial, {"poet": own, **peers}, tokens)
    sizes = {name: tokens[name] for name in peers}
    forwarded = {name: {"adapter": tensors} for name, tensors in peers.items()}
    before = poet.state()
    poet.receive(whole(poet, shared, peers=forwarded, values={"sizes": sizes}))
    assert list(poet.row) == list(expected.row)
    assert poet.row == pytest.approx(expected.row, rel=2e-3)
    assert sum(poet.row.values()) == pytest.approx(1)
    assert poet.tried == 1
    assert equal(poet.buffers["own"], {n: before["adapter"][n] for n in shared})
    assert equal(poet.buffers["mean"], shared)
    assert covers(expected), expected


def test_validation_text_is_divided_between_judging_and_routers(config) -> None:
    local: Any = joined(config(method=auto()))
    client, window = local.clients["poet"], local.config.data.window + 1
    ids = local.clients.participants["poet"].data.validation.ids
    assert torch.equal(client.judging.ids, torch.stack(judging_windows(local, "poet")))
    pieces = [ids[i : i + window] for i in range(0, len(ids), window)]
    routers = torch.cat([*pieces[:-1][::2], pieces[-1]])
    assert len(pieces) % 2 == 0
    assert len(pieces[-1]) < window
    assert torch.equal(client.context.data.validation.ids, routers)
    every: Any = joined(config(method=auto(set_aside=0.0, samples=100))).clients["poet"]
    assert torch.equal(every.context.data.validation.ids, ids)
    assert len(every.judging.ids) == len(ids) // window


def test_each_client_receives_the_mean_with_its_own_weights(config) -> None:
    run = config(method=auto(samples=7), rounds=6, training=TRAINING)
    local: Any = joined(run)
    initial = {name: judged(client) for name, client in local.clients.items()}
    uploads = one_round(local, 0)
    for name in NAMES:  # before any trial, every client receives the mean over all
        for tensor, value in down(local, name)["adapter"].items():
            terms = [upload["adapter"][tensor].double() for upload in uploads.values()]
            assert torch.allclose(value.double(), torch.stack(terms).mean(0), atol=1e-6)
    expected = {}
    for name, client in local.clients.items():
        download = down(local, name)
        assert download.peers.keys() == {*NAMES} - {name}
        assert download.values["sizes"] == dict.fromkeys(download.peers, 2000)
        pairs = {peer: download.from_peer(peer)["adapter"] for peer in download.peers}
        pairs[name] = judged(client)
        assert equal(pairs[name], judged(client, uploads[name]["adapter"]))
        windows, tokens = judging_windows(local, name, 7), dict.fromkeys(list[str](NAMES), 2000)
        expected[name] = trial(client, windows, initial[name], pairs, tokens).row
    uploads = one_round(local, 1)
    assert any(max(row.values()) > 0.4 for row in expected.values())
    for name, row in expected.items():
        assert uploads[name].values["choice"]["row"] == pytest.approx(row, rel=5e-3)
        mean = down(local, name)["adapter"]
        assert mean.keys() == local.clients[name].shared.keys()
        for tensor, value in mean.items():
            terms = [weight * uploads[c]["adapter"][tensor].double() for c, weight in row.items()]
            assert torch.allclose(value.double(), torch.stack(terms).sum(0), atol=1e-4)


def private(state: State) -> State:
    """Return the part of a state that must not depend on the branch that was not kept."""
    return State({"adapter": state["adapter"]}, parts=state.parts)


def before_decision(config, damaged: str, seed: int) -> tuple[Any, Message]:
    """Return a client before it decides, and a download whose mean, or whose client, is damaged."""
    local: Any = joined(config(method=auto(patience=1.0), rounds=6, training=TRAINING))
    for exchange in range(2):
        one_round(local, exchange)
    client = local.clients["poet"]
    assert client.stage == "proposed"
    download = down(local, "poet")
    wrong = noise(download["adapter"], 0.2, seed)
    if damaged == "mean":
        download = altered(download, lambda n, t: t + wrong[n])
    else:
        for name, tensor in client.shared.items():
            tensor.data.add_(wrong[name])
    return client, download


def branch(config, damaged: str, seed: int, start: str) -> Any:
    """Return a client that has trained only from its own parameters, or only from the mean."""
    client, download = before_decision(config, damaged, seed)
    tensors = client.shared if start == "own" else download["adapter"]
    client.row = {"poet": 1.0}  # the client then does not compare the mean with its own parameters
    client.receive(whole(client, copies(tensors), round=2))
    client.stage = ""
    client.train(2)
    return client


@pytest.mark.parametrize(("damaged", "better"), [("mean", "own"), ("own", "mean")])
def test_a_client_keeps_the_training_whose_loss_is_clearly_lower(damaged, better, config) -> None:
    client, download = before_decision(config, damaged, 5)
    row = dict(client.row)
    assert len(row) > 1
    client.receive(download)
    assert client.stage == "undecided"
    client.train(2)
    alone = better == "own"
    assert client.row == ({"poet": 1.0} if alone else row)
    assert client.upload(2).values["choice"]["row"] == client.row
    kept = branch(config, damaged, 5, better)
    other = branch(config, damaged, 5, "mean" if alone else "own")
    assert_equal(private(client.state()), private(kept.state()), "client")
    assert not equal(client.adapter.tensors(), other.adapter.tensors())
    assert client.stage == ""


@pytest.mark.parametrize("size", [0.0, 0.004])
def test_the_difference_is_compared_with_its_standard_error(size, config) -> None:
    local: Any = joined(config(method=auto(), rounds=6, training=TRAINING))
    for exchange in range(2):
        one_round(local, exchange)
    client, download = local.clients["poet"], down(local, "poet")
    wrong = noise(download["adapter"], size, 8)
    download = altered(download, lambda n, t: t + wrong[n])
    windows, losses = judging_windows(local, "poet"), {}
    start, own, row = client.state(), copies(client.shared), dict(client.row)
    for name, tensors in (("own", own), ("mean", download["adapter"])):
        client.row = {"poet": 1.0}
        client.receive(whole(client, tensors, round=2))
        client.stage = ""
        client.train(2)
        losses[name] = [loss.item() for loss in window_losses(client, windows)]
        client.restore(start)
    gain = [b - a for a, b in zip(losses["own"], losses["mean"], strict=True)]
    errors = fmean(gain) / (stdev(gain) / math.sqrt(len(gain)))
    assert abs(errors) > 0.01
    for patience in (errors - 0.1 * abs(errors), errors + 0.1 * abs(errors)):
        client.restore(start)
        client.method = client.method.model_copy(update={"patience": patience})
        client.receive(download)
        client.train(2)
        assert client.row == ({"poet": 1.0} if errors > patience else row)


def test_a_client_that_stays_alone_keeps_its_parameters(config) -> None:
    local: Any = joined(config(method=auto(), rounds=6, training=TRAINING))
    forged_round(local, 0)
    wrong = noise(local.clients["whaler"].shared, 0.5, 3)
    spoil = {n: lambda u: altered(u, lambda m, t: t + wrong[m]) for n in ("diarist", "whaler")}
    spoil["poet"] = lambda u: chosen(u, row={"diarist": 0.5, "whaler": 0.5})
    forged_round(local, 1, spoil)
    poet = local.clients["poet"]
    assert len(poet.row) > 1
    _, uploads = forged_round(local, 2)
    assert uploads["poet"].values["choice"]["row"] == {"poet": 1.0}
    before, download = copies(poet.adapter.tensors()), down(local, "poet")
    assert set(download["adapter"]) < poet.shared.keys()  # the second expert is not due
    poet.receive(download)
    assert equal(poet.adapter.tensors(), before)
    poet.train(3)
    assert equal(poet.buffers["mean"], {n: before[n] for n in poet.shared})


def test_a_mean_that_is_worse_is_not_evaluated_but_trained_from(config) -> None:
    client, download = before_decision(config, "mean", 6)
    own = copies(client.adapter.tensors())
    client.receive(download)
    assert equal(client.adapter.tensors(), own)
    client.stage = ""
    client.train(2)
    assert_equal(
        private(client.state()), private(branch(config, "mean", 6, "mean").state()), "client"
    )
    client, download = before_decision(config, "own", 6)
    client.receive(download)
    assert equal(client.shared, download["adapter"])
