"""Gates of runs: who answers in every command, and what exports keep."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_assistant

import coterie
from coterie.cli.talk import speakers
from coterie.data.files import Record
from coterie.evaluation import gate as module
from coterie.evaluation.gate import GATE, Gate
from coterie.evaluation.generation import Sampling
from coterie.exports.format import NO_GATE
from coterie.inference.asking import answers
from coterie.inference.finished import Loader, load_bundle, recorded
from coterie.runs import RunFolder

OWN, OTHER = "So?", "Where is the sea?"
MODEL = "comigs-1g1s: anna"
Accept = Callable[[str], None]


@pytest.fixture
def accept(monkeypatch) -> Accept:
    """Return a function that lets all gates accept exactly the prompts that contain a text."""

    def allow(text: str) -> None:
        monkeypatch.setattr(
            Gate,
            "accepts",
            lambda self, base, prompts: [text in str(base.tokenizer.decode(p)) for p in prompts],
        )

    return allow


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A base that has a chat template of its own."""
    return write_assistant(tmp_path_factory.mktemp("assistant") / "base")


@pytest.fixture(scope="module")
def assistants(chats, base) -> dict[str, Any]:
    """A run whose clients have several validation prompts."""
    data = {**chats["data"], "fractions": {"validation": 0.25}}
    return {**chats, "base": base, "baselines": [], "threads": 1, "data": data}


@pytest.fixture(scope="module")
def gated(assistants, tmp_path_factory) -> Path:
    """A finished run whose clients have gates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MARGIN", -100)
        return coterie.run(assistants, out=tmp_path_factory.mktemp("gated") / "run").path


def asked(run: Path, *questions: str) -> dict[str, list[str]]:
    return answers(run, [Record("A test", {"question": q}) for q in questions], ["anna"], 6)


def test_the_base_answers_questions_unlike_the_clients(gated, accept) -> None:
    accept("")
    own = asked(gated, OWN, OTHER)
    assert all(own[MODEL][n] != own["base"][n] for n in (0, 1))
    accept("So?")
    assert asked(gated, OWN, OTHER)[MODEL] == [own[MODEL][0], own["base"][1]]
    for question, name in ((OWN, MODEL), (OTHER, "base")):
        speaker = speakers(gated, "anna", [], Sampling(6), None)["anna"]
        assert speaker.answer(question, lambda _: None) == own[name][[OWN, OTHER].index(question)]


def test_a_shared_model_has_one_answer_unless_gates_differ(
    assistants, accept, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(module, "MARGIN", -100)
    accept("")
    run = coterie.run({**assistants, "method": "fedavg"}, out=tmp_path / "run").path
    questions = [Record("A test", {"question": OWN})]
    assert [*answers(run, questions, tokens=6)] == ["base", "fedavg"]
    thresholds = count()
    of_clients = lambda *_: Gate(torch.zeros(1), float(next(thresholds)))  # noqa: E731
    monkeypatch.setattr(Gate, "restored", of_clients)
    monkeypatch.setattr(
        Gate, "accepts", lambda self, _, prompts: [bool(self.threshold)] * len(prompts)
    )
    assert [*answers(run, questions, tokens=6)] == ["base", "fedavg: anna", "fedavg: ben"]


def test_scores_and_drift_are_those_of_who_answers(
    assistants, accept, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(module, "MARGIN", -100)
    values = {**assistants, "baselines": ["pretrained"]}
    for text, equal in (("nothing", True), ("", False)):
        accept(text)
        run = coterie.run(values, out=tmp_path / f"run-{equal}")
        outcome = RunFolder(run.path).result or {}
        scores = run.results["pretrained"]["trained"]["anna"], outcome["trained"]["anna"]
        assert (scores[0]["perplexity"] == scores[1]["perplexity"]) == equal
        assert (outcome["drift"]["anna"] == 0) == equal


def test_a_client_keeps_its_gate_in_its_state(gated) -> None:
    folder = RunFolder(gated)
    loaded = Loader().load(folder, recorded(folder), "anna")
    stored = Gate.restored(folder.load("client-anna").parts[GATE], loaded.base)
    assert stored is not None
    assert loaded.gate is not None
    assert loaded.gate.digest == stored.digest
    uploads = (gated / "metrics.jsonl").read_text("utf-8")
    assert GATE not in {json.loads(line)["name"] for line in uploads.splitlines()}


def test_a_bundle_has_the_gate(gated, base, tmp_path) -> None:
    folder = RunFolder(gated)
    exported = coterie.export(gated, "anna", tmp_path / "bundle", format="bundle")
    assert NO_GATE not in exported.notes
    loaded, bundle = (
        Loader().load(folder, recorded(folder), "anna"),
        load_bundle(exported.path, base),
    )
    assert loaded.gate is not None
    assert bundle.gate is not None
    assert bundle.gate.digest == loaded.gate.digest


def test_instructions_are_answered_behind_the_gate(
    values, base, accept, coterie_command, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(module, "MARGIN", -100)
    record: Any = json.dumps({"instruction": OWN, "output": "sea"})
    (tmp_path / "anna.jsonl").write_text(f"{record}\n" * 12, encoding="utf-8")
    run = values(
        rounds=1,
        base=base,
        method="local",
        data={"window": 60, "instructions": {"template": "{{ instruction }} Answer:"}},
        data_root=str(tmp_path),
        clients=[{"name": "anna", "path": "anna.jsonl"}],
        training={"steps": 6, "batch": 2, "precision": "fp32", "learning_rate": 0.05},
        evaluation={"keep": "last"},
    )
    run["data"]["fractions"] = {"validation": 0.25}
    path = coterie.run(run, out=tmp_path / "run").path
    outputs = {}
    for text in ("", OWN):
        accept(text)
        command = ("generate", path, "--client", "anna", "--field", f"instruction={OTHER}")
        outputs[text] = coterie_command(*command, "--tokens", 5, "--temperature", 0).out
        [answer] = asked(path, OTHER)["local"]
        assert outputs[text].strip().startswith(answer.strip()[:3])
    assert outputs[""] != outputs[OWN]
