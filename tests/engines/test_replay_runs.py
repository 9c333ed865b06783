"""Runs with replay: what replay changes, and what it leaves as it is."""

from typing import Any

import pytest
from every_method import each_method, run_of
from looped import NAMES

import coterie
from coterie.data.general import shipped
from coterie.runs import RunFolder

GENERAL = ({"request": "Hello"}, {"request": "Why?"}, {"text": "It rains."})
TRAINING: dict[str, Any] = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.005}
TRAINING["learning_rate_decay"] = 1.0


def recorded(name: str, folder: RunFolder) -> dict[tuple[str, int, str], Any]:
    lines = [line for line in folder.metrics() if line["name"].startswith(name)]
    return {(line["client"], line["round"], line["name"]): line["value"] for line in lines}


@pytest.fixture
def trained(config, talks, tmp_path):
    """Return a function that trains on conversations with some settings of replay."""

    def train(name: str, base: str | None = None, **replay: Any) -> RunFolder:
        run = config(
            **({} if base is None else {"base": base}),
            data_root=str(talks),
            data={"window": 40, "messages": True, "limits": {"validation": 3, "test": 3}},
            clients=[{"name": name, "path": f"{name}.jsonl"} for name in NAMES[:2]],
            method="fedavg",
            evaluation={"keep": "last"},
            rounds=4,
            training=TRAINING | {"replay": {"text": GENERAL} | replay},
        )
        return RunFolder(coterie.run(run, out=tmp_path / name).path)

    return train


def test_nothing_changes_before_replay_begins(trained) -> None:
    late, never = trained("late", start=0.5), trained("never", start=0.99)
    losses, without = recorded("loss/", late), recorded("loss/", never)
    early = {key for key in losses if key[1] < 2}
    assert early
    assert {key: losses[key] for key in early} == {key: without[key] for key in early}
    assert losses != without
    rounds = {round for _, round, _ in recorded("replay/", late)}
    assert rounds == {2, 3}


@pytest.mark.slow
def test_replay_lowers_drift(trained) -> None:
    texts = [text.model_dump() for text in shipped(held_out=False)[:30]]
    changes = {"base": "tiny-gpt2-2m", "start": 0, "text": texts, "samples": 8}
    runs = [trained(str(weight), weight=weight, **changes) for weight in (1e-9, 10.0)]
    off, on = ((run.result or {})["drift"] for run in runs)
    assert all(0 < on[name] < 0.8 * off[name] for name in NAMES[:2]), (on, off)


@pytest.mark.parametrize("method", each_method({"ditto", "fedmkt"}))
def test_every_method_has_replay(method, values, teachers, tmp_path) -> None:
    training = TRAINING | {"replay": {"text": GENERAL, "start": 0, "samples": 1}}
    evaluation = {"evaluation": {"keep": "last"}}
    run = run_of(method, values, teachers, training=training, **evaluation)
    folder = RunFolder(coterie.run(run, out=tmp_path / "run").path)
    drift = (folder.result or {})["drift"]
    assert len(drift) == len(folder.description["clients"])
    trains = bool(recorded("loss/", folder))
    assert bool(recorded("replay/", folder)) == trains
    assert trains or not any(drift.values())
