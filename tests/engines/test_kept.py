"""Each client ends with the best model that it had, by its own validation text."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes.ways import after
from every_method import each_method, run_of, some
from kept_runs import HIGH, ROUNDS, files, naive_loss, naive_order, trained
from looped import Killed, kill

import coterie
from coterie.cli import terminal
from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.engines import client_host as part
from coterie.engines.session import Session
from coterie.inference.kept import Best, Keeper
from coterie.messages import State
from coterie.messages.names import JUMPED
from coterie.methods.pretrained import bare
from coterie.runs import Callback, RunFolder, describe, folder
from coterie.runs.state_file import StateFile
from coterie.testing import loop
from coterie.testing.rounds import close, down, joined, take, up

MOMENTS = {"exp_avg", "exp_avg_sq", "step"}
"""The groups of a state of AdamW."""


def naive_rounds(run: RunConfig) -> dict[str, list[tuple[float, float]]]:
    """Return the values that rank each client's models: of its base, and after every round."""
    local = joined(run)
    aggregated = run.method.reports == "aggregated" and bool(local.schema.down)
    ranks: dict[str, list[tuple[float, float]]] = {}

    def note(name: str) -> None:
        client = local.clients.host(name)
        text, window = client.participant.data.validation, run.data.window
        ranked = ranks.setdefault(name, [naive_order(client.base, bare(client.base), text, window)])
        ranked.append(naive_order(client.base, local.clients[name].model(), text, window))

    for turn in map(run.turn, range(run.exchanges)):
        local.open(turn, sorted(local.clients))
        uploads = {}
        for name, client in sorted(local.clients.items()):
            client.receive(down(local, name))
            if aggregated and turn.first and turn.round:
                note(name)
            client.train(turn)
            uploads[name] = up(local, name, turn.number)
            if not aggregated and turn.last:
                note(name)
        close(local, turn.number, uploads)
    if aggregated:
        take(local)
        for name in local.clients:
            note(name)
    return ranks


@pytest.mark.parametrize("method", each_method({"local"}))
def test_the_best_of_all_rounds_is_kept(method, values, teachers, tmp_path) -> None:
    # Higher, FedMKT's losses are not finite on some kinds of processors.
    run = run_of(method, values, teachers, rounds=3, training=HIGH | {"learning_rate": 0.3})
    done = coterie.run(run, out=tmp_path / "run")
    result = done.results[run.label]
    if method["name"] == "pretrained":
        assert "kept" not in result
        return
    ranked = naive_rounds(run)
    assert result["kept"] == {name: of.index(min(of)) for name, of in ranked.items()}
    for participant in Session(run).participants(run):
        base, (_, best) = participant.base, min(ranked[participant.name])
        assert base is not None
        model, text = done.model(participant.name), participant.data.validation
        kept = RunFolder(done.path).load(f"kept-{participant.name}")
        assert MOMENTS.isdisjoint(group for _, part in kept.walk() for group in part.groups)
        assert naive_loss(base, model, text, run.data.window) == pytest.approx(best, rel=1e-6)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> RunFolder:
    """A run that nothing happened to, with kept models of different rounds, the last among them.

    Which rounds are good is chance, and not the same on every kind of processor. The first seed
    has such a run on some of them.
    """
    for seed in (11, *range(20)):
        done = coterie.run(trained(config, seed=seed), out=tmp_path_factory.mktemp("whole") / "run")
        rounds = set(done.results["comigs-1g1s"]["kept"].values())
        if min(rounds) < ROUNDS in rounds:
            return RunFolder(done.path)
    pytest.fail("no seed has such a run")


@pytest.fixture(scope="module")
def again(config, whole) -> Callable[..., RunConfig]:
    """Repeat the run with some changes."""
    return partial(trained, config, seed=whole.description["config"]["seed"])


@pytest.mark.parametrize("file", some({"client-whaler"}, ["kept-poet", "client-whaler"]))
def test_a_killed_run_keeps_the_same_models(file, again, whole, tmp_path, monkeypatch) -> None:
    """Kill a run after the best model of only one client is written."""
    calls = itertools.count(1)

    def hit(source: Any, path: Path) -> bool:
        return "checkpoints" in path.parts and path.stem == file and next(calls) == 3

    with monkeypatch.context() as patch:
        for owner, name in ((StateFile, "move"), (folder, "link")):
            patch.setattr(owner, name, after(getattr(owner, name), hit, kill))
        with pytest.raises(Killed):
            coterie.run(again(), out=tmp_path / "run")
    stopped_run = RunFolder(tmp_path / "run")
    assert 2 <= stopped_run.turns() <= 3
    coterie.resume(stopped_run.path)
    assert files(stopped_run) == files(whole)
    assert (stopped_run.result or {}) | {"seconds": 0} == (whole.result or {}) | {"seconds": 0}


def test_a_deployed_client_keeps_the_same_and_tells_nobody(again, whole, tmp_path) -> None:
    sent = {}
    for keep in ("best", "last"):
        run = again(evaluation={"keep": keep})
        seen = loop.deploy(run, tmp_path / keep).seen
        # An order to join holds the run file.
        sent[keep] = [data for data in seen if b'"config"' not in data]
        if keep == "best":
            loop.assert_as_local(run, tmp_path / keep, whole)
    assert len(sent["best"]) > 15
    assert sent["best"] == sent["last"]


def test_a_round_that_did_not_count_is_not_kept(config, tmp_path) -> None:
    """Discard the poet's third round, so that its best model is one of another round."""
    run = config(method="local", rounds=3, deployment={"quorum": 2, "deadline": 0.001})
    assert coterie.run(run, out=tmp_path / "run").results["local"]["kept"]["poet"] == 3
    loop.deploy(run, tmp_path, lose=lambda name, order: (name, order.turn) == ("poet", 2))
    own = loop.folder(run, tmp_path, "poet")
    kept, before = own.load("kept-poet"), RunFolder(tmp_path / "run")
    assert (own.result or {})["kept"] == {"poet": 2}
    assert kept.values["round"] == 2
    last = own.load("client-poet")
    without_moments = replace(last, parts={"training": State()})
    assert last.parts["training"].parts["joint"].groups.keys() == MOMENTS
    loop.assert_equal(kept.parts["side"], without_moments, "poet")
    assert before.load("kept-poet").values["loss"] < kept.values["loss"]


def test_who_comes_when_all_rounds_are_over_keeps_the_base(config, tmp_path) -> None:
    run = config(method="local", rounds=1, deployment={"quorum": 2})
    late = {2: lambda network: network.reconnect("whaler")}
    network = loop.deploy(run, tmp_path, away={"whaler"}, events=late)
    assert [o.kind for name, o in network.orders if name == "whaler"] == ["join", "finish"]
    assert (loop.folder(run, tmp_path, "whaler").result or {})["kept"] == {"whaler": 0}


def test_training_is_the_same_whatever_is_kept(again, whole, tmp_path) -> None:
    last = coterie.run(again(evaluation={"keep": "last"}), out=tmp_path / "run")
    other, result, best = RunFolder(last.path), last.results["comigs-1g1s"], whole.result or {}
    for side in loop.sides(other):
        loop.assert_same_state(other, whole, side)
    assert not any(side.startswith("kept") for side in loop.sides(other))
    assert result.keys() == best.keys() - {"kept"}
    assert result["traffic"] == best["traffic"]
    # Only the scores of models that are kept differ, and are scores of theirs.
    for client, round in best["kept"].items():
        same = result["trained"][client] == best["trained"][client]
        assert same == (round == ROUNDS)
    assert {m["name"] for m in other.metrics()} == {m["name"] for m in whole.metrics()} - {
        *("validation/loss", "kept", "test/kept")
    }


@pytest.mark.parametrize("method", ["fedavg", "fedptuning"])
def test_who_does_not_gain_keeps_the_base_as_it_came(method, config, tmp_path) -> None:
    training = HIGH | {"learning_rate": 0.3}
    run = config(method=method, rounds=2, training=training, base="tiny-gpt2-2m")
    done = coterie.run(run.model_copy(update={"baselines": ("pretrained",)}), out=tmp_path / "run")
    result, base = done.results[method], done.results["pretrained"]
    assert result["kept"] == dict.fromkeys(("diarist", "poet", "whaler"), 0)
    assert result[run.method.reports] == base["trained"]
    assert "(0)" in done.table().markdown()
    ids = torch.arange(12)[None]
    own = coterie.load(done.path / "baselines" / "pretrained", "poet")
    assert torch.equal(done.model("poet")(ids).logits, own(ids).logits)


class Shown(Callback):
    """A callback that collects logged lines."""

    def __init__(self) -> None:
        self.jumps: list[tuple[str | None, int]] = []

    def on_metric(self, round: int, client: str | None, name: str, value: Any) -> None:
        if name == JUMPED:
            self.jumps.append((client, value["round"]))


@pytest.mark.parametrize("rate", [0.3, 1e-3])
def test_a_client_warns_when_its_validation_loss_jumps(rate, config, tmp_path) -> None:
    training = HIGH | {"learning_rate": rate}
    run = config(method="fedavg", rounds=2, training=training, base="tiny-gpt2-2m")
    shown = Shown()
    done = coterie.run(run, out=tmp_path / "run", callbacks=[shown])
    lines = list(RunFolder(done.path).metrics())
    losses = {
        (m["client"], m["round"] + 1): m["value"] for m in lines if m["name"] == "validation/loss"
    }
    jumps = {(m["client"], m["round"] + 1): m["value"] for m in lines if m["name"] == JUMPED}
    assert bool(jumps) == (rate == 0.3)
    assert sorted(jumps) == sorted(shown.jumps)
    for place, value in jumps.items():
        assert value["round"] == place[1]
        assert value["loss"] == losses[place] > value["best"] + 1
    loop.deploy(run, tmp_path)
    for name in ("diarist", "poet", "whaler"):
        own = [m for m in loop.folder(run, tmp_path, name).metrics() if m["name"] == JUMPED]
        assert {(name, m["round"] + 1): m["value"] for m in own} == {
            place: value for place, value in jumps.items() if place[0] == name
        }


def test_the_kept_model_is_scored_at_most_once(again, whole, tmp_path, monkeypatch) -> None:
    scored: Counter[str] = Counter()
    original = part.evaluate

    def counted(base, model, tokens, *more):
        scored[names[tokens.ids.numpy().tobytes()]] += 1
        return original(base, model, tokens, *more)

    run = again()
    participants = Session(run).participants(run)
    names = {p.data.test.ids.numpy().tobytes(): p.name for p in participants}
    monkeypatch.setattr(part, "evaluate", counted)
    kept = coterie.run(run, out=tmp_path / "run").results["comigs-1g1s"]["kept"]
    assert kept == (whole.result or {})["kept"]
    # The trained and the aggregated model of the last round; and another, if that is better.
    assert scored == {name: 2 + (round < ROUNDS) for name, round in kept.items()}


def test_runs_of_a_session_score_the_untrained_base_once(config, tmp_path, monkeypatch) -> None:
    scored: list[int] = []
    original = Keeper._scored

    def counted(self: Keeper, model: Any, round: int, since: int) -> Best:
        scored.append(round)
        return original(self, model, round, since)

    monkeypatch.setattr(Keeper, "_scored", counted)
    run = config(method="fedavg", baselines=["local"], rounds=1)
    coterie.run(run, out=tmp_path / "run")
    assert Counter(scored) == {0: len(run.clients), 1: 2 * len(run.clients)}
    session = Session(run)
    for number, samples in enumerate([1, 2, 2]):
        scored.clear()
        other = config(method="local", rounds=1, evaluation={"validation_samples": samples})
        session.start(other, RunFolder.create(tmp_path / str(number), describe({}, {}, {}))).run()
        assert scored.count(0) == (0 if number == 2 else len(run.clients))


@pytest.mark.slow
def test_a_pooled_run_keeps_one_model_by_all_validation_texts(config, tmp_path) -> None:
    run = config(method="centralized", rounds=4, training=HIGH)
    done = coterie.run(run, out=tmp_path / "run")
    result = done.results["centralized"]
    losses = naive_rounds(run)["everyone"]
    assert result["kept"] == {"everyone": losses.index(min(losses))}
    for participant in Session(run).participants(run):
        for client, text in participant.tests.items():
            assert participant.base is not None
            loss = naive_loss(participant.base, done.model(client), text, run.data.window)
            assert result["trained"][client]["loss"] == pytest.approx(loss, rel=1e-5)
    [mark] = set(result["kept"].values())
    assert done.table().markdown().count(f"({mark})") == 3


def test_so_many_validation_samples_choose(config, tmp_path) -> None:
    """Compare losses of one window and of all windows with their means."""
    for count in (1, 1000):
        run = config(method="local", rounds=1, evaluation={"validation_samples": count, "batch": 3})
        done = coterie.run(run, out=tmp_path / str(count))
        [participant, *_] = Session(run).participants(run)
        text, window = participant.data.validation, run.data.window
        assert participant.base is not None
        assert isinstance(text, Tokens)
        if count == 1:
            text = type(text)(text.ids[:window], 0)
        local = joined(run)  # the model after training, whether or not it is the best
        local.clients[participant.name].train(run.turn(0))
        model = local.clients[participant.name].model()
        expected = naive_loss(participant.base, model, text, window)
        [loss] = [
            m["value"]
            for m in RunFolder(done.path).metrics()
            if (m["name"], m["client"]) == ("validation/loss", participant.name)
        ]
        assert loss == pytest.approx(expected, rel=1e-6)


def test_clients_whom_training_did_not_help_are_named(capsys) -> None:
    terminal.report_unhelped("local", {"kept": {"anna": 0, "ben": 3, "cyd": 0}})
    assert capsys.readouterr().out == (
        "Training with local did not help anna, cyd: no round scored better on the validation "
        "text than the untrained base, which was therefore kept.\n"
    )
    terminal.report_unhelped("local", {"kept": {"anna": 1}})
    terminal.report_unhelped("pretrained", {})
    assert capsys.readouterr().out == ""


def test_the_best_model_has_not_forgotten_its_base() -> None:
    learnt = Best(3, loss=1.0, accuracy=None, since=3, forgotten=0.5)
    assert Best(4, loss=1.2, accuracy=None, since=4, forgotten=0.1).order() < learnt.order()
    assert Best(4, loss=1.2, accuracy=None, since=4, forgotten=0.4).order() > learnt.order()
