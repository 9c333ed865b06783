"""What this room's tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

import coterie
from coterie.config.run import RunConfig
from coterie.runs import RunFolder
from coterie.training.local import LocalTraining


@pytest.fixture
def killed_in_round(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, RunConfig, Path], None]:
    """Begin a run that ends, as by a kill, when a client is to train in a round (from 1)."""

    def kill(last: int, run: RunConfig, out: Path) -> None:
        train = LocalTraining.run

        def killed(self: LocalTraining, round: int) -> None:
            if round == last - 1:
                raise KeyboardInterrupt
            train(self, round)

        with monkeypatch.context() as patch:
            patch.setattr(LocalTraining, "run", killed)
            with pytest.raises(KeyboardInterrupt):
                coterie.run(run, out=out)
        assert RunFolder(out).turns() == last - 1

    return kill
