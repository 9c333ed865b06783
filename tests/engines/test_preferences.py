"""Runs that learn preferences: what rewards are measured from, what is learnt, scored and kept."""

import json
import math
from typing import Any

import pytest
import torch
from every_method import AT_ONCE, BEHAVIOURS, METHODS, some
from looped import NAMES

import coterie
from coterie.config.deployed import load_deployment
from coterie.config.run import parse
from coterie.config.values import read_values
from coterie.data.kinds.preferences import Pairs
from coterie.errors import CoterieError
from coterie.evaluation.answers import answer_losses
from coterie.inference import kept
from coterie.methods.pretrained import bare
from coterie.methods.registry import available
from coterie.runs import RunFolder
from coterie.testing.rounds import joined
from coterie.turn import FIRST

TRAINING = {"steps": 6, "batch": 4, "precision": "fp32", "learning_rate": 0.02}
LEARNS = [name for name, kind in available().items() if kind.learns_preferences]
NOT_BASE = {
    *("fedprompt", "fedprompt-ft", "fedptuning", "fedptuning-ft"),
    *("fdlora", "feddpa", "rolora"),
}
"""Their clients' first step is not at the base: a prompt changes what is read, the shared
adapters of FDLoRA and FedDPA have learnt alone by then, and RoLoRA's A follows B."""
FEW = {"fedavg", "comigs-1g1s", "fedamole"}


@pytest.fixture
def run(values, opinions):
    """A run that learns preferences; keyword arguments replace keys."""

    def make(**changes: Any) -> coterie.RunConfig:
        whole: dict[str, Any] = {
            "method": "fedavg",
            "rounds": 2,
            "data_root": str(opinions),
            "data": {"window": 40, "preferences": True},
            "clients": [{"name": name, "path": f"{name}.jsonl"} for name in NAMES],
            "training": TRAINING,
        }
        return parse(values(**whole | changes))

    return make


def losses(folder: RunFolder, client: str, level: str) -> list[float]:
    return [
        m["value"]
        for m in folder.metrics()
        if (m["client"], m["name"]) == (client, f"loss/{level}")
    ]


@pytest.mark.parametrize(
    "name", some(FEW, [name for name in LEARNS if name != "pretrained"], BEHAVIOURS)
)
def test_a_methods_loss_falls(name, run, tmp_path) -> None:
    settings = {k: v for k, v in AT_ONCE.items() if k in available()[name].model_fields}
    done = coterie.run(run(method={"name": name} | settings, rounds=3), out=tmp_path / "run")
    folder = RunFolder(done.path)
    score = done.results[name]["trained"]["poet"]
    assert {"dpo_loss", "reward_margin", "reward_accuracy", "pairs"} <= score.keys()
    levels = {m["name"] for m in folder.metrics() if m["name"].startswith("loss/")}
    for level in (level.removeprefix("loss/") for level in levels):
        values = losses(folder, "poet", level)
        if name not in NOT_BASE:
            assert values[0] == pytest.approx(math.log(2), abs=1e-3)
        assert min(values) < values[0]
    steps = [m["value"] for m in folder.metrics() if m["name"].startswith("rewards/")]
    assert all(s["margin"] == pytest.approx(s["chosen"] - s["rejected"]) for s in steps)


@pytest.mark.parametrize("name", [name for name in available() if name not in LEARNS])
def test_a_method_that_learns_otherwise_is_refused(name, run, tmp_path) -> None:
    with pytest.raises(CoterieError, match=f"{name!r} cannot train on preferences"):
        coterie.run(run(method=name), out=tmp_path / "run")


def test_the_reference_is_the_base_without_its_adapter(run) -> None:
    local = joined(run(data={"window": 48, "preferences": True, "limits": {"test": 5}}))
    host = local.clients.host("poet")
    test = host.participant.tests["poet"]
    assert isinstance(test, Pairs)
    assert test is host.participant.data.test
    assert test.reference is not None
    assert test.reference.logprobs.shape == (5, 2)
    alone = -answer_losses(host.base, bare(host.base), test.rows, 1)
    torch.testing.assert_close(test.reference.logprobs.flatten(), alone, rtol=0, atol=1e-4)


def test_the_base_is_half_right_and_a_better_model_is_kept(run, tmp_path, monkeypatch) -> None:
    bests = []
    keep = kept.Keeper._keep
    monkeypatch.setattr(
        kept.Keeper,
        "_keep",
        lambda self, best, *rest: (bests.append(best), keep(self, best, *rest)),
    )
    evaluation = {"validation_samples": 3}
    done = coterie.run(run(method="local", evaluation=evaluation, rounds=8), out=tmp_path / "run")
    assert [(b.loss, b.accuracy) for b in bests if b.round == 0] == 3 * [(math.log(2), 0.5)]
    assert done.results["local"]["trained"]["poet"]["reward_accuracy"] == 1.0
    assert "reward accuracy" in str(done.table().title)
    bare_run = coterie.run(run(method="pretrained"), out=tmp_path / "bare")
    score = bare_run.results["pretrained"]["trained"]["poet"]
    assert (score["reward_accuracy"], score["reward_margin"]) == (0.5, 0.0)
    assert score["dpo_loss"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s"])
def test_an_untrained_adapter_is_half_right(method, precision, run, tmp_path) -> None:
    """Check accuracies where rewards differ from 0 only by rounding."""
    training = TRAINING | {
        "precision": precision,
        "learning_rate": 1e-30,
        "final_learning_rate": 1e-30,
    }
    changes = {"base": "tiny-gpt2", "rounds": 1, "evaluation": {"batch": 3}, "training": training}
    done = coterie.run(run(method=method, **changes), out=tmp_path / "run")
    for points in done.results[method].items():
        if points[0] in {"trained", "aggregated"}:
            assert {score["reward_accuracy"] for score in points[1].values()} == {0.5}
    steps = [m for m in RunFolder(done.path).metrics() if m["name"].startswith("rewards/")]
    assert {m["value"]["accuracy"] for m in steps} == {0.5}
    kept = [m["value"] for m in RunFolder(done.path).metrics() if m["name"] == "kept"]
    assert kept == 3 * [0]  # a tie keeps the earlier model


def test_averaging_costs_the_client_of_another_opinion(run, tmp_path) -> None:
    whole = run(baselines=["local"], evaluation={"keep": "last"}, rounds=3)
    done = coterie.run(whole, out=tmp_path / "run")
    share = {m: r["aggregated"]["whaler"]["reward_accuracy"] for m, r in done.results.items()}
    assert share["fedavg"] < 0.5 < share["local"]


def test_pieces_of_a_batch_learn_the_same(run) -> None:
    values = []
    for micro in (None, 1, 3):
        local = joined(run(method="local", training=TRAINING | {"micro_batch": micro, "steps": 1}))
        local.clients["poet"].train(FIRST)
        values.append(local.clients["poet"].state()["adapter"])
    for other in values[1:]:
        for name, tensor in values[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_reference_can_be_a_clients_model_of_an_earlier_run(run, tmp_path, other) -> None:
    last = {"evaluation": {"keep": "last"}, "rounds": 1}
    first = coterie.run(run(method="local", **last), out=tmp_path / "first")
    training = TRAINING | {"dpo": {"reference": str(first.path), "beta": 0.3}}
    again = run(method="local", training=training, **last)
    local = joined(again)
    pairs = local.clients.host("poet").participant.data.test
    assert isinstance(pairs, Pairs)
    assert pairs.reference is not None
    base = local.clients.host("poet").base
    wanted = -answer_losses(base, coterie.load(first.path, "poet"), pairs.rows, 1)
    torch.testing.assert_close(pairs.reference.logprobs.flatten(), wanted, rtol=0, atol=1e-4)
    done = coterie.run(again, out=tmp_path / "again")
    assert done.results["local"]["trained"]["poet"]["reward_accuracy"] >= 0
    (done.path / "result.json").unlink()
    coterie.run(run(method="local", seed=1, **last), out=first.path, force=True)
    with pytest.raises(CoterieError, match=r"dpo.reference names has changed since the run in"):
        coterie.resume(done.path)
    nowhere = training | {"dpo": {"reference": str(tmp_path / "nowhere")}}
    with pytest.raises(CoterieError, match=r"nowhere is not the folder of a run"):
        joined(run(training=nowhere))
    with pytest.raises(CoterieError, match="choose a run with the same base"):
        joined(run(base=other, training=training))


def test_a_deployment_has_no_earlier_run(run, tmp_path) -> None:
    described = run(training=TRAINING | {"dpo": {"reference": "runs/first"}}).as_dict()
    described["clients"] = [{"name": name} for name in NAMES]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(described))
    with pytest.raises(CoterieError, match=r"training\.dpo\.reference names the folder of a run"):
        load_deployment(read_values(file), NAMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"window": 48}, "training": {"dpo": {}}}, "no effect without data.preferences"),
        ({"training": {"dpo": {"beta": 0}}}, "greater than 0"),
        ({"training": {"dpo": {"label_smoothing": 0.5}}}, "less than 0.5"),
        ({"server": {}}, "`data.preferences` and `server` are mutually exclusive"),
        ({"evaluation": {"generate": 5}}, "needs answers"),
        ({"data": {"window": 48}, "evaluation": {"metric": "reward_accuracy"}}, "needs pairs"),
        ({"data": {"window": 48, "preferences": {"template": "x"}}}, "plain"),
    ],
)
def test_wrong_settings_are_told(changes, message, run) -> None:
    with pytest.raises(CoterieError, match=message):
        run(**changes)


def test_every_method_says_whether_it_learns_preferences() -> None:
    others = {"pcl-3", "fedmkt", "fedmkt-fedavg", "llm2slm"}
    assert {name for name in METHODS if name in available()} - set(LEARNS) == others
