"""A client that diverges: its round goes on without it, and it keeps the state from before."""

import math
from typing import Any

import pytest
import torch
from every_method import FEW, METHODS, run_of

import coterie
from coterie.config import plugins
from coterie.config.plugins import load_plugin
from coterie.engines.client_host import AT_THE_END
from coterie.errors import Diverged
from coterie.messages import Message
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.methods import registry
from coterie.methods.adapter import AdapterClient
from coterie.methods.fedmkt.distillation import Distiller
from coterie.runs import Callback, RunFolder
from coterie.testing import loop
from coterie.testing.loop import Loop, assert_as_local, assert_equal, assert_same_states, deploy
from coterie.testing.rounds import joined
from coterie.turn import Turn

WHO = "poet"
ROUND = 1
PLUGIN = """
import torch
from coterie.methods.registry import available

class Broken(available()[{base!r}]):
    name = "broken"

    def client(self, context):
        side = super().client(context)
        train = side.train

        def broken(turn):
            if {last}:
                train(turn)
            if (context.name, turn.round) in {when}:
                for part in side.parameters().values():
                    part.tensor.data.fill_(torch.nan)
            if not {last}:
                train(turn)

        side.train = broken
        return side
"""
EVERYBODY = ("diarist", "poet", "whaler")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(registry.METHODS, "registered", {})
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)


@pytest.fixture
def broken(tmp_path, values, teachers):
    """A run of a method in which parameters become NaN in some rounds of some clients.

    last: after their training, and not before it.
    """

    def make(
        method: str = "fedavg",
        when: set[tuple[str, int]] | None = None,
        last: bool = False,
        **changes: Any,
    ) -> coterie.RunConfig:
        settings, file = METHODS[method], tmp_path / "broken.py"
        whole = {"rounds": 3, "evaluation": {"every": 1}} | changes
        run = run_of(settings, values, teachers, **whole)
        when = {(WHO, ROUND)} if when is None else when
        file.write_text(PLUGIN.format(base=settings["name"], when=when, last=last))
        [kind] = load_plugin(file)
        return run.model_copy(update={"method": kind(**run.method.model_dump())})

    return make


def entries(folder: RunFolder) -> list[dict[str, Any]]:
    """All lines in order, without how long it took."""
    return [line for line in folder.metrics() if line["name"] != "seconds"]


@pytest.mark.parametrize("last", [False, True], ids=["in training", "after it"])
@pytest.mark.parametrize("method", [*sorted(FEW), "local"])
def test_a_round_goes_on_without_a_client_that_diverges(method, last, broken, tmp_path) -> None:
    warned: list[str] = []

    class Warned(Callback):
        def on_warning(self, text: str) -> None:
            warned.extend([text] if text.startswith("Round") else [])

    run = broken(method, last=last)
    folder = RunFolder(coterie.run(run, out=tmp_path / "run", callbacks=[Warned()]).path)
    assert folder.result is not None
    assert folder.result["left_out"] == {WHO: {str(ROUND + 1): FAULT_MESSAGES["diverged"]}}
    assert warned == [f"Round {ROUND + 1} goes on without {WHO}: {FAULT_MESSAGES['diverged']}."]
    for side in loop.sides(folder):
        assert folder.load(side).is_finite()
    scored = [m for m in folder.metrics() if (m["client"], m["name"]) == (WHO, "test/trained")]
    assert {m["round"] for m in scored} == {0, 2}


def test_the_client_keeps_its_state_from_before_the_round(broken, tmp_path) -> None:
    """Of the last round, so that nothing else happens to it; the others' states change."""
    run = broken("comigs-1g1s", rounds=2, evaluation={"keep": "last"})
    found = RunFolder(coterie.run(run, out=tmp_path / "whole").path)
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "before", callbacks=[stopping(1)])
    before = RunFolder(tmp_path / "before")
    mine, earlier = (folder.load(f"client-{WHO}") for folder in (found, before))
    private = {part.name for part in _parts(run) if not run.method.shared(part)}
    assert private
    for name in private:
        assert torch.equal(mine["adapter"][name], earlier["adapter"][name])
    assert_equal(mine.parts["training"], earlier.parts["training"], WHO)
    theirs, before_it = (f.load("client-diarist").parts["training"] for f in (found, before))
    with pytest.raises(AssertionError):
        assert_equal(theirs, before_it, "diarist")


def stopping(after: int) -> Callback:
    """Return what interrupts a run after some rounds."""

    class Stop(Callback):
        def on_round_end(self, round: int, scores: str) -> None:
            if round + 1 == after:
                raise KeyboardInterrupt

    return Stop()


def _parts(run: coterie.RunConfig) -> list[Any]:
    return [*joined(run).clients[WHO].parameters().values()]


@pytest.mark.parametrize("after", [1, 2], ids=["before it", "after it"])
def test_a_run_resumed_after_it_has_the_same_bits(after, broken, tmp_path) -> None:
    run = broken("comigs-1g1s", evaluation={"every": 1, "patience": 3})
    whole = RunFolder(coterie.run(run, out=tmp_path / "whole").path)
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "resumed", callbacks=[stopping(after)])
    resumed = RunFolder(coterie.resume(tmp_path / "resumed").path)
    assert_same_states(resumed, whole)
    assert entries(resumed) == entries(whole)


@pytest.mark.parametrize("method", sorted(FEW))
def test_a_deployment_has_the_same_bits(method, broken, tmp_path) -> None:
    run = broken(method)
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    network = deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)
    result = RunFolder(tmp_path / "server").result
    assert result is not None
    assert local.result is not None
    assert result["left_out"] == local.result["left_out"]
    asked = [name for name, order in network.orders if (order.kind, order.turn) == ("step", ROUND)]
    assert len(asked) == len({*asked})  # asking again would change nothing


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(FEW))
def test_the_engine_ray_has_the_same_bits(method, broken, tmp_path) -> None:
    run = broken(method)
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    done = coterie.run(run, out=tmp_path / "ray", engine="ray")
    assert_same_states(RunFolder(done.path), local)
    assert entries(RunFolder(done.path)) == entries(local)


@pytest.mark.parametrize("gone", [EVERYBODY[:1], EVERYBODY[:2]], ids=["one", "two"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_deployment_goes_on_with_those_who_remain(gone, first, broken, tmp_path) -> None:
    """In two rounds running, whatever the quorum, which is everybody."""
    run = broken(when={(name, round) for name in gone for round in (first, first + 1)})
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)


@pytest.mark.parametrize("round", [0, 1])
def test_a_run_without_a_client_ends_with_a_sentence(round, broken, tmp_path) -> None:
    run = broken(when={(name, round) for name in EVERYBODY})
    why = f"No client is left in round {round + 1}: the loss of 'diarist' is not finite at step "
    with pytest.raises(Diverged, match=why):
        coterie.run(run, out=tmp_path / "local")
    network = Loop(loop.workers(run, tmp_path))
    names = "the training of diarist, poet, whaler diverged"
    with pytest.raises(Diverged, match=f"No client is left in round {round + 1}: {names}") as error:
        loop.server(run, tmp_path / "server", network).rounds()
    assert "\n" not in str(error.value)
    for worker in network.workers.values():
        assert worker.finished
        assert worker.error == (
            "The server ended the run after an error; ask the server's operator for the cause."
        )
    assert RunFolder(tmp_path / "server").turns() == round


def test_a_client_that_always_diverges_stops_alike(broken, tmp_path) -> None:
    """It has gained nothing for as many rounds as `patience` says, though no upload counts."""
    when = {(WHO, round) for round in range(1, 9)}
    run = broken(when=when, rounds=5, evaluation={"every": 1, "patience": 2})
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    deploy(run, tmp_path)
    assert local.result is not None
    assert local.result["left_out"].keys() == {WHO}
    assert_as_local(run, tmp_path, local)


def test_trials_in_which_all_diverge_are_left_out(config, tmp_path) -> None:
    run = config(method="fedavg", rounds=1, training={"steps": 3, "batch": 2, "optimiser": "sgd"})
    tune = {"training.learning_rate": [1e-3, 1e30]}
    result = coterie.compare(run, [run.method], out=tmp_path, tune=tune)
    [chosen] = result.tuned.values()
    assert chosen["settings"] == {"training.learning_rate": 1e-3}
    assert chosen["trials"][1] == {"settings": {"training.learning_rate": 1e30}, "diverged": True}


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_numbers_in_an_upload_that_are_not_finite_exclude_it(value, config, tmp_path, monkeypatch):
    run = config(method="fedavg", rounds=2, aggregation={"weights": "tokens"})
    original = AdapterClient.upload

    def upload(self: AdapterClient, turn: Turn) -> Message:
        message = original(self, turn)
        bad = {"loss": [1.0, value]} if (self.context.name, turn.round) == (WHO, ROUND) else {}
        return Message(turn.exchange, message.groups, {**message.values, **bad})

    monkeypatch.setattr(AdapterClient, "upload", upload)
    result = RunFolder(coterie.run(run, out=tmp_path / "run").path).result
    assert result is not None
    assert result["left_out"] == {WHO: {str(ROUND + 1): FAULT_MESSAGES["diverged"]}}


def test_a_server_s_own_model_that_diverges_is_a_sentence(teachers, tmp_path, monkeypatch) -> None:
    original = Distiller.distil

    def distil(self: Distiller, round: int) -> float:
        if self.context.name == "server":
            for part in self.adapter.parameters().values():
                part.tensor.data.fill_(torch.nan)
        return original(self, round)

    monkeypatch.setattr(Distiller, "distil", distil)
    run = teachers(rounds=1)
    why = "The loss of 'server' is not finite on the public samples; a lower "
    with pytest.raises(Diverged, match=why):
        coterie.run(run, out=tmp_path / "local")
    network = Loop(loop.workers(run, tmp_path))
    with pytest.raises(Diverged, match=why):
        loop.server(run, tmp_path / "server", network).rounds()
    assert all(worker.error for worker in network.workers.values())


def test_a_client_that_diverges_on_the_last_download_keeps_its_model(
    teachers, tmp_path, monkeypatch
) -> None:
    original = Distiller.distil

    def distil(self: Distiller, round: int) -> float:
        if (self.context.name, round) == (WHO, 1):
            for part in self.adapter.parameters().values():
                part.tensor.data.fill_(torch.nan)
        return original(self, round)

    monkeypatch.setattr(Distiller, "distil", distil)
    run = teachers(rounds=1)
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    assert local.result is not None
    assert local.result["left_out"] == {WHO: {"1": AT_THE_END}}
    scores = {m["name"]: m["value"] for m in local.metrics() if m["client"] == WHO}
    assert scores["test/aggregated"] == scores["test/trained"]
    assert local.load(f"client-{WHO}").is_finite()
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)
