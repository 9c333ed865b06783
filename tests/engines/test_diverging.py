"""A client that diverges: its round goes on without it, and it keeps the state from before."""

import pytest
import torch

import coterie
from coterie.exchange.envelope import TOLD
from coterie.runs import RunFolder
from coterie.testing.loop import assert_equal
from coterie.training.update import Updater

WHO = "poet"


def broken(monkeypatch, rounds: range, steps: int) -> None:
    """Let a client's parameters become NaN in the first update of some rounds."""
    original, updates = Updater.update, {}

    def update(self, *args, **more):
        name = self.context.name
        number = updates[name] = updates.get(name, -1) + 1
        if name == WHO and number // steps in rounds:
            for parameter in self.parameters.values():
                parameter.data.fill_(torch.nan)
        return original(self, *args, **more)

    monkeypatch.setattr(Updater, "update", update)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_round_goes_on_without_a_client_that_diverges(
    config, tmp_path, monkeypatch, method
) -> None:
    run = config(method=method, rounds=1)
    broken(monkeypatch, range(1), 10**6)
    result = coterie.run(run, out=tmp_path / "run")
    folder = RunFolder(result.path)
    assert folder.result is not None
    assert folder.result["left_out"] == {WHO: {"1": TOLD["diverged"]}}
    assert folder.load(f"client-{WHO}").is_finite()
    assert folder.load("server").is_finite()


def test_the_state_is_from_before_the_round_and_a_resume_has_the_same_bits(
    config, tmp_path, monkeypatch
) -> None:
    run = config(method="fedavg", rounds=1, training={"steps": 1, "batch": 4})
    broken(monkeypatch, range(1), 10**6)
    first = RunFolder(coterie.run(run, out=tmp_path / "a").path)
    again = RunFolder(coterie.run(run, out=tmp_path / "b").path)
    for name in ("server", f"client-{WHO}"):
        assert_equal(first.load(name), again.load(name), name)
