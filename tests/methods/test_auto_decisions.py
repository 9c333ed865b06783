"""Auto: when a client compares its mean with its own parameters, and when it trains twice."""

import math
from statistics import fmean, stdev
from typing import Any

import pytest
from auto_runs import (
    altered,
    auto,
    chosen,
    forged_round,
    judging_windows,
    noise,
    whole,
    window_losses,
)
from tensors import equal
from turns import nth

from coterie.messages import Message, State
from coterie.messages.names import TRUST
from coterie.methods.tensors import copied
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined, one_round

TRAINING = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}


def private(state: State) -> State:
    """Return the part of a state that must be as if only the kept training had been executed."""
    return State({"adapter": state["adapter"]}, parts=state.parts)


def after(config, complete: int, rounds: int = 6, **settings: Any) -> Any:
    """Return a run after some rounds."""
    local: Any = joined(config(method=auto(**settings), rounds=rounds, training=TRAINING))
    for exchange in range(complete):
        one_round(local, exchange)
    return local


def before_decision(
    config, damaged: str, seed: int, name: str = "poet", size: float = 0.2, **settings: Any
) -> tuple[Any, Message]:
    """Return a client before its decision, and its next download.

    Noise is added to the mean in the download, or to the client's own parameters.
    """
    local = after(config, 2, **settings)
    client = local.clients[name]
    assert client.stage == "proposed"
    download = down(local, name)
    wrong = noise(download["adapter"], size, seed)
    if damaged == "mean":
        download = altered(download, lambda n, t: t + wrong[n])
    else:
        for n, change in wrong.items():
            client.shared[n].data.add_(change)
    return client, download


def observed(client: Any) -> tuple[list[int], list[tuple[str, Any]]]:
    """Return two lists to which a client's trainings and its metrics are appended from now on."""
    trainings: list[int] = []
    metrics: list[tuple[str, Any]] = []
    train = client.training.run

    def counted(round: int) -> None:
        trainings.append(round)
        train(round)

    client.training.run = counted
    client.log = lambda metric, value: metrics.append((metric, value))
    return trainings, metrics


def rows(metrics: list[tuple[str, Any]]) -> list[Any]:
    """Return the weights among a client's metrics."""
    return [value for metric, value in metrics if metric == TRUST]


def branch(client: Any, download: Message, start: str) -> list[tuple[str, Any]]:
    """Let a client train only from its own parameters, or only from the mean.

    Returns:
        The metrics of the training.
    """
    tensors = {**client.shared, **(download["adapter"] if start == "mean" else {})}
    client.row = {client.context.name: 1.0}  # the client then does not compare
    client.receive(whole(client, copied(tensors), download.exchange))
    client.stage = ""
    trainings, metrics = observed(client)
    client.train(nth(download.exchange))
    assert trainings == [download.exchange]
    return metrics


STARTS: dict[str, tuple[Any, str, bool]] = {
    "own is better": (("mean", 8, "poet", 0.2), "own", True),
    "mean is better": (("mean", 8, "diarist", 0.03), "mean", True),
    "mean is better at once": (("own", 5, "poet", 0.2), "mean", False),
}
"""Damaged parameters, the better start, and whether a client trains from both starts."""


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(("start", "better", "twice"), STARTS.values(), ids=STARTS)
def test_the_training_with_the_lower_loss_is_kept(start, better, twice, every, config) -> None:
    # A client trains twice if the mean is worse before training. If `every` is 3, the mean lacks
    # an expert.
    client, download = before_decision(config, *start, every=every)
    before, alone = client.state(), better == "own"
    branch(client, download, "mean" if alone else "own")
    other = copied(client.adapter.tensors())
    client.restore(before)
    expected, kept = branch(client, download, better), client.state()
    client.restore(before)
    trainings, metrics = observed(client)
    own, row, name = copied(client.adapter.tensors()), dict(client.row), start[2]
    assert len(row) > 1
    assert (len(download["adapter"]) == len(client.shared)) == (every == 2)
    client.receive(download)
    assert client.stage == ("undecided" if twice else "")
    assert metrics == ([] if twice else [(TRUST, row)])
    assert equal(client.adapter.tensors(), own if twice else {**own, **download["adapter"]})
    client.train(nth(2))
    assert trainings == ([2, 2] if twice else [2])
    assert client.row == ({name: 1.0} if alone else row)
    assert client.upload(nth(2)).values["choice"]["row"] == client.row
    assert_equal(private(client.state()), private(kept), "client")
    assert not equal(client.adapter.tensors(), other)
    assert client.stage == ""
    assert rows(metrics) == [client.row]
    assert [metric for metric in metrics if metric[0] != TRUST] == expected != []


def test_a_client_with_an_equally_good_mean_trains_twice_and_keeps_it(config) -> None:
    client, _ = before_decision(config, "mean", 5)
    (trainings, metrics), row = observed(client), dict(client.row)
    client.receive(whole(client, copied(client.shared), round=2))
    assert client.stage == "undecided"
    client.train(nth(2))
    assert trainings == [2, 2]
    assert (client.stage, client.row, rows(metrics)) == ("", row, [row])


@pytest.mark.parametrize(
    ("name", "size", "alone"),
    [("diarist", 0.03, False), ("whaler", 0.01, False), ("whaler", 0.03, True)],
)
def test_the_difference_is_compared_with_its_standard_error(name, size, alone, config) -> None:
    client, download = before_decision(config, "mean", 8, name, size)
    windows, losses = judging_windows(after(config, 0), name), {}
    state, row = client.state(), dict(client.row)
    for start in ("own", "mean"):
        branch(client, download, start)
        losses[start] = [loss.item() for loss in window_losses(client, windows)]
        client.restore(state)
    gain = [b - a for a, b in zip(losses["own"], losses["mean"], strict=True)]
    errors = fmean(gain) / (stdev(gain) / math.sqrt(len(gain)))
    assert abs(errors) > 0.01
    assert (errors > 1) == alone
    for patience in (1.0, errors - 0.1 * abs(errors), errors + 0.1 * abs(errors)):
        client.restore(state)
        client.method = client.method.model_copy(update={"patience": patience})
        client.receive(download)
        assert client.stage == "undecided"
        client.train(nth(2))
        assert client.row == ({name: 1.0} if errors > patience else row)


@pytest.mark.parametrize("damaged", ["mean", "own"])
def test_a_decision_has_the_same_bits_after_a_restart(damaged, config) -> None:
    # The client is stopped after it received its download, and before it trains.
    client, download = before_decision(config, damaged, 5)
    client.receive(download)
    assert client.stage == ("undecided" if damaged == "mean" else "")
    saved = State.decode(client.state().encode())
    resumed: Any = after(config, 0).clients["poet"]
    resumed.restore(saved)
    for each in (client, resumed):
        each.train(nth(2))
    assert_equal(resumed.state(), client.state(), "client")
    assert resumed.upload(nth(2)).encode() == client.upload(nth(2)).encode()


WORSE: dict[int, dict[int, tuple[str, str]]] = {
    2: {
        0: ("", "mean"),  # the start
        1: ("proposed", "mean"),  # a trial without the second expert
        3: ("", "mean"),  # without the second expert
        4: ("", "own"),  # with the second expert
        5: ("", "own"),  # the end
    },
    1: {1: ("proposed", "own"), 3: ("", "own")},  # with the second expert in every round
}
"""The client's stage after a worse mean, and the better parameters, by `every` and round."""


@pytest.mark.parametrize("every", WORSE)
def test_a_worse_mean_in_a_complete_or_last_download_is_replaced(every, config) -> None:
    local = after(config, 0, rounds=5, every=every)
    for complete in range(6):
        if complete in WORSE[every]:
            receive_worse_mean(local, complete, *WORSE[every][complete])
        if complete < 5:
            one_round(local, complete)


def receive_worse_mean(local: Any, complete: int, stage: str, better: str) -> None:
    """Let a client receive a worse mean and train, check the result, and restore the client."""
    client = local.clients["diarist"]
    before, own = client.state(), copied(client.shared)
    assert client.row.keys() != {"diarist"}
    wrong = noise(own, 0.5, 4)
    download = altered(down(local, "diarist"), lambda n, t: t + wrong[n])
    client.receive(download)
    assert client.stage == stage
    mean = {**own, **download["adapter"]}
    assert equal(client.shared, own if better == "own" else mean)
    assert equal(client.buffers["own"], own)
    assert equal(client.buffers["mean"], mean)
    trainings, metrics = observed(client)
    client.train(nth(complete))
    assert trainings == [complete]  # a client that is not undecided trains from the mean
    assert rows(metrics) == []
    client.restore(before)


def test_a_mean_whose_loss_is_not_a_number_is_replaced(config) -> None:
    local = after(config, 2)
    client, own = local.clients["poet"], copied(local.clients["poet"].shared)
    client.receive(altered(down(local, "poet"), lambda _, t: t * math.nan))
    assert equal(client.shared, own)
    assert client.stage == "undecided"


def test_a_better_mean_decides_no_trial_whose_weights_were_not_applied(config) -> None:
    local = after(config, 1, every=1)
    client, download = local.clients["poet"], down(local, "poet")
    wrong = noise(client.shared, 0.5, 4)
    for name, tensor in client.shared.items():
        tensor.data.add_(wrong[name])
    trainings, metrics = observed(client)
    client.receive(download)
    assert equal(client.shared, download["adapter"])
    client.train(nth(1))
    assert client.stage == "proposed"
    assert trainings == [1]
    assert rows(metrics) == []


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
    before, download = copied(poet.adapter.tensors()), down(local, "poet")
    assert set(download["adapter"]) < poet.shared.keys()  # the second expert is not due
    poet.receive(download)
    assert equal(poet.adapter.tensors(), before)
    poet.train(nth(3))
    assert equal(poet.buffers["mean"], {n: before[n] for n in poet.shared})


def test_a_worse_mean_is_not_scored_but_is_trained_from(config) -> None:
    runs = [after(config, 4, rounds=5) for _ in range(2)]
    client, twin = (local.clients["diarist"] for local in runs)
    download = down(runs[0], "diarist")
    wrong = noise(download["adapter"], 0.2, 6)
    download = altered(download, lambda n, t: t + wrong[n])
    own = copied(client.adapter.tensors())
    client.receive(download)
    assert client.stage == ""
    assert equal(client.adapter.tensors(), own)
    client.train(nth(4))
    branch(twin, download, "mean")
    assert_equal(private(client.state()), private(twin.state()), "client")
