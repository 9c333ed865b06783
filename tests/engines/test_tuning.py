"""Tuning: every method has the same trials, on validation text, and the best is run."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import coterie
from coterie import CoterieError
from coterie.analysis.cells import Tuner
from coterie.cli import app
from coterie.engines import client_host as part
from coterie.engines.rounds import Rounds
from coterie.engines.session import Session
from coterie.methods.contract import Method
from coterie.runs import Callback, RunFolder, RunStart

RATE = "training.learning_rate"


@pytest.fixture
def counted(monkeypatch) -> list[tuple[str, str, float, int]]:
    """Name, split, learning rate and seed of every run that is worked on."""
    runs: list[tuple[str, str, float, int]] = []
    original = Rounds.run

    def run(self: Rounds) -> None:
        config = self.config
        rate = config.training.learning_rate
        runs.append((config.name, config.evaluation.split, rate, config.seed))
        original(self)

    monkeypatch.setattr(Rounds, "run", run)
    return runs


def chosen_by_hand(folder: Path, method: str) -> float:
    """Return the learning rate of the trial with the lowest mean perplexity in the folders."""
    means: dict[float, float] = {}
    for path in (folder / "trials").glob(f"{method}-trial*"):
        trial = RunFolder(path)
        result, config = trial.result or {}, trial.description["config"]
        assert config["evaluation"]["split"] == "validation"
        scores = result[result["reports"]].values()
        means[config["training"]["learning_rate"]] = fmean(s["perplexity"] for s in scores)
    assert len(set(means.values())) == 2
    return min(means, key=means.__getitem__)


@pytest.mark.slow
def test_each_method_is_run_with_its_best_trial(config, tmp_path, counted) -> None:
    data = {"window": 16, "limits": {"train": 500, "validation": 64, "test": 64}}
    run, rates = config(rounds=1, seed=4, data=data), [1e-4, 3e-2]
    lines: list[str] = []
    rows = ["pretrained", "local", "fedavg"]
    comparison = coterie.compare(
        run, rows, seeds=2, tune={RATE: rates}, out=tmp_path, report=lines.append
    )
    trials = [
        (f"{name}-trial{n}", "validation", rate, 4)
        for name in rows[1:]
        for n, rate in enumerate(rates, 1)
    ]
    best = {name: chosen_by_hand(tmp_path, name) for name in rows[1:]}
    best["pretrained"] = run.training.learning_rate  # there is nothing to tune
    finals = [(f"{name}-seed{seed}", "test", best[name], seed) for seed in (4, 5) for name in rows]
    assert counted == [*trials, *finals]
    named = {
        name: f"{name}: {name.partition('-')[0]} with {RATE} = {rate}"
        for name, _, rate, _ in trials
    }
    assert lines == [
        line
        for n, (name, *_) in enumerate(counted, 1)
        for line in ([named[name]] if name in named else []) + [f"Run {n} of 10: {name}"]
    ]
    summary = {row["method"]: row for row in json.loads((tmp_path / "compare.json").read_text())}
    assert "tuned" not in summary["pretrained"]
    for name in rows[1:]:
        tuned = summary[name]["tuned"]
        assert (tuned["settings"], tuned["seed"]) == ({RATE: best[name]}, 4)
        assert [trial["settings"][RATE] for trial in tuned["trials"]] == rates
        least = min(tuned["trials"], key=lambda trial: trial["perplexity"])
        assert least["settings"] == tuned["settings"]
    table = comparison.table()
    assert [row[table.columns.index(RATE)] for row in table.rows][1:] == [
        str(best[name]) for name in rows[1:]
    ]
    coterie.compare(run, rows, seeds=2, tune={RATE: rates}, out=tmp_path)
    assert len(counted) == 10  # all found again


def test_trials_never_look_at_the_test_text(config, tmp_path, monkeypatch) -> None:
    run, looked = config(rounds=1, evaluation={"keep": "last"}), []
    original = part.evaluate

    def evaluate(base: Any, model: Any, tokens: Any, *rest: Any) -> Any:
        looked.append(tokens.ids.tolist())
        return original(base, model, tokens, *rest)

    monkeypatch.setattr(part, "evaluate", evaluate)
    coterie.compare(run, ["local"], tune={RATE: [1e-3, 1e-2]}, out=tmp_path)
    data = [client.data for client in Session(run).participants(run)]
    validation, test = ([getattr(d, s).ids.tolist() for d in data] for s in ("validation", "test"))
    assert looked == [*validation, *validation, *test]


def test_several_keys_make_a_grid_and_ties_go_to_the_first(config, tmp_path) -> None:
    tune = {"method.mlp.rank": [2, 3], "rounds": [1], "evaluation.every": [1]}
    with pytest.raises(CoterieError, match=r"evaluation\.every cannot be tuned; choose from"):
        coterie.compare(config(), ["fedavg"], tune=tune, out=tmp_path)
    # At a rate of next to nothing, all trials score the same.
    training = config().training.model_dump() | {"learning_rate": 1e-30}
    run = config(training=training | {"final_learning_rate": 0})
    tune = {"method.mlp.rank": [2, 3], "rounds": [2, 1]}
    (row,) = coterie.compare(run, ["fedavg"], tune=tune, out=tmp_path).summary()
    settings = [trial["settings"] for trial in row["tuned"]["trials"]]
    grid = [(2, 2), (2, 1), (3, 2), (3, 1)]
    assert [(s["method.mlp.rank"], s["rounds"]) for s in settings] == grid
    assert row["tuned"]["settings"] == settings[0]


def test_a_trial_that_diverges_is_left_out(config, tmp_path) -> None:
    lines: list[str] = []
    run = config(rounds=1, training={"steps": 3, "batch": 2, "optimiser": "sgd"})
    tune, out = {RATE: [1e30, 1e-3]}, tmp_path / "a"
    comparison = coterie.compare(run, ["fedavg"], tune=tune, out=out, report=lines.append)
    tuned = comparison.summary()[0]["tuned"]
    assert tuned["settings"] == {RATE: 1e-3}
    assert tuned["trials"][0] == {"settings": {RATE: 1e30}, "diverged": True}
    assert any("is not finite" in line and "This trial is ignored." in line for line in lines)
    with pytest.raises(CoterieError, match="All trials of fedavg diverged"):
        coterie.compare(run, ["fedavg"], tune={RATE: [1e30]}, out=tmp_path / "b")


class StopAtSecondTrial(Callback):
    begun = 0

    def on_run_begin(self, run: RunStart) -> None:
        self.begun += 1
        if self.begun == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_tuning_is_continued(config, tmp_path, counted) -> None:
    run, tune = config(rounds=1), {RATE: [1e-3, 1e-2]}
    with pytest.raises(KeyboardInterrupt):
        coterie.compare(run, ["local"], tune=tune, out=tmp_path, callbacks=[StopAtSecondTrial()])
    coterie.compare(run, ["local"], tune=tune, out=tmp_path)
    names = [name for name, *_ in counted]
    assert names == ["local-trial1", "local-trial2", "local-trial2", "local-seed0"]


class Unregistered(Method):
    name = "unregistered"
    summary = "the base alone"


def test_any_row_can_be_tuned_that_has_the_keys(config) -> None:
    tuner = Tuner(Session(config()), {"training.batch": [3, 4]})
    for method in (Unregistered(), "centralized", "local", config().method):
        row = config().with_method(method)
        trials = tuner.trials("a row", row)
        assert [trial.training.batch for trial in trials] == [3, 4]
        for trial in trials:
            assert (trial.label, trial.pooled) == (row.label, row.pooled)
            assert (trial.method, trial.name[:6]) == (row.method, "a-row-")


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("training.learning_rate", "is not a key with values, such as"),
        ("training.learning_rate=", "is not a key with values"),
        ("training.learning_rate=[1,", "is not a key with values"),
        ("training.lerning_rate=1", r"Did you mean 'training\.learning_rate'\?"),
        ("training.learning_rate=1,fast", r"training\.learning_rate should be a number"),
        ("data.window=8,16", r"data\.window cannot be tuned"),
        ("training.precision=bf16", r"training\.precision cannot be tuned"),
        ("method=local", "method cannot be tuned"),
        ("seed=1,2", "seed cannot be tuned"),
        (
            "method.mlp.rang=4",
            "^local cannot be tuned with these values: Unknown key 'method.mlp.rang'",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(option, sentence, values, tmp_path, counted) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values()))
    words = ["compare", str(file), "--methods", "local", "--out", str(tmp_path / "out")]
    with pytest.raises(CoterieError, match=sentence):
        CliRunner().invoke(app, [*words, "--tune", option], catch_exceptions=False)
    assert counted == []


def test_tuning_needs_the_validation_text_for_itself(config, tmp_path) -> None:
    run = config(evaluation={"split": "validation"})
    with pytest.raises(CoterieError, match=r"remove evaluation\.split"):
        coterie.compare(run, ["local"], tune={RATE: [1.0]}, out=tmp_path)
