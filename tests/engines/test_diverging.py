"""A client that diverges: its round goes on without it, and it keeps the state from before."""

import math
from collections.abc import Callable
from typing import Any

import diverging
import pytest
import torch
from diverging import ROUND, WHO
from every_method import FEW
from looped import NAMES, StopAfter, result_of

import coterie
from coterie.engines.client_host import AT_THE_END
from coterie.errors import Diverged
from coterie.messages import Message
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.methods.adapter import AdapterClient
from coterie.methods.fedmkt.distillation import Distiller
from coterie.runs import Callback, RunFolder
from coterie.testing import loop
from coterie.testing.loop import Loop, assert_as_local, assert_equal, deploy
from coterie.testing.rounds import joined
from coterie.turn import Turn


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)


@pytest.fixture
def broken(tmp_path, values, teachers) -> Any:
    return diverging.broken(values, teachers, tmp_path)


@pytest.mark.parametrize("last", [False, True], ids=["in training", "after it"])
@pytest.mark.parametrize("method", [*sorted(FEW), "local"])
def test_a_round_goes_on_without_a_client_that_diverges(method, last, broken, tmp_path) -> None:
    warned: list[str] = []

    class Warned(Callback):
        def on_warning(self, text: str) -> None:
            warned.extend([text] if text.startswith("Round") else [])

    run = broken(method, last=last)
    folder = RunFolder(coterie.run(run, out=tmp_path / "run", callbacks=[Warned()]).path)
    assert result_of(folder)["left_out"] == {WHO: {str(ROUND + 1): FAULT_MESSAGES["diverged"]}}
    assert warned == [f"Round {ROUND + 1} goes on without {WHO}: {FAULT_MESSAGES['diverged']}."]
    for side in loop.sides(folder):
        assert folder.load(side).is_finite()
    scored = [m for m in folder.metrics() if (m["client"], m["name"]) == (WHO, "test/trained")]
    assert {m["round"] for m in scored} == {0, 2}


def test_the_client_keeps_its_state_from_before_the_round(broken, tmp_path) -> None:
    """Let a client diverge in the last round, so that its state does not change afterwards."""
    run = broken("comigs-1g1s", rounds=2, evaluation={"keep": "last"})
    whole = RunFolder(coterie.run(run, out=tmp_path / "whole").path)
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "before", callbacks=[StopAfter()])
    before = RunFolder(tmp_path / "before")
    after, earlier = (folder.load(f"client-{WHO}") for folder in (whole, before))
    private = {part.name for part in _parts(run) if not run.method.shared(part)}
    assert private
    for name in private:
        assert torch.equal(after["adapter"][name], earlier["adapter"][name])
    assert_equal(after.parts["training"], earlier.parts["training"], WHO)
    after_it, before_it = (f.load("client-diarist").parts["training"] for f in (whole, before))
    with pytest.raises(AssertionError):
        assert_equal(after_it, before_it, "diarist")


def _parts(run: coterie.RunConfig) -> list[Any]:
    return [*joined(run).clients[WHO].parameters().values()]


@pytest.mark.parametrize("round", [0, 1])
def test_a_run_without_a_client_ends_with_a_sentence(round, broken, tmp_path) -> None:
    run = broken(when={(name, round) for name in NAMES})
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


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_numbers_in_an_upload_that_are_not_finite_exclude_it(value, config, tmp_path, monkeypatch):
    run = config(method="fedavg", rounds=2, aggregation={"weights": "tokens"})
    original = AdapterClient.upload

    def upload(self: AdapterClient, turn: Turn) -> Message:
        message = original(self, turn)
        bad = {"loss": [1.0, value]} if (self.context.name, turn.round) == (WHO, ROUND) else {}
        return Message(turn.exchange, message.groups, {**message.values, **bad})

    monkeypatch.setattr(AdapterClient, "upload", upload)
    result = result_of(RunFolder(coterie.run(run, out=tmp_path / "run").path))
    assert result["left_out"] == {WHO: {str(ROUND + 1): FAULT_MESSAGES["diverged"]}}


def spoil_distillation(when: Callable[[str, int], bool], monkeypatch: Any) -> None:
    """Replace the adapter of a side with NaN before it distils in a round."""
    original = Distiller.distil

    def distil(self: Distiller, round: int) -> float:
        if when(self.context.name, round):
            for part in self.adapter.parameters().values():
                part.tensor.data.fill_(torch.nan)
        return original(self, round)

    monkeypatch.setattr(Distiller, "distil", distil)


def test_a_server_s_own_model_that_diverges_is_a_sentence(teachers, tmp_path, monkeypatch) -> None:
    spoil_distillation(lambda side, _: side == "server", monkeypatch)
    run = teachers(rounds=1)
    why = "The loss of 'server' is not finite on the public samples; a lower "
    with pytest.raises(Diverged, match=why):
        coterie.run(run, out=tmp_path / "local")
    network = Loop(loop.workers(run, tmp_path))
    with pytest.raises(Diverged, match=why):
        loop.server(run, tmp_path / "server", network).rounds()
    assert all(worker.error for worker in network.workers.values())


def test_a_client_diverging_at_the_end_keeps_its_model(teachers, tmp_path, monkeypatch) -> None:
    spoil_distillation(lambda side, round: (side, round) == (WHO, 1), monkeypatch)
    run = teachers(rounds=1)
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    assert result_of(local)["left_out"] == {WHO: {"1": AT_THE_END}}
    scores = {m["name"]: m["value"] for m in local.metrics() if m["client"] == WHO}
    assert scores["test/aggregated"] == scores["test/trained"]
    assert local.load(f"client-{WHO}").is_finite()
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)
