"""Devices that run out of memory during a run: the error messages, and how the run continues."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from looped import Killed, kill

import coterie
from coterie import CoterieError, RunConfig
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_as_local, assert_same_states, deploy, server, workers

AUTO: dict[str, Any] = {"name": "auto", "router": {"every": 2, "steps": 1}, "samples": 2}
PCL: dict[str, Any] = {"name": "pcl-3", "warmup": 1, "every": 1, "public_batches": 1}
HALVES = "training.micro_batch: 1 or base.weights: nf4"
SMALLER = "`base` to a smaller one or the LoRA rank to a smaller number"
FEDAVG, COBO = {"name": "fedavg"}, {"name": "cobo"}
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "training": (FEDAVG, "losses.tokens.language_model_loss"),
    "evaluation": (FEDAVG, "evaluation.evaluate.token_losses"),
    "trial": (AUTO, "methods.auto.client.sample_slopes"),
    "download": (FEDAVG, "methods.adapter.copy"),
    "upload": (PCL, "methods.pcl.strategies.top_logits"),
    "gradients": (COBO, "methods.cobo.sample_batch"),
    "contributions": (FEDAVG, "exchanges.exchange.Exchange._stored"),
    "aggregation": (FEDAVG, "methods.adapter.AdapterServer.aggregate"),
    "generation": (FEDAVG, "evaluation.gate.generate_answers"),
}
"""For each task: a method, and a function that the task calls."""
MESSAGES = {
    "training": "a training step; set training.micro_batch: 1",
    "evaluation": "the evaluation of '.*'; set evaluation.batch: 1 or base.weights: nf4",
    "trial": f"a download of '.*'; set {HALVES}",
    "download": f"a download of '.*'; set {HALVES}",
    "upload": f"(an upload|a download) of '.*'; set {HALVES}",
    "gradients": f"the local training of '.*'; set {HALVES}",
    "contributions": f"the aggregation; set {SMALLER}",
    "aggregation": f"the aggregation; set {SMALLER}",
    "generation": "the evaluation of '.*'; set evaluation.batch: 1",
}
"""The end of the error message of each task."""


class Full:
    """Replaces a function, counts its calls, and lets one of the calls run out of memory.

    Args:
        place: The function's dotted path.
        monkeypatch: The test's fixture.
        full: The number of the call that runs out of memory, counted from 1.
    """

    def __init__(self, place: str, monkeypatch: pytest.MonkeyPatch, full: int = 0) -> None:
        parent, _, name = place.rpartition(".")
        module, _, kind = parent.rpartition(".")
        owner: Any = getattr(import_module(module), kind) if kind[0].isupper() else None
        self.function = getattr(owner or import_module(parent), name)
        self.calls, self.full = 0, full

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return self.function(*arguments, **options)

        monkeypatch.setattr(place, call)


def run_of(task: str, config: Callable[..., RunConfig], questions: Path) -> RunConfig:
    """Return a run in which a task calls its function."""
    changes: dict[str, Any] = {"evaluation": {"every": 1}}
    if task == "generation":
        changes = {
            "data_root": str(questions),
            "data": {"window": 48, "instructions": {"template": "{{ instruction }}?"}},
            "clients": [{"name": n, "path": f"{n}.jsonl"} for n in ("diarist", "poet")],
            "evaluation": {"every": 1, "generate": 2},
        }
    run = config(method=PLACES[task][0], rounds=2, **changes)
    if task == "upload":
        run = run.model_copy(update={"data": run.data.model_copy(update={"public": "poet.txt"})})
    return run


Case = tuple[RunConfig, RunFolder, Full]


@pytest.fixture(scope="module")
def whole(config, questions, tmp_path_factory) -> Callable[[str], tuple[RunConfig, RunFolder, int]]:
    """The undisturbed run of a task, made once, and the number of calls of the task's function."""
    runs = {task: run_of(task, config, questions) for task in PLACES}
    made: dict[str, tuple[RunConfig, RunFolder, int]] = {}

    def make(task: str) -> tuple[RunConfig, RunFolder, int]:
        if task not in made:
            equal = [other for other in PLACES if runs[other] == runs[task]]
            with pytest.MonkeyPatch.context() as patch:
                counts = {other: Full(f"coterie.{PLACES[other][1]}", patch) for other in equal}
                done = coterie.run(runs[task], out=tmp_path_factory.mktemp("whole") / "run")
            for other, count in counts.items():
                made[other] = runs[task], RunFolder(done.path), count.calls
        return made[task]

    return make


@pytest.fixture
def case(task, whole, monkeypatch) -> Case:
    """A task's undisturbed run, and its function, whose middle call has too little memory."""
    run, expected, calls = whole(task)
    return run, expected, Full(f"coterie.{PLACES[task][1]}", monkeypatch, calls // 2 + 1)


@pytest.mark.parametrize("task", PLACES)
def test_a_run_goes_on_after_a_full_device(task, case: Case, tmp_path) -> None:
    run, expected, _ = case
    with pytest.raises(CoterieError, match=f"^The GPU has too little memory for {MESSAGES[task]}"):
        coterie.run(run, out=tmp_path / "run")
    complete = RunFolder(tmp_path / "run").turns()
    resumed = coterie.resume(tmp_path / "run")
    assert 0 < complete < run.exchanges
    assert_same_states(RunFolder(resumed.path), expected)


SERVER = ["contributions", "aggregation"]


@pytest.mark.parametrize("task", [task for task in PLACES if task not in SERVER])
def test_a_client_with_a_full_device_repeats_the_round(
    task, case: Case, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    run, expected, full = case
    deploy(run, tmp_path)
    assert full.calls > full.full
    assert [r for r in caplog.records if "The GPU has too little memory for" in r.getMessage()]
    assert_as_local(run, tmp_path, expected)


@pytest.mark.parametrize("task", SERVER)
def test_a_server_that_was_full_continues(task, case: Case, tmp_path) -> None:
    run, expected, _ = case
    network = Loop(workers(run, tmp_path))
    with pytest.raises(CoterieError, match=MESSAGES[task]):
        server(run, tmp_path / "server", network).rounds()
    network.pending.clear()
    server(run, tmp_path / "server", network).rounds()
    assert_as_local(run, tmp_path, expected)


def test_a_deployed_client_that_cannot_hold_the_base_leaves(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.server.GRACE", 0.0)
    run = config(method="fedavg", rounds=2, deployment={"quorum": 2, "deadline": 60})
    place = "coterie.bases.loading.AutoModelForCausalLM.from_pretrained"
    Full(place, monkeypatch, 2)
    network = Loop(workers(run, tmp_path))
    server(run, tmp_path / "server", network).rounds()
    [error] = [worker.error for worker in network.workers.values() if worker.error]
    sentence = f"The GPU has too little memory for the base {run.base}; set base.weights: nf4 or "
    assert error.startswith(sentence)
    assert RunFolder(tmp_path / "server").result is not None


def test_a_client_with_too_little_memory_says_what_helps(config, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    seen: list[tuple[str, object]] = []
    run = config()
    loop = Loop(workers(run, tmp_path), {5: kill})
    loop.workers["poet"].seen = lambda *event: seen.append(event)
    monkeypatch.setattr("coterie.losses.tokens.language_model_loss", full)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", loop).rounds()
    help = "training.micro_batch: 1 or training.checkpointing: true"
    fault = f"The machine has too little memory for a training step; set {help}."
    assert ("fault", fault) in seen
