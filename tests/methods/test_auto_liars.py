"""Auto: what clients gain that upload other changes than those of their training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from auto_runs import along_gradient, auto, chosen, forged_round, judging_windows, started
from bounded import bounded_round
from every_method import some
from tensors import close_to, equal
from torch import Tensor
from turns import nth

from coterie.messages import Message
from coterie.methods.auto import client
from coterie.methods.auto.choice import excess, row_of
from coterie.methods.tensors import copied, copy
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down

TEXTS = {"ann": "poet", "ben": "poet", "carl": "whaler", "liar": "poet"}
TRAINING = {"steps": 1, "batch": 2, "precision": "fp32", "learning_rate": 0.01}
Forge = Callable[[Tensor], Tensor]


@pytest.fixture
def run(config):
    """A run of four clients, three of which have the same text; one of these three lies."""

    def make(**changes: Any) -> Any:
        return started(config, TEXTS, **{"method": auto(samples=8), "training": TRAINING} | changes)

    return make


def trial_of(local: Any, name: str, forge: Forge) -> dict[str, float]:
    """Return a client's weights with a step of 3000 after a trial with steps along the gradient.

    Ann's and ben's steps are against the gradient of the client's loss; carl's is half as long.
    The liar's is what `forge` makes of ann's.
    """
    client = local.clients[name]
    judged, initial = client.judged, copied(client.judged)
    windows = judging_windows(local, name, len(client.judging.ids))
    moved = along_gradient(client, windows, initial, -0.3)
    steps = {n: tensor - initial[n] for n, tensor in moved.items()}
    changes = {"ann": steady, "ben": steady, "carl": lambda step: step / 2, "liar": forge}
    pairs = {p: {n: initial[n] + by(t) for n, t in steps.items()} for p, by in changes.items()}
    copy(pairs.pop(name), judged)
    peers = {peer: {"adapter": tensors} for peer, tensors in pairs.items()}
    sent = {n: t for n, t in copied(client.shared).items() if not n.startswith("generalist.1")}
    client.receive(Message(1, {"adapter": sent}, {"sizes": dict.fromkeys(peers, 2000)}, peers))
    assert client.row.get("liar", 0) <= client.row.get("ann", 0) + 1e-6
    return row_of(dict.fromkeys(TEXTS, 0.25), excess(client.evidence), 3000.0, name)


def steady(step: Tensor) -> Tensor:
    return step


def noise_like(step: Tensor) -> Tensor:
    draw = torch.randn(step.shape, generator=torch.Generator().manual_seed(step.numel()))
    return draw * (step.norm() / draw.norm())


@pytest.mark.parametrize("name", ["ann", "ben"])
@pytest.mark.parametrize("by", [0.1, 1, 3])
def test_a_change_of_the_opposite_sign_has_no_weight(name, by, run) -> None:
    row = trial_of(run(), name, lambda step: -by * step)
    assert "liar" not in row
    assert row["ben" if name == "ann" else "ann"] > 0.3


def test_noise_of_equal_size_has_less_weight_than_a_useful_change(run) -> None:
    row = trial_of(run(), "ben", noise_like)
    assert row.get("liar", 0) < 0.1 < 0.3 < row["ann"]


@pytest.mark.parametrize("name", ["ann", "ben"])
def test_a_copy_has_the_weight_of_its_original(name, run) -> None:
    row = trial_of(run(), name, steady)
    assert row["liar"] == pytest.approx(row["ann"], rel=1e-6)
    alone = trial_of(run(), name, lambda step: -step)
    assert row["ann"] <= alone["ann"] < row["ann"] + row["liar"] + 1e-6


@pytest.mark.parametrize("by", some({50, -2.9}, [50, -50, 4, -2.9]))
def test_a_scaled_upload_is_excluded_by_the_bounds(by, run) -> None:
    local, twin, names = run(), run(), sorted(TEXTS)
    for r in range(4):
        # After an exclusion, the liar's own change of the second expert would be that of one
        # round, the others' that of two. -2.9 exceeds only the bound of opposed changes.
        refused = bounded_round(local, r, names, "liar", by, of="ann")
        assert refused.keys() == {"liar"}
        assert "times the round's median" in refused["liar"]
        bounded_round(twin, r, [name for name in names if name != "liar"])
        assert_equal(local.value.state(), twin.value.state(), "server")
        assert all("liar" not in down(local, name).peers for name in names[:3])
    assert all("liar" not in local.clients[name].row for name in names[:3])


@pytest.mark.parametrize("names", [["ann", "ben", "carl", "liar"], ["ann", "liar"]])
def test_a_false_number_of_tokens_counts_three_times_the_median_at_most(names, run) -> None:
    # This bound is loose: without trust in slopes, the liar has most of the weight.
    local = run(method=auto(samples=2, trust=0.0))
    for name in TEXTS.keys() - {*names}:
        local.leave(name)
    false = {"liar": lambda u: chosen(u, tokens=2**62)}
    for r in range(2):
        forged_round(local, r, false, names)
    honest = len(names) - 1
    assert local.clients["ann"].row["liar"] == pytest.approx(3 / (3 + honest))


def test_a_choice_decides_only_about_the_mean_of_its_sender(run) -> None:
    local, twin = run(), run()
    wrong = {"liar": lambda u: chosen(u, row={"carl": 1.0})}
    for r in range(2):
        forged_round(local, r, wrong if r else {})
        forged_round(twin, r)
    for name in ("ann", "ben", "carl"):
        assert equal(local.value.means[name], twin.value.means[name])
    assert not equal(local.value.means["liar"], twin.value.means["liar"])


@pytest.mark.parametrize("row", [{"ann": 1.0}, {"ann": 0.5, "ben": 0.5}, None], ids=str)
def test_a_change_is_measured_from_what_the_client_went_on_from(row, run, monkeypatch) -> None:
    # The client may go on from its own parameters; its mean may be far away.
    local, names = run(), sorted(TEXTS)
    forged_round(local, 0)
    ann = local.clients["ann"]
    if row:
        monkeypatch.setattr(client, "row_of", lambda *_: row)
    local.open(nth(1), names)
    download = down(local, "ann")
    ann.receive(download)
    start, before = copied(ann.buffers["mean"]), ann.state()
    assert row is None or ann.row == row
    upload = ann.upload(nth(1))
    reference = local.server.reference(local.value, "ann", upload, local.exchange)["adapter"]
    sent = upload["adapter"].keys() & download["adapter"].keys()
    assert close_to({n: reference[n] for n in sent}, {n: start[n] for n in sent}, atol=1e-6)
    ann.restore(before)


@pytest.mark.parametrize("back", [8, 9])
def test_a_client_that_returns_receives_all_parameters(back, run) -> None:
    # Experts are not sent in every round; these must not be older than the others' experts.
    local, names = run(rounds=12), sorted(TEXTS)
    for r in range(back):
        bounded_round(local, r, names if r < 2 else names[1:])
    local.open(nth(back), names)
    upload = local.clients["ann"].upload(nth(back))
    expected = local.server.reference(local.value, "ann", upload, local.exchange)["adapter"]
    local.clients["ann"].receive(down(local, "ann"))
    assert equal(local.clients["ann"].buffers["mean"], expected)
    assert not bounded_round(local, back, names)
