"""The pages tell the truth: their code runs, their links lead somewhere."""

import ast
import csv
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import coterie
from coterie.config.plugins import load_plugin
from coterie.evaluation.metrics import METRICS
from coterie.methods.adapter import copied
from coterie.runs import RunFolder, RunStart
from coterie.testing.rounds import joined, one_round

ROOT = Path(__file__).parent.parent
PAGES = [path for name in ("docs", "papers") for path in (ROOT / name).rglob("*.md")]
PAGES = [ROOT / "README.md", *sorted(PAGES)]


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "develop" / "add-a-method.md").read_text(encoding="utf-8")
    first, *_, biases, part, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert first == (ROOT / "examples" / "fedsa_lora.py").read_text(encoding="utf-8")
    assert biases == (ROOT / "examples" / "biases.py").read_text(encoding="utf-8")
    part = indent(part, "    ").replace("\n\n\n", "\n\n")  # two methods of a class
    assert part in (ROOT / "src/coterie/methods/factors.py").read_text(encoding="utf-8")


def test_the_example_of_freezing_runs(config) -> None:
    page = (ROOT / "docs" / "develop" / "add-a-method.md").read_text(encoding="utf-8")
    *_, code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    run = joined(config(method=names["OneStep"](), rounds=2))
    client, server = run.clients["poet"], cast("Any", run.server)
    for exchange in range(2):
        before = {name: copied(tensors) for name, tensors in tensors_of(client, run).items()}
        run.open(run.config.turn(exchange), sorted(run.clients))
        expected = server.expects(run.value, "poet", run.exchange)["adapter"]
        assert expected.keys() == one_round(run, exchange)["poet"]["adapter"].keys()
        parameters = server.parameters
        assert {parameters[name].factor for name in expected} == {"B"}
        after = tensors_of(client, run)
        for name, parameter in parameters.items():
            stays = parameter.factor == "A"
            assert torch.equal(before["client"][name], after["client"][name]) == stays
            stays = stays or (exchange == 0 and parameter.layer == 0)
            assert torch.equal(before["server"][name], after["server"][name]) == stays


def tensors_of(client: Any, run: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {"client": client.adapter.tensors(), "server": run.value.adapter}


def test_the_page_on_metrics_and_data_shows_the_examples_and_runs(monkeypatch, capsys) -> None:
    page = (ROOT / "docs" / "develop" / "metrics-and-data.md").read_text(encoding="utf-8")
    example, use, kind = (part.split("```")[0] for part in page.split("```python\n")[1:])
    assert kind == (ROOT / "examples" / "ranked.py").read_text(encoding="utf-8")
    file = ROOT / "examples" / "distinct2.py"
    assert example == file.read_text(encoding="utf-8")
    monkeypatch.setattr(METRICS, "registered", {})
    load_plugin(file)
    exec(use, {})
    assert f"# {capsys.readouterr().out}" == use.splitlines(keepends=True)[-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize(("threshold", "rounds"), [("0.0", 2), ("100.0", 1)])
def test_the_example_of_callbacks(threshold, rounds, values, tmp_path, monkeypatch, capsys) -> None:
    page = (ROOT / "docs" / "use" / "python.md").read_text(encoding="utf-8")
    [code] = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "callbacks=" in c]
    monkeypatch.chdir(tmp_path)
    code = code.replace('"us.yaml"', "CONFIG").replace("threshold=2.0", f"threshold={threshold}")
    exec(code, {"CONFIG": values(method="local", rounds=2), "__name__": "example"})
    assert ("stopped" in capsys.readouterr().out) == (rounds == 1)
    run = RunFolder(Path("runs/us"))
    assert run.turns() == rounds
    rows = list(csv.DictReader(Path("losses.csv").read_text().splitlines()))
    losses = [line for line in run.metrics() if line["name"].startswith("loss/")]
    assert rows == [{key: str(line[key]) for key in rows[0]} for line in losses]
    assert {row["round"] for row in rows} == set(map(str, range(rounds)))


def test_the_page_lists_every_hook() -> None:
    page = (ROOT / "docs" / "use" / "python.md").read_text(encoding="utf-8")
    hooks = {
        f"{name}({', '.join([*signature(hook).parameters][1:])})"
        for name, hook in vars(coterie.Callback).items()
        if name.startswith("on_")
    }
    assert set(re.findall(r"^\| `(on_.*?)`", page, re.MULTILINE)) == hooks
    described = re.search(r"`run` has (.*?) \|", page)
    assert re.findall(r"`(\w+)`", described[1]) == [field.name for field in fields(RunStart)]


@pytest.mark.parametrize("method", ["local", "comigs-1g1s", "fedit"])
def test_the_lm_eval_example_scores_a_model(method, values, tmp_path, monkeypatch, capsys) -> None:
    """Score two texts instead of the example's task, whose data are on the hub."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    page = (ROOT / "docs" / "use" / "use-a-model.md").read_text(encoding="utf-8")
    _, first, *_, code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    def simple_evaluate(model: Any, tasks: list[str]) -> dict[str, Any]:
        texts = [SimpleNamespace(args=pair) for pair in (("The sea", " is wide"), ("Call", " me"))]
        alone, batch = (
            [score for request in requests for score, _ in model.loglikelihood(request)]
            for requests in ([[text] for text in texts], [texts])
        )
        return {"results": {"alone": alone, "batch": batch}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)
    monkeypatch.chdir(tmp_path)
    coterie.run(values(method=method, rounds=1), out="runs/us")
    capsys.readouterr()
    first = first.replace("runs/writers", "runs/us").replace("whaler", "poet")
    exec(first + code, {"coterie": coterie})
    losses = ast.literal_eval(capsys.readouterr().out)
    assert losses["batch"] == pytest.approx(losses["alone"], rel=1e-4)
