"""General questions to the models of a run: their scores, tables, and warnings of drift."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_assistant

import coterie
from coterie.analysis.benchmarks import GENERAL, evaluate
from coterie.cli.progress import drift_warning
from coterie.data.general import shipped
from coterie.inference import questions as module
from coterie.inference.models import RunModels
from coterie.inference.questions import Question, questions, says
from coterie.runs import RunFolder

FEW = (
    Question("What is the sea?", "blue", ("blue", "red and cold", "old"), True),
    Question("Who is old?", "red and cold", ("blue", "red and cold", "old"), True),
    Question("What is red?", "old", ("blue", "red and cold", "old"), False),
)


@pytest.fixture
def asked(monkeypatch) -> None:
    """Ask three questions instead of those that ship."""
    monkeypatch.setattr("coterie.analysis.benchmarks.questions", lambda: FEW)


@pytest.fixture(scope="module")
def assistants(chats, tmp_path_factory) -> dict[str, Any]:
    """A run on conversations, with a base that has a chat template of its own."""
    base = write_assistant(tmp_path_factory.mktemp("assistant") / "base")
    changes = {"base": base, "baselines": ["local"], "threads": 1}
    return {**chats, **changes, "training": {**chats["training"], "learning_rate": 0.003}}


def naive_choice(run: Path, client: str, question: Question) -> bool:
    """Return whether the right answer has the lowest loss per token."""
    tokenizer: Any = coterie.tokenizer(run, client)
    model = coterie.load(run, client)
    losses = []
    for choice in question.choices:
        prompt = f"{tokenizer.eos_token}User: {question.text}\nAssistant:"
        ids = torch.tensor([tokenizer(f"{prompt} {choice}{tokenizer.eos_token}").input_ids])
        start = len(tokenizer(prompt).input_ids)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(
                model(ids).logits[0, start - 1 : -1], ids[0, start:]
            )
        losses.append(loss.item())
    return losses.index(min(losses)) == question.choices.index(question.answer)


def test_scores_are_those_of_a_naive_version(chatted, asked, tmp_path) -> None:
    run = shutil.copytree(chatted, tmp_path / "run")
    [table] = evaluate(run, ["anna"], [GENERAL])
    method = RunModels(run).config.label
    stored = json.loads((run / "evaluations" / "anna" / method / "general.json").read_text("utf-8"))
    chosen, replied = (score["value"] for score in stored["scores"])
    assert chosen == sum(naive_choice(run, "anna", question) for question in FEW) / 3
    assert len(stored["replies"]) == 2
    right = [says(text, q.answer) for text, q in zip(stored["replies"], FEW, strict=False)]
    assert replied == sum(right) / 2
    assert {row[1] for row in table.rows[1:]} == {"right choices ↑", "right replies ↑"}


def test_the_shipped_questions_have_answers_among_choices() -> None:
    shown = questions()
    assert len(shown) == 100
    assert sum(question.is_free for question in shown) == 60
    assert len({question.text for question in shown}) == 100
    for question in shown:
        assert question.answer in question.choices
        assert len(question.choices) == len(set(question.choices)) >= 4
    trained = {
        text.request or text.text for held_out in (True, False) for text in shipped(held_out)
    }
    assert not trained & {question.text for question in shown}
    openings = {" ".join(question.text.split()[:4]) for question in shown}
    assert not {opening for opening in openings if any(str(t).startswith(opening) for t in trained)}


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("It is Paris.", True),
        ("PARIS", True),
        ("In Parisian style", False),
        ("the south-america trip", False),
        ("", False),
    ],
)
def test_a_reply_contains_the_answer_as_a_word(reply, right) -> None:
    assert says(reply, "Paris") == right
    assert says("in South America,", "South America")


def test_a_run_shows_what_assistants_have_kept(
    coterie_command, assistants, asked, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(module, "REPLY", 4)
    (tmp_path / "run.yaml").write_text(json.dumps(assistants), "utf-8")
    result = coterie_command("run", tmp_path / "run.yaml", "--out", tmp_path / "out", width=150)
    assert result.code == 0, result.err
    assert "General questions, which show what models have kept" in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert {"base", "local", "comigs-1g1s"} <= {row[0] for row in rows if len(row) > 2}
    [drift] = [row for row in rows if row[:1] == ["drift"]]
    outcome = RunFolder(tmp_path / "out").result or {}
    assert drift[-1] == f"{sum(outcome['drift'].values()) / 2:.2f}"
    quiet = ["--set", "evaluation.general=false", "--set", "training.replay=false"]
    result = coterie_command("run", tmp_path / "run.yaml", "--out", tmp_path / "off", *quiet)
    assert "General questions" not in result.out
    assert not [line for line in result.out.splitlines() if line.startswith("drift")]


def test_a_run_warns_of_drift(coterie_command, assistants, asked, tmp_path) -> None:
    training = {**assistants["training"], "learning_rate": 0.3, "replay": False}
    values = {**assistants, "training": training, "baselines": []}
    (tmp_path / "run.yaml").write_text(json.dumps(values), "utf-8")
    result = coterie_command("run", tmp_path / "run.yaml", "--out", tmp_path / "out", width=300)
    outcome = RunFolder(tmp_path / "out").result or {}
    assert outcome["drift"]["anna"] > 1
    assert drift_warning("anna", outcome["drift"]["anna"]) in result.err + result.out
