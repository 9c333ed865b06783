"""Clients that gain no more stop, and the run goes on without them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kept_runs import HIGH, naive_loss, trained

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig
from coterie.deployment import server as engine
from coterie.exchanges.lazy import server_state
from coterie.messages.envelope import Entry, Reply, unseal
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder
from coterie.testing import loop
from coterie.testing.rounds import close, down, joined, up
from coterie.training.spec import EvaluationSpec

PLUGIN = Path(__file__).parents[2] / "examples" / "transforms" / "masked_sum.py"


@pytest.mark.parametrize(("method", "rate"), [("comigs-1g1s", 30.0), ("fedavg", 5.0)])
def test_a_client_that_gains_no_more_stops(method, rate, config, tmp_path) -> None:
    """Compare the participants of each round with a naive implementation."""
    settings = {"patience": 1}
    training = HIGH | {"learning_rate": rate}
    for seed in range(20):  # which clients gain is chance, and differs between processors
        run = config(method=method, rounds=5, training=training, evaluation=settings, seed=seed)
        present, losses, local = stopping(run)
        if len(present[-1]) < 3:  # some stop before the others
            break
    else:
        pytest.fail("in no run a client stops before the others")
    done = coterie.run(run, out=tmp_path / "run")
    ended = RunFolder(done.path)
    trained = [
        [m["client"] for m in ended.metrics() if (m["name"], m["round"]) == ("bytes/up", round)]
        for round in range(5)
    ]
    assert [names for names in trained if names] == present
    kept = {name: of.index(min(of)) for name, of in losses.items()}
    assert done.results[method]["kept"] == kept
    for name, client in local.clients.items():
        loop.assert_equal(client.state(), ended.load(f"client-{name}"), name)
    loop.assert_equal(local.value.state(), server_state(ended), "server")
    # All have scores at the end, those of their own models.
    assert all(len(done.results[method][point]) == 3 for point in ("trained", "aggregated"))


def stopping(run: RunConfig):
    """Return the participants of each round, all losses from the base's on, and the local engine.

    The patience is 1.
    """
    local = joined(run)
    aggregated = run.method.reports == "aggregated"
    losses: dict[str, list[float]] = {}
    present: list[list[str]] = []

    def compare(name: str) -> None:
        client, window = local.clients.host(name), run.data.window
        text = client.participant.data.validation
        of = losses.setdefault(name, [naive_loss(client.base, bare(client.base), text, window)])
        of.append(naive_loss(client.base, local.clients[name].model(), text, window))

    def gains(name: str) -> bool:
        of = losses.get(name, [])
        return len(of) < 2 or of[-1] < min(of[:-1])

    for round in range(run.rounds):
        names = [name for name in sorted(local.clients) if gains(name)]
        if not names:
            break
        present.append(names)
        local.open(local.config.turn(round), names)
        uploads = {}
        for name in names:
            local.clients[name].receive(down(local, name))
            if aggregated and round:
                compare(name)
            local.clients[name].train(run.turn(round))
            uploads[name] = up(local, name, round)
            if not aggregated:
                compare(name)
        close(local, round, uploads)
    for name, client in local.clients.items():
        before = client.state()
        client.receive(down(local, name))
        if aggregated and gains(name):  # its best model is still sought
            compare(name)
        if not aggregated:
            client.restore(before)
    return present, losses, local


def test_deployed_clients_stop_as_in_the_local_engine(config, tmp_path) -> None:
    network = loop.deploy(trained(config, evaluation={"patience": 1}), tmp_path)
    steps = Counter(order.turn for _, order in network.orders if order.kind == "step")
    assert steps[0] == 3 > steps[max(steps)] > 0  # the quorum, all three, does not hold it up
    # One word tells of it, and only where a client stops.
    replies = [
        data for data in network.seen if b'"kind": "step"' in data and b"counted" not in data
    ]
    stopped = [unseal(Reply, data)[0].client for data in replies if b'"stops": true' in data]
    assert sorted(stopped) == sorted({*stopped})
    assert stopped


def test_a_run_ends_when_all_have_stopped(config, tmp_path) -> None:
    settings: dict[str, Any] = {"rounds": 9, "training": HIGH, "evaluation": {"patience": 2}}
    runs = (config(method="local", seed=seed, **settings) for seed in range(20))
    ended = ((run, coterie.run(run, out=tmp_path / f"run{run.seed}")) for run in runs)
    # Which rounds are good is chance.
    run, done = next((run, done) for run, done in ended if RunFolder(done.path).turns() < 9)
    kept, rounds = done.results["local"]["kept"], RunFolder(done.path).turns()
    assert rounds == max(kept.values()) + 2 < 9
    assert coterie.resume(done.path).results == done.results  # nothing is left to do
    (done.path / "result.json").unlink()
    assert coterie.resume(done.path).results["local"]["kept"] == kept
    assert RunFolder(done.path).turns() == rounds
    loop.deploy(run, tmp_path)
    loop.assert_as_local(run, tmp_path, RunFolder(done.path))


def test_a_quorum_that_has_stopped_waits_for_nobody_for_ever(config, tmp_path, monkeypatch) -> None:
    """Remove the whaler for good, and let both other clients stop; the run then ends."""
    monkeypatch.setattr(engine, "GRACE", 0.0)
    deployment = {"quorum": 2, "deadline": 0.001}
    run = config(
        method="local", rounds=9, training=HIGH, evaluation={"patience": 1}, deployment=deployment
    )
    loop.deploy(run, tmp_path, events={2: lambda network: network.away.add("whaler")})
    assert RunFolder(tmp_path / "server").turns() < 9
    assert loop.folder(run, tmp_path, "poet").result is not None


@pytest.mark.parametrize("value", [-1, 2.0, "3", True, None, {"round": 3}])
def test_a_kept_round_that_a_client_tells_is_a_number_of_rounds(value) -> None:
    assert Entry(round=1, client="poet", name="kept", value=3)
    with pytest.raises(ValueError, match="invalid for this metric"):
        Entry(round=1, client="poet", name="kept", value=value)


def test_who_comes_late_has_as_much_patience(config, tmp_path) -> None:
    """Check that a client may take part in at least two rounds.

    Its first model is compared when the second of these rounds begins.
    """
    training = HIGH | {"learning_rate": 1e-6}
    rules = {"evaluation": {"patience": 2}, "deployment": {"quorum": 2}}
    run = config(method="fedavg", rounds=5, training=training, **rules)
    late = {6: lambda network: network.reconnect("whaler")}
    network = loop.deploy(run, tmp_path, away={"whaler"}, events=late)
    first = min(o.turn for name, o in network.orders if (name, o.kind) == ("whaler", "step"))
    assert first > 1
    assert loop.folder(run, tmp_path, "whaler").load("kept-whaler").values["since"] >= first


def test_patience_needs_a_best_model() -> None:
    with pytest.raises(ValueError, match="has no effect with `keep: last`"):
        EvaluationSpec(keep="last", patience=1)


@pytest.mark.parametrize("free", [0, 2**40])
def test_patience_does_not_count_phases(free, config, tmp_path, monkeypatch) -> None:
    """Count four rounds in twelve turns, with a phase before and a phase after training."""
    load_plugin(PLUGIN)
    monkeypatch.setattr("coterie.engines.local.free_memory", lambda: free)
    masked, patience = {"transforms": ["masked_sum"]}, {"patience": 4}
    run = config(method="fedavg", rounds=4, evaluation=patience, aggregation=masked)
    assert (run.exchanges, run.turns) == (4, 12)
    done = coterie.run(run, out=tmp_path / "run")
    uploads = Counter(
        m["client"] for m in RunFolder(done.path).metrics() if m["name"] == "bytes/up"
    )
    assert set(uploads.values()) == {12}
