"""Auto: the mean of all clients, which a client approaches after the last round."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_runs import along_gradient, altered, auto, forged_round, judging_windows, window_losses
from tensors import close_to, equal, mean_of

from coterie.messages import Message, MessageError
from coterie.messages.names import TRUST
from coterie.methods.auto import client as auto_client
from coterie.methods.tensors import copied, copy
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined, one_round

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}


@pytest.fixture(scope="module")
def ended(config) -> tuple[Any, dict[str, Message]]:
    """A run after its last round, and the uploads of this round."""
    local: Any = joined(config(method=auto(), rounds=4, training=TRAINING))
    row = {"poet": 0.25, "whaler": 0.75}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_client, "row_of", lambda *_: row)
        for exchange in range(3):
            uploads = one_round(local, exchange)
            assert not any(down(local, name)["common"] for name in uploads)
        uploads = one_round(local, 3)
    assert all(upload.values["choice"]["row"] == row for upload in uploads.values())
    return local, uploads


def alone(client: Any, download: Message) -> None:
    """Let a client receive a download as one that has no weights for others."""
    client.row = {client.context.name: 1.0}
    client.receive(download)


def with_common(download: Message, change: Any) -> Message:
    """Return a download with another mean of all clients."""
    common = {n: change(n, t) for n, t in download["common"].items()}
    return replace(download, groups={**download.groups, "common": common})


def test_every_client_receives_the_mean_of_all_after_the_last_round(ended) -> None:
    local, uploads = ended
    mean = mean_of(u["adapter"] for u in uploads.values())  # all have 2,000 tokens
    for name in uploads:
        download = down(local, name)
        assert close_to(download["common"], mean, atol=1e-6)
        assert not close_to(download["adapter"], mean, atol=1e-4)
    assert local.value.means.keys() == uploads.keys()


def test_a_client_approaches_the_mean_of_all_while_its_loss_decreases(ended) -> None:
    local, uploads = ended
    parts = set()
    for name, is_better in [(name, better) for name in uploads for better in (False, True)]:
        client = local.clients[name]
        download, own, before = down(local, name), copied(client.shared), client.state()
        if is_better:
            windows, pairs = (
                judging_windows(local, name, 32),
                {n: own[n] for n in client.judged},
            )
            better = {**own, **along_gradient(client, windows, pairs, -1.0)}
            download = with_common(download, lambda n, _, better=better: better[n])
        logged: list[Any] = []
        client.context = replace(client.context, log=lambda *metric, to=logged: to.append(metric))
        alone(client, download)
        result = copied(client.shared)
        points = [
            {n: t + part / 10 * (download["common"][n] - t) for n, t in own.items()}
            for part in range(6)
        ]
        losses = []
        for point in points:
            copy(point, client.shared)
            with torch.no_grad():
                losses.append(torch.stack(window_losses(client, judging_windows(local, name, 32))))
        means = [loss.mean().item() for loss in losses]
        best = next((i for i in range(5) if means[i + 1] >= means[i]), 5)
        assert close_to(result, points[best], atol=1e-6), means
        parts.add(best)
        [(metric, weights)] = logged
        part = best / 10
        assert metric == TRUST
        assert weights == pytest.approx({n: part / 3 + (1 - part) * (n == name) for n in uploads})
        client.restore(before)
    assert len(parts) > 1


@pytest.mark.parametrize("how", ["worse", "nan"])
def test_a_client_does_not_approach_a_worse_mean(how, ended) -> None:
    local, _ = ended
    client = local.clients["poet"]
    own, before = copied(client.shared), client.state()
    wrong = {"worse": lambda _, t: t + 3.0, "nan": lambda _, t: t * math.nan}[how]
    alone(client, with_common(down(local, "poet"), wrong))
    assert equal(client.shared, own)
    client.restore(before)


def test_a_mean_of_other_shapes_is_refused(ended) -> None:
    local, _ = ended
    client = local.clients["poet"]
    before = client.state()
    for change in (lambda _, t: t[:1], lambda n, t: t[None]):
        with pytest.raises(MessageError):
            client.receive(with_common(down(local, "poet"), change))
        assert_equal(client.state(), before, "state")
    client.restore(before)


def test_without_the_second_expert_only_what_was_sent_is_approached(config) -> None:
    local: Any = joined(config(method=auto(every=2), rounds=3, training=TRAINING))
    for exchange in range(3):
        one_round(local, exchange)
    download, client = down(local, "poet"), local.clients["poet"]
    second = {n for n, p in client.parameters().items() if p.expert}
    assert second
    assert download["common"].keys() == client.shared.keys() - second
    own = copied(client.shared)
    alone(client, download)
    assert equal({n: client.shared[n] for n in second}, {n: own[n] for n in second})


def test_an_excluded_upload_is_in_no_mean_of_all(config) -> None:
    local: Any = joined(config(method=auto(), rounds=2, training=TRAINING))
    one_round(local, 0)
    far = {"whaler": lambda upload: altered(upload, lambda _, t: t + 50.0)}
    _, uploads = forged_round(local, 1, far)
    mean = mean_of(uploads[name]["adapter"] for name in ("diarist", "poet"))
    assert close_to(down(local, "poet")["common"], mean, atol=1e-6)


def test_with_two_others_in_each_mean_there_is_no_second_mean(config) -> None:
    aggregation = {"least_others": 2}
    local: Any = joined(config(method=auto(), rounds=2, training=TRAINING, aggregation=aggregation))
    for exchange in range(2):
        one_round(local, exchange)
    assert not down(local, "poet")["common"]
