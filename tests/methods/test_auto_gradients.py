"""Auto with gradients in trials: the server weights clients, and nobody receives parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_runs import (
    NAMES,
    altered,
    auto,
    forged_round,
    judging_windows,
    naive_evidence,
    naive_excess,
    naive_row,
    noise,
    window_losses,
)
from tensors import close_to, equal, mean_of
from turns import nth

from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.methods.tensors import copied, copy
from coterie.testing.rounds import down, joined, take

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}


@pytest.fixture
def make(config):
    """A run whose clients have joined; keyword arguments are settings of the method."""

    def make(rounds: int = 6, **settings: Any) -> Any:
        method = auto(trials="gradients", **settings)
        return joined(config(method=method, rounds=rounds, training=TRAINING))

    return make


def naive_gradients(client: Any, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mean gradient of every fourth window, four times."""
    names = sorted(client.judged)
    tensors = [client.adapter.tensors()[n].requires_grad_() for n in names]
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, tensors)])
        for loss in window_losses(client, windows)
    ]
    return [torch.stack(gradients[i::4]).mean(0).detach() for i in range(4)]


@pytest.mark.parametrize("trial", [1, 3])
def test_the_server_computes_the_weights_from_gradients(trial, make) -> None:
    local, uploads = make(samples=9, trust=300.0), {}
    for r in range(trial):
        uploads = forged_round(local, r)[1]
    every = mean_of(upload["adapter"] for upload in uploads.values())
    expected: dict[str, list[torch.Tensor]] = {}
    for name, client in local.clients.items():
        download, before = down(local, name), client.state()
        common = {n: every[n] for n in client.judged}
        assert close_to(download["common"], common, atol=1e-6)
        mean = {**download["adapter"], **common}
        copy(mean, {n: client.shared[n] for n in mean})
        expected[name] = naive_gradients(client, judging_windows(local, name, 9))
        client.restore(before)
    earlier = {c: dict(known) for c, known in local.value.evidence.items()}
    assert bool(earlier) == (trial == 3)
    downloads, uploads = forged_round(local, trial)
    for name in NAMES:
        assert not downloads[name].peers
        sent = uploads[name]["gradients"]
        assert sorted(sent) == ["0", "1", "2", "3"]
        for number, gradient in enumerate(expected[name]):
            error = sent[str(number)].float() - gradient
            assert error.norm() < 0.01 * gradient.norm()
    start = {n: t for n, t in local.server.start.items() if n.startswith("dense/")}
    changes = {
        name: torch.cat([(u["adapter"][n] - start[n]).flatten() for n in sorted(start)]).double()
        for name, u in uploads.items()
    }
    length = sorted(float(change.norm()) for change in changes.values())[1]
    shares = dict.fromkeys(NAMES, 1 / 3)
    rows = {}
    for name in NAMES:
        slopes = [
            [float(g.double() @ changes[c]) * length / float(changes[c].norm()) for c in NAMES]
            for g in uploads[name]["gradients"].values()
        ]
        evidence = naive_evidence(slopes, shares, earlier.get(name, {}))
        for client, known in evidence.items():
            assert local.value.evidence[name][client] == pytest.approx(known, rel=1e-3, abs=1e-6)
        rows[name] = naive_row(shares, naive_excess(evidence), 300.0, name)
        assert local.value.rows[name] == pytest.approx(rows[name], rel=1e-4)
    assert trial == 3 or max(max(row.values()) for row in rows.values()) > 0.4
    for name, row in rows.items():
        download = down(local, name)
        assert download.values["row"] == pytest.approx(row, rel=1e-4)
        mean = mean_of((uploads[c]["adapter"] for c in row), row.values())
        assert close_to(download["adapter"], {n: mean[n] for n in download["adapter"]}, atol=1e-5)


def test_gradients_are_sent_in_trials_alone(make) -> None:
    local = make(rounds=8)
    sent = {}
    for r in range(8):
        downloads, uploads = forged_round(local, r)
        assert not any(download.peers for download in downloads.values())
        assert all(bool(d["common"]) == (r in (1, 3, 7)) for d in downloads.values())
        sent[r] = {len(upload["gradients"]) for upload in uploads.values()}
    assert sent == {r: {4} if r in (1, 3, 7) else {0} for r in range(8)}
    take(local)
    [forwarded] = local.schema.forwarded().values()
    assert forwarded == ["number of training tokens"]


def test_a_client_whose_mean_is_worse_stays_alone_until_its_next_trial(make) -> None:
    local = make(rounds=8)
    for r in range(2):
        forged_round(local, r)
    poet, own = local.clients["poet"], copied(local.clients["poet"].shared)
    download = down(local, "poet")
    wrong = noise(poet.shared, 2.0, 4)
    poet.receive(altered(download, lambda n, t: t + wrong[n]))
    assert poet.row == {"poet": 1.0}
    assert equal(poet.buffers["mean"], own)
    poet.train(nth(2))
    upload = poet.upload(nth(2))
    assert upload.values["choice"]["row"] == {"poet": 1.0}
    forged_round(local, 2, {"poet": lambda _: upload})
    assert dict(local.value.rows["poet"]) == {"poet": 1.0}
    assert down(local, "poet").values["row"] == {"poet": 1.0}
    forged_round(local, 3)
    assert len(local.value.rows["poet"]) > 1


def test_a_client_cannot_give_weights_to_others(make) -> None:
    local = make()
    for r in range(3):
        forged_round(local, r)

    def greedy(upload: Message) -> Message:
        row = {"diarist": 0.9, "poet": 0.1}
        return replace(upload, values={"choice": {**upload.values["choice"], "row": row}})

    forged_round(local, 3, {"poet": greedy})
    assert local.value.rows["poet"] != {"diarist": 0.9, "poet": 0.1}
    rows = {name: dict(row) for name, row in local.value.rows.items()}
    forged_round(local, 4, {"poet": greedy})
    assert {name: dict(row) for name, row in local.value.rows.items()} == rows


@pytest.mark.parametrize("size", [2.0, torch.finfo(torch.bfloat16).max])
def test_huge_gradients_exclude_their_sender_from_the_trial(size, make) -> None:
    local = make(trust=300.0)

    def forge(upload: Message) -> Message:
        gradients = {n: size * g.sign() for n, g in upload["gradients"].items()}
        return replace(upload, groups={**upload.groups, "gradients": gradients})

    forged_round(local, 0)
    forged_round(local, 1, {"poet": forge})
    honest = ["diarist", "whaler"]
    assert [sorted(local.value.evidence.get(name, [])) for name in NAMES] == [honest, [], honest]
    forged_round(local, 2)
    forged_round(local, 3)
    assert all(sorted(known) == [*NAMES] for known in local.value.evidence.values())


@pytest.mark.parametrize(
    ("round", "change"),
    [
        (1, lambda sent: {**sent, "4": sent["0"]}),
        (1, lambda sent: {"0": sent["0"][:-1]}),
        (2, lambda sent: {"0": torch.zeros(3, dtype=torch.bfloat16)}),
    ],
    ids=["too many", "of another size", "after the trial"],
)
def test_other_gradients_are_refused(round, change, make) -> None:
    local = make()
    for r in range(round):
        forged_round(local, r)

    def forge(upload: Message) -> Message:
        return replace(upload, groups={**upload.groups, "gradients": change(upload["gradients"])})

    with pytest.raises(MessageError, match="The tensor"):
        forged_round(local, round, {"poet": forge})


def test_a_client_trains_from_its_own_mean_after_it_computed_gradients(make) -> None:
    local = make()
    for r in range(3):
        forged_round(local, r)
    poet = local.clients["poet"]
    poet.receive(down(local, "poet"))
    assert poet.gradients
    assert equal(poet.shared, poet.buffers["mean"])


def test_gradients_of_single_clients_and_limits_of_means_are_refused(config) -> None:
    run = config(method=auto(trials="gradients"), aggregation={"least_others": 2})
    with pytest.raises(CoterieError, match="uses 'gradients'"):
        joined(run)


def test_one_sample_gives_no_evidence(make) -> None:
    local = make(samples=2)
    judging = local.clients["poet"].judging
    local.clients["poet"].judging = next(judging.split(1))
    forged_round(local, 0)
    _, uploads = forged_round(local, 1)
    assert [len(uploads[name]["gradients"]) for name in NAMES] == [2, 1, 2]
    assert not local.value.evidence["poet"]
    assert local.value.rows["poet"] == pytest.approx(dict.fromkeys(NAMES, 1 / 3))
