"""The library: run, resume, compare, load."""

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from every_method import some

import coterie
from coterie import CoterieError
from coterie.config.run import parse
from coterie.engines.rounds import Rounds
from coterie.engines.session import Session
from coterie.evaluation.evaluate import evaluate
from coterie.methods.contract import Method
from coterie.methods.pretrained import PretrainedClient
from coterie.runs import RunFolder
from coterie.testing.contract import Stop


@pytest.fixture
def own_texts(texts, tmp_path) -> Path:
    """Texts that a test may change."""
    return Path(shutil.copytree(texts, tmp_path / "texts"))


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The label and seed of every run that is worked on."""
    labels: list[str] = []
    original = Rounds.run

    def run(self: Rounds) -> None:
        labels.append(f"{self.config.label}-{self.config.seed}")
        original(self)

    monkeypatch.setattr(Rounds, "run", run)
    return labels


def change(folder: Path, name: str) -> None:
    path = folder / f"{name}.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("the", "a"), encoding="utf-8")


@pytest.mark.slow
def test_dict_path_and_configuration_give_one_run(values, config, tmp_path, monkeypatch) -> None:
    run_file = tmp_path / "small.yaml"
    run_file.write_text(yaml.safe_dump(values(rounds=1)))
    monkeypatch.chdir(tmp_path)
    runs = [
        coterie.run(values(rounds=1)),
        coterie.run(run_file, out="a"),
        coterie.run(str(run_file), out=tmp_path / "b"),
        coterie.run(config(rounds=1), out="c"),
    ]
    assert runs[0].path == Path("runs/small")
    for other in runs[1:]:
        assert other.config == runs[0].config
        assert other.results["comigs-1g1s"]["trained"] == runs[0].results["comigs-1g1s"]["trained"]
    assert parse(RunFolder(Path("a")).description["config"]) == runs[0].config
    # Also from another folder, as relative paths were made absolute.
    monkeypatch.chdir(tmp_path.parent)
    assert coterie.resume(tmp_path / "runs" / "small").results == runs[0].results


def test_baselines_are_run_and_pretrained_scores_the_bare_base(config, tmp_path) -> None:
    changes = {"baselines": ["local", "pretrained"], "evaluation": {"keep": "last"}}
    run = coterie.run(config(rounds=1, **changes), out=tmp_path / "run")
    assert list(run.results) == ["local", "pretrained", "comigs-1g1s"]
    assert "| poet |" in (run.path / "table.md").read_text()
    session = Session(run.config)
    for participant in session.participants(run.config):
        bare = evaluate(session.base, session.base.model, participant.data.test, 16)
        scored = run.results["pretrained"]["trained"][participant.name]["perplexity"]
        assert scored == pytest.approx(bare.perplexity, rel=1e-6)
        assert run.results["local"]["trained"][participant.name]["perplexity"] != scored


@pytest.mark.parametrize(
    "change",
    [
        {"baselines": ["local", "fedavgg"]},
        {"baselines": ["local"], "method": {"name": "comigs-1g1s", "router": {"top_k": 5}}},
        {"method": {"name": "comigs-1g1s", "mlp": {"specialists": {"peot": 3, "others": 1}}}},
        {"data": {"window": 65}},
        {"base": "nowhere-at-all/"},
    ],
)
def test_what_cannot_run_is_refused_before_training(change, values, tmp_path, counted) -> None:
    with pytest.raises(CoterieError):
        coterie.run(values(**change), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert counted == []


def test_resuming_a_finished_run_only_gives_its_results(config, tmp_path, counted) -> None:
    run = coterie.run(config(rounds=1), out=tmp_path / "run")
    assert (coterie.resume(run.path).results, counted) == (run.results, ["comigs-1g1s-0"])
    with pytest.raises(CoterieError, match="already contains a run"):
        coterie.run(config(rounds=1), out=run.path)
    assert coterie.run(config(rounds=1), out=run.path, force=True).results.keys()
    assert len(counted) == 2


def test_a_comparison_runs_only_what_is_new(values, own_texts, tmp_path, counted) -> None:
    run = values(rounds=1, data_root=str(own_texts))
    out, lines = tmp_path / "compare", []
    coterie.compare(run, ["comigs-1g1s", "pretrained"], out=out)
    assert counted == ["comigs-1g1s-0", "pretrained-0"]
    more = coterie.compare(run, ["pretrained", "local"], seeds=2, out=out, report=lines.append)
    assert counted[2:] == ["local-0", "pretrained-1", "local-1"]
    assert lines == [
        "Run 1 of 4: pretrained-seed0 (already finished)",
        "Run 2 of 4: local-seed0",
        "Run 3 of 4: pretrained-seed1",
        "Run 4 of 4: local-seed1",
    ]
    assert [len(results) for results in more.results.values()] == [2, 2]
    assert "| local |" in (out / "compare.md").read_text()
    assert (out / "compare.json").exists()
    change(own_texts, "poet")
    changed = coterie.compare(run, ["pretrained"], out=out, report=lines.append)
    assert counted[5:] == ["pretrained-0"]
    assert lines[4:] == ["Run 1 of 1: pretrained-seed0 (repeated because the texts have changed)"]
    before, after = more.results["pretrained"][0], changed.results["pretrained"][0]
    assert before["trained"]["poet"] != after["trained"]["poet"]
    assert before["trained"]["whaler"] == after["trained"]["whaler"]


@pytest.mark.slow
def test_an_interrupted_comparison_is_continued(config, tmp_path, counted) -> None:
    out, methods = tmp_path / "compare", ["pretrained", "fedavg"]
    coterie.compare(config(), methods[:1], out=out)
    with pytest.raises(KeyboardInterrupt):
        coterie.compare(config(), methods, out=out, callbacks=[Stop()])
    assert RunFolder(next(out.glob("fedavg-*"))).turns() == 1
    continued = coterie.compare(config(), methods, out=out)
    assert counted == ["pretrained-0", "fedavg-0", "fedavg-0"]
    fresh = coterie.run(config(method="fedavg"), out=tmp_path / "fresh")
    assert continued.results["fedavg"][0]["trained"] == fresh.results["fedavg"]["trained"]


@pytest.mark.parametrize(
    "method", some({"comigs-1g1s"}, ["comigs-1g1s", "fedavg", "pretrained", "centralized"])
)
def test_a_loaded_model_has_the_recorded_score_and_writes(method, config, tmp_path) -> None:
    run = coterie.run(config(method=method), out=tmp_path / "run")
    result = run.results[method]
    session = Session(run.config)
    tests = [participant.tests for participant in session.participants(run.config)]
    tests = {name: tokens for texts in tests for name, tokens in texts.items()}
    for client in ("poet", "whaler"):
        model = coterie.load(run.path, client)
        score = evaluate(session.base, model, tests[client], run.config.data.window)
        recorded = result[result["reports"]][client]["perplexity"]
        assert score.perplexity == pytest.approx(recorded, rel=1e-4)
    words: Any = coterie.tokenizer(run.path)
    ids = words("I sing of", return_tensors="pt")["input_ids"]
    written = cast(Any, model).generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(written[:, : ids.shape[1]], ids)
    assert written.shape[1] > ids.shape[1]
    if method != "centralized":
        with pytest.raises(CoterieError, match=r"no client 'zed' .clients: diarist, poet, whaler"):
            coterie.load(run.path, "zed")


class Unregistered(Method):
    name = "unregistered"
    summary = "the base alone"

    def client(self, context):
        return PretrainedClient(context)


def test_a_method_that_is_not_registered_can_be_resumed_and_loaded(config, tmp_path) -> None:
    method, out = Unregistered(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        coterie.run(config(), method=method, out=out, callbacks=[Stop()])
    with pytest.raises(CoterieError, match="no method 'unregistered'"):
        coterie.resume(out)
    run = coterie.resume(out, method=method)
    assert list(run.results) == ["unregistered"]
    assert type(run.model("poet")) is type(coterie.load(out, "poet", method=method))
    assert coterie.tokenizer(out).is_fast


def test_a_base_that_is_nowhere_is_refused_without_waiting(config, tmp_path, monkeypatch) -> None:
    def unreachable(self, name: str, timeout: float) -> None:
        raise ConnectionError("no route")

    def sleep(seconds: float) -> None:
        raise AssertionError("nobody waits")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(CoterieError, match="set `base` to a GGUF file or to a folder with"):
        coterie.run(config(base="nowhere"), out=tmp_path / "run")


def test_a_baseline_that_is_the_runs_own_method_is_run_once(config, tmp_path) -> None:
    both = config(method="local", baselines=["pretrained", "local"])
    run = coterie.run(both, out=tmp_path / "run")
    assert list(run.results) == ["pretrained", "local"]
    assert not (run.path / "baselines" / "local").exists()
