"""Auto: trials and means equal a slow version."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from auto_runs import NAMES, Trial, along_gradient, auto, judging_windows, noise, trial, whole
from tensors import close_to, equal, mean_of
from torch import Tensor

from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}
TOKENS = {"diarist": 900, "poet": 2000, "whaler": 90_000}
STEPS = {"helps": -0.3, "hurts": 0.3, "helps-much": -1, "hurts-much": 1, "hurts-more": 2}
"""Kinds of changes along the gradient of the client's loss, and their step sizes."""
SIZES = {"random": 0.03, "noisy": 0.2}
"""Kinds of random changes, and their standard deviations."""


def judged(client: Any, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of the tensors by which clients judge one another."""
    names = [n for n, p in client.parameters().items() if client.method.judges(p)]
    return copied({n: (client.adapter.tensors() if tensors is None else tensors)[n] for n in names})


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Trial], Any]]] = {
    "random changes": ("random random", {}, lambda t: max(t.excess.values()) < 0.01),
    "one helps": ("helps hurts", {"samples": 4, "trust": 500.0}, lambda t: "whaler" not in t.row),
    "both hurt": ("hurts-much hurts-much", {"trust": 5000.0}, lambda t: t.row == {"poet": 1.0}),
    "no trust": ("helps hurts", {"trust": 0.0}, lambda t: t.row["whaler"] > 0.67),
    "little trust": ("helps hurts", {"trust": 100.0}, lambda t: 0.1 < t.row["whaler"] < 0.6),
    "uncertain": ("noisy noisy", {"samples": 2}, lambda t: not all(t.excess.values())),
    "worse mean": ("hurts-more hurts-more", {"trust": 0.0}, lambda t: t.row == {"poet": 1.0}),
    "by experts": ("helps-much random", {"attention": None}, lambda t: t.excess["whaler"] > 0),
}
"""Kinds of the others' changes, settings, and a condition that the expected trial meets."""


@pytest.mark.parametrize(("kinds", "settings", "covers"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_trial_follows_the_equations(earlier, kinds, settings, covers, config) -> None:
    local: Any = joined(config(method=auto(**settings)))
    poet = local.clients["poet"]
    windows = judging_windows(local, "poet", settings.get("samples", 16))
    initial, mean = judged(poet), copied(poet.shared)
    peers = {
        name: along_gradient(poet, windows, initial, STEPS[kind])
        if kind in STEPS
        else {n: initial[n] + t for n, t in noise(initial, SIZES[kind], seed).items()}
        for seed, (name, kind) in enumerate(zip(("diarist", "whaler"), kinds.split(), strict=True))
    }
    for n, change in noise(poet.shared, 0.03, 9).items():
        poet.shared[n].data.add_(change)
    if earlier:
        poet.row = {"diarist": 0.5, "poet": 0.3, "whaler": 0.2}
        poet.evidence = {"diarist": (-0.01, 1e4), "whaler": (0.01, 2e4)}
    tokens = TOKENS | {"poet": len(poet.context.data.train.ids)}
    pairs = {"poet": judged(poet), **peers}
    download = whole(
        poet,
        mean,
        peers={name: {"adapter": tensors} for name, tensors in peers.items()},
        values={"sizes": {name: tokens[name] for name in peers}},
    )
    expected = trial(poet, windows, download["adapter"], pairs, tokens)
    before = poet.state()
    poet.receive(download)
    assert poet.row == pytest.approx(expected.row, rel=2e-3)
    assert sum(poet.row.values()) == pytest.approx(1)
    assert {c: m for c, (m, _) in poet.evidence.items()} == pytest.approx(
        {c: m for c, (m, _) in expected.evidence.items()}, rel=2e-3, abs=1e-5
    )
    assert equal(poet.buffers["own"], {n: before["adapter"][n] for n in mean})
    assert close_to(poet.buffers["mean"], expected.start, atol=1e-4)
    assert close_to(poet.shared, expected.start, atol=1e-4)
    assert earlier or covers(expected), (expected.excess, expected.row)


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
    uploads = one_round(local, 0)
    for name in NAMES:  # before any trial, every client receives the mean over all
        mean = down(local, name)["adapter"]
        assert close_to(mean, mean_of(u["adapter"] for u in uploads.values()))
    expected = {}
    for name, client in local.clients.items():
        download = down(local, name)
        assert download.peers.keys() == {*NAMES} - {name}
        assert download.values["sizes"] == dict.fromkeys(download.peers, 2000)
        pairs = {peer: download.from_peer(peer)["adapter"] for peer in download.peers}
        pairs[name] = judged(client)
        assert equal(pairs[name], judged(client, uploads[name]["adapter"]))
        windows, tokens = judging_windows(local, name, 7), dict.fromkeys(list[str](NAMES), 2000)
        expected[name] = trial(client, windows, download["adapter"], pairs, tokens).row
    uploads = one_round(local, 1)
    assert any(max(row.values()) > 0.4 for row in expected.values())
    for name, row in expected.items():
        assert uploads[name].values["choice"]["row"] == pytest.approx(row, rel=5e-3)
        mean = down(local, name)["adapter"]
        assert mean.keys() == local.clients[name].shared.keys()
        expected_mean = mean_of((uploads[c]["adapter"] for c in row), row.values())
        assert close_to(mean, {n: expected_mean[n] for n in mean}, atol=1e-4)
