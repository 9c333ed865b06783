"""Fixtures of the tests of bases."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import coterie
from coterie.config.run import RunConfig
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_states
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


@pytest.fixture
def resumed(
    killed_in_round: Callable[[int, RunConfig, Path], None], tmp_path: Path
) -> Callable[[RunConfig], RunFolder]:
    """A function that checks that a killed run resumes to the same bits; it returns the run."""

    def check(run: RunConfig) -> RunFolder:
        whole = RunFolder(coterie.run(run, out=tmp_path / "whole").path)
        killed_in_round(2, run, tmp_path / "again")
        coterie.resume(tmp_path / "again")
        assert_same_states(RunFolder(tmp_path / "again"), whole)
        return whole

    return check


@pytest.fixture
def folder(bases: Path, tmp_path: Path) -> Path:
    """A copy of the small GPT-2, which a test may damage."""
    return Path(shutil.copytree(bases / "gpt2", tmp_path / "base"))
