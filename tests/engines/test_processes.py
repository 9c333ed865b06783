"""Baselines that are executed in other processes, beside the run."""

from pathlib import Path
from typing import Any

import pytest
from looped import StopAfter

import coterie
from coterie import CoterieError
from coterie.engines.processes import completing
from coterie.runs import RunFolder

BASELINES = ["pretrained", "local"]


def scores(path: Path) -> dict[str, Any]:
    """Return the results of a run and its baselines, without the seconds that they took."""
    folders = [path, *(path / "baselines" / name for name in BASELINES)]
    results = [RunFolder(folder).result or {} for folder in folders]
    return {result["method"]: {**result, "seconds": None} for result in results}


@pytest.mark.slow
def test_the_results_are_those_of_one_process_even_after_an_interruption(config, tmp_path) -> None:
    run = config(rounds=2, threads=1, baselines=BASELINES)
    expected = coterie.run(run, out=tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "more", jobs=3, callbacks=[StopAfter()])
    assert RunFolder(tmp_path / "more").turns() == 1
    lines: list[str] = []
    resumed = coterie.resume(tmp_path / "more", jobs=3, report=lines.append)
    assert scores(tmp_path / "more") == scores(tmp_path / "one")
    assert list(resumed.results) == list(expected.results)
    assert any(line.startswith("local: round 2/2") for line in lines)
    assert not any(line.startswith("comigs-1g1s") for line in lines)


@pytest.mark.slow
def test_a_baseline_that_fails_is_reported(tmp_path) -> None:
    report = r"The baseline missing failed: .*missing"
    with pytest.raises(CoterieError, match=report), completing([tmp_path / "missing"], 1):
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"jobs": 0}, "at least 1"),
        ({"jobs": 2, "engine": "ray"}, "leave out --engine"),
        ({"engine": "cluster"}, "choose one of local, ray"),
        ({"address": "localhost:6379"}, "--address and --gpus need the engine `ray`"),
        ({"gpus": 0.5}, "--address and --gpus need the engine `ray`"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, reason, config, tmp_path) -> None:
    with pytest.raises(CoterieError, match=reason):
        coterie.run(config(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
