"""Auto: what a client goes on from after a trial, and when its own parameters are scored."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_runs import altered, auto, forged_round, judging_windows, noise, window_losses
from tensors import close_to, equal
from turns import nth

from coterie.messages import State
from coterie.messages.names import TRUST
from coterie.methods.auto import client as auto_client
from coterie.methods.tensors import copied, copy
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined, one_round

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}


def after(config, complete: int, rounds: int = 6, **settings: Any) -> Any:
    """Return a run after some rounds."""
    local: Any = joined(config(method=auto(**settings), rounds=rounds, training=TRAINING))
    for exchange in range(complete):
        one_round(local, exchange)
    return local


def observed(client: Any) -> list[tuple[str, Any]]:
    """Return a list to which a client's metrics are appended from now on."""
    metrics: list[tuple[str, Any]] = []
    client.context = replace(client.context, log=lambda *metric: metrics.append(metric))
    return metrics


def worse(local: Any, name: str, size: float = 0.5) -> Any:
    """Return a client's next download with noise in the mean."""
    wrong = noise(local.clients[name].shared, size, 4)
    return altered(down(local, name), lambda n, t: t + wrong[n])


ALONE = "row_of", lambda shares, above, trust, own, least: {own: 1.0}
"""A replacement with which every client is alone after a trial."""


@pytest.mark.parametrize("every", [1, 2])
def test_a_client_that_is_alone_goes_on_from_its_own_parameters(every, config, monkeypatch) -> None:
    local = after(config, 1, every=every)
    monkeypatch.setattr(auto_client, *ALONE)
    poet = local.clients["poet"]
    before, metrics = copied(poet.adapter.tensors()), observed(poet)
    poet.receive(worse(local, "poet"))
    assert poet.row == {"poet": 1.0}
    assert metrics == [(TRUST, poet.row)]
    assert equal(poet.adapter.tensors(), before)
    poet.train(nth(1))
    assert equal(poet.buffers["mean"], {n: before[n] for n in poet.shared})
    assert poet.upload(nth(1)).values["choice"]["row"] == {"poet": 1.0}


def test_a_client_that_is_alone_remains_so_until_its_next_trial(config, monkeypatch) -> None:
    local = after(config, 1)
    monkeypatch.setattr(auto_client, *ALONE)
    uploads = {}
    for r in range(1, 6):
        downloads, uploads = forged_round(local, r)
        for name, client in local.clients.items():
            assert client.row == {name: 1.0}
            assert bool(downloads[name].peers) == (r in (1, 3))
    for name, client in local.clients.items():
        mean, own = down(local, name)["adapter"], copied(client.shared)
        assert equal(mean, {n: uploads[name]["adapter"][n] for n in mean})
        client.receive(worse(local, name))  # as if its upload had been excluded
        assert equal(client.shared, own)


def test_a_trial_has_the_same_bits_after_a_restart(config) -> None:
    # The client is stopped after it received a trial's download, and before it trains.
    local = after(config, 3)
    client = local.clients["poet"]
    assert client.evidence
    client.receive(down(local, "poet"))
    saved = State.decode(client.state().encode())
    resumed: Any = after(config, 0).clients["poet"]
    resumed.restore(saved)
    for each in (client, resumed):
        each.train(nth(3))
    assert_equal(resumed.state(), client.state(), "client")
    assert resumed.upload(nth(3)).encode() == client.upload(nth(3)).encode()


WORSE: dict[int, dict[int, str]] = {
    2: {
        0: "mean",  # the start
        2: "own",  # with the second expert
        5: "mean",  # without the second expert
        6: "own",  # with the second expert
        7: "own",  # the end
    },
    1: {2: "own"},  # with the second expert in every round
}
"""The parameters that are scored after a worse mean was received, by `every` and round."""


@pytest.mark.parametrize("every", WORSE)
def test_a_worse_mean_in_a_complete_or_last_download_is_not_scored(every, config) -> None:
    local = after(config, 0, rounds=7, every=every, trust=0.0)
    for complete in range(8):
        if complete in WORSE[every]:
            receive_worse_mean(local, complete, WORSE[every][complete])
        if complete < 7:
            one_round(local, complete)


def receive_worse_mean(local: Any, complete: int, better: str) -> None:
    """Let a client receive a worse mean and train, check the result, and restore the client."""
    client = local.clients["diarist"]
    before, own = client.state(), copied(client.shared)
    assert client.row.keys() != {"diarist"}
    download = worse(local, "diarist")
    client.receive(download)
    received = {**own, **download["adapter"]}
    assert equal(client.buffers["own"], own)
    assert equal(client.shared, own if better == "own" else received)
    assert equal(client.buffers["mean"], received)
    client.train(nth(complete))
    assert equal(client.buffers["mean"], received)  # it trains from the mean all the same
    client.restore(before)


def test_a_mean_is_not_scored_if_it_is_worse_by_its_error(config) -> None:
    local = after(config, 4)
    client, windows = local.clients["poet"], judging_windows(local, "poet", 32)
    before, own, kept = client.state(), copied(client.shared), []
    for size in (0.0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.5):
        client.receive(worse(local, "poet", size))
        result = copied(client.shared)
        losses = []
        for tensors in (client.buffers["mean"], own):
            copy(tensors, client.shared)
            each = torch.stack(window_losses(client, windows)).detach()
            losses.append(torch.stack([pair.mean() for pair in each.split(2)]))
        excess = losses[0] - losses[1]
        is_own = bool(excess.mean() > excess.std() / math.sqrt(len(excess)))
        assert equal(result, own if is_own else client.buffers["mean"]), size
        kept.append((is_own, bool(excess.mean() > 0)))
        client.restore(before)
    assert {(False, False), (False, True), (True, True)} == {*kept}


def test_a_mean_whose_loss_is_not_a_number_is_replaced(config) -> None:
    local = after(config, 2)
    client, own = local.clients["poet"], copied(local.clients["poet"].shared)
    client.receive(altered(down(local, "poet"), lambda _, t: t * math.nan))
    assert equal(client.shared, own)


def test_a_worse_mean_is_not_scored_but_is_trained_from(config) -> None:
    runs = [after(config, 4, rounds=5) for _ in range(2)]
    client, twin = (local.clients["diarist"] for local in runs)
    download, own = worse(runs[0], "diarist", 0.2), copied(client.adapter.tensors())
    client.receive(download)
    assert equal(client.adapter.tensors(), own)
    client.train(nth(4))
    twin._compare = lambda: None
    twin.receive(download)
    twin.train(nth(4))
    assert_equal(client.training.state(), twin.training.state(), "training")
    assert close_to(client.adapter.tensors(), twin.adapter.tensors(), atol=0)
