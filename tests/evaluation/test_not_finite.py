"""A model that gives no finite predictions: its scores are as bad as can be, and are numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.engines.session import Session
from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.perplexity import PERPLEXITY, WORST
from coterie.losses import tokens as loss
from coterie.messages import Json
from coterie.methods.adapter import AdapterClient
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, deploy
from coterie.turn import Turn

WHO = "poet"
BROKEN = [math.nan, math.inf]


def breaking(monkeypatch, value: float, when=lambda: True) -> None:
    """Let the loss of every token that is evaluated not be finite."""
    original = loss.token_losses

    def token_losses(*args: Any) -> torch.Tensor:
        losses = original(*args)
        return torch.full_like(losses, value) if when() else losses

    monkeypatch.setattr("coterie.evaluation.evaluate.token_losses", token_losses)
    monkeypatch.setattr("coterie.evaluation.answers.token_losses", token_losses)


def execute(config, folder: Path, rounds: int) -> list[RunFolder]:
    """Execute a run in one process and as a deployment, and return both folders."""
    deployment = {"quorum": 3, "deadline": 60, "share_metrics": True}
    run = config(method="fedavg", rounds=rounds, deployment=deployment)
    local = RunFolder(coterie.run(run, out=folder / "local").path)
    deploy(run, folder)
    assert_as_local(run, folder, local)
    return [local, RunFolder(folder / "server")]


@pytest.mark.parametrize("value", BROKEN, ids=str)
@pytest.mark.parametrize("kind", ["text", "instructions"])
def test_scores_are_the_worst_there_are(kind, value, values, answering, monkeypatch) -> None:
    session = Session(parse(values(**answering if kind == "instructions" else {})))
    [participant] = [p for p in session.participants(session.config) if p.name == WHO]
    assert participant.base is not None
    breaking(monkeypatch, value)
    for text in participant.tests.values():
        score = evaluate(participant.base, participant.base.model, text, 16)
        figures = score.as_dict()
        json.dumps(figures, allow_nan=False)
        json.dumps(score.items(), allow_nan=False)
        assert (figures["loss"], figures["perplexity"]) == (WORST, math.exp(700))
        assert figures.get("accuracy", 0) == 0


@pytest.mark.parametrize("value", BROKEN, ids=str)
def test_a_run_with_infinite_losses_has_a_result(value, config, tmp_path, monkeypatch) -> None:
    original, scoring = Tokens.measured, []

    def text(*args: Any) -> Any:
        scoring.append(1)
        try:
            return original(*args)
        finally:
            scoring.pop()

    monkeypatch.setattr(Tokens, "measured", text)
    breaking(monkeypatch, value, lambda: bool(scoring))
    for folder in execute(config, tmp_path, rounds=2):
        assert folder.result is not None
        assert "left_out" not in folder.result
        assert {s["perplexity"] for s in folder.result["trained"].values()} == {math.exp(700)}


def test_a_figure_that_is_not_finite_is_not_recorded(config, tmp_path, monkeypatch, caplog):
    original = AdapterClient.train

    def train(self: AdapterClient, turn: Turn) -> None:
        original(self, turn)
        figures: Json = {"mean": math.nan}
        self.context.log("mine", figures)
        self.context.log("trust", {"diarist": math.inf})

    monkeypatch.setattr(AdapterClient, "train", train)
    for folder in execute(config, tmp_path, rounds=1):
        names = {m["name"] for m in folder.metrics()}
        assert {"test/trained"} <= names
        assert not {"mine", "trust"} & names
    assert "the metric 'mine' of poet is not finite and is not recorded" in caplog.text


def test_a_cell_of_a_table_stays_short() -> None:
    assert PERPLEXITY.cell(math.exp(700)) == "1.01e+304"
    assert PERPLEXITY.cell(12345.678) == "12345.68"
