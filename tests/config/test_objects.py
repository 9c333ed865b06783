"""Transforms and metrics as objects in the values of a run, as methods can be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import coterie
from coterie import Callback, CoterieError, Metric, Transform
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.data.measured import Measured
from coterie.evaluation.metrics import METRICS
from coterie.evaluation.perplexity import Perplexity
from coterie.messages import Groups
from coterie.methods.averaging import FedAvg
from coterie.privacy import secrets
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_states
from coterie.transforms.reductions import Median, TrimmedMean

EXAMPLE = Path(__file__).parents[2] / "examples" / "transforms" / "median.py"


class Smaller(Transform):
    """Multiplies every mean."""

    name: ClassVar[str] = "smaller"
    summary: ClassVar[str] = "means times a factor"

    factor: float = 0.5

    def on_mean(self, mean: Groups, before: Groups, memory: Any) -> Groups:
        return {g: {n: t * self.factor for n, t in ts.items()} for g, ts in mean.items()}


class Nats(Metric):
    """The nats of a window."""

    name = "nats-per-window"
    title = "nats"
    higher = False
    share = False

    def score(self, measured: Measured) -> Sequence[float | None]:
        return measured.nats.tolist()


class Stop(Callback):
    def on_round_end(self, round: int, scores: str) -> None:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _same_secrets(monkeypatch) -> None:
    monkeypatch.setattr(secrets, "draw", lambda: 42)  # clients' secrets are part of their states


def with_transforms(values: Any, *transforms: Any, **changes: Any) -> coterie.RunConfig:
    aggregation = {"transforms": list(transforms), "largest_change": None}
    return parse(values(method="fedavg", rounds=2, aggregation=aggregation, **changes))


def test_an_object_is_the_transform_that_its_name_and_settings_are(values) -> None:
    given = with_transforms(values, TrimmedMean(trim=0.3))
    named = with_transforms(values, {"name": "trimmed_mean", "trim": 0.3})
    assert given == named
    assert given.digest() == named.digest()
    assert given.as_dict()["aggregation"]["transforms"] == [{"name": "trimmed_mean", "trim": 0.3}]
    assert with_transforms(values, Smaller(), "median").transforms == (Smaller(), Median())


def test_a_run_with_an_object_has_the_bits_of_the_registered_name(values, tmp_path) -> None:
    given = coterie.run(with_transforms(values, Smaller(factor=0.25)), out=tmp_path / "object")
    bare, own = with_transforms(values), [Smaller(factor=0.25)]
    keyword = coterie.run(bare, transforms=own, out=tmp_path / "keyword")
    plain = coterie.run(bare, out=tmp_path / "plain")
    coterie.register(Smaller)
    run = with_transforms(values, {"name": "smaller", "factor": 0.25})
    named = coterie.run(run, out=tmp_path / "named")
    for other in (keyword, named):
        assert_same_states(RunFolder(given.path), RunFolder(other.path))
    assert given.results["fedavg"]["trained"] != plain.results["fedavg"]["trained"]
    assert given.config.digest() == keyword.config.digest() == named.config.digest()


def test_settings_and_code_are_part_of_the_digest(values, monkeypatch) -> None:
    digests = [with_transforms(values, Smaller(factor=f)).digest() for f in (0.1, 0.1, 0.2)]
    assert digests[0] == digests[1] != digests[2]
    monkeypatch.setattr("coterie.config.run.version_of", lambda kind: kind.__name__ + "changed")
    assert with_transforms(values, Smaller(factor=0.1)).digest() != digests[0]


def test_a_run_needs_the_class_to_go_on(values, tmp_path) -> None:
    whole = coterie.run(with_transforms(values, Smaller()), out=tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        coterie.run(with_transforms(values, Smaller()), out=out, callbacks=[Stop()])
    with pytest.raises(CoterieError, match=r"no transform 'smaller'.*or coterie\.register"):
        coterie.resume(out)
    assert coterie.tokenizer(out).is_fast
    coterie.register(Smaller)
    coterie.resume(out)
    assert_same_states(RunFolder(out), RunFolder(whole.path))
    assert coterie.load(out, "poet")


def test_an_object_from_a_plugin_is_recorded(values, tmp_path) -> None:
    [kind] = load_plugin(EXAMPLE)
    run = coterie.run(with_transforms(values, kind()), out=tmp_path / "run")
    recorded = RunFolder(run.path).description["plugins"]["transform my_median"]
    assert recorded["file"] == str(EXAMPLE)


def test_tuning_keeps_objects(values, tmp_path) -> None:
    run = with_transforms(values, Smaller(factor=0.0))
    tune = {"training.learning_rate": [0.01, 0.02]}
    compared = coterie.compare(run, [FedAvg()], tune=tune, out=tmp_path)
    [result] = compared.results["fedavg"]
    rate = compared.tuned["fedavg"]["settings"]["training.learning_rate"]
    training = run.training.model_copy(update={"learning_rate": rate})
    tuned = run.model_copy(update={"method": FedAvg(), "training": training})
    single = coterie.run(tuned, out=tmp_path / "single")
    assert result["trained"] == single.results["fedavg"]["trained"]


def test_other_objects_are_refused(values) -> None:
    with pytest.raises(CoterieError, match=r"aggregation\.transforms: .* is not a transform"):
        with_transforms(values, FedAvg())
    with pytest.raises(CoterieError, match=r"aggregation\.transforms\[0\]"):
        with_transforms(values, Median)


def test_other_processes_cannot_import_them(values, tmp_path) -> None:
    pytest.importorskip("ray")
    for run, subject in (
        (with_transforms(values, Smaller()), "transform 'smaller'"),
        (parse(values(evaluation={"metric": Nats()})), "metric 'nats-per-window'"),
    ):
        with pytest.raises(CoterieError, match=f"cannot import the {subject}"):
            coterie.run(run, out=tmp_path / "run", engine="ray")


def test_a_metric_can_be_an_object(values, tmp_path) -> None:
    run = parse(values(method="local", rounds=1, evaluation={"metric": Nats(), "keep": "last"}))
    assert run.evaluation.metric == "nats-per-window"
    done = coterie.run(run, out=tmp_path / "run")
    assert "nats" in done.table().title
    for score in done.results["local"]["trained"].values():
        assert score["nats-per-window"] > 0
    assert parse(values(evaluation={"metric": Perplexity()})).evaluation.metric == "perplexity"
    METRICS.registered.clear()
    with pytest.raises(CoterieError, match=r"no metric 'nats-per-window'.*coterie\.register"):
        coterie.load(done.path, "poet")
