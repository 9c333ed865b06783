"""`coterie evaluate`: scores on tasks of lm-eval, compared with a naive version; the tables."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.analysis import benchmarks
from coterie.analysis.benchmarks import evaluate
from coterie.errors import CoterieError
from coterie.inference.harness import Harness
from coterie.inference.models import RunModels
from coterie.report.page import write_report
from coterie.runs import RunFolder

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
ROOT = Path(__file__).parents[2]
CHOICES = ["sea", "hill", "old house", "I do not know it"]
TASK = """
task: answers_of_anna
dataset_path: json
dataset_kwargs: {data_files: {test: TEST}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: CHOICES
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def chatted(chatted, tmp_path_factory) -> Path:
    """Return a copy: scores that are stored here would be shown by other modules' tests."""
    return shutil.copytree(chatted, tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Return a task of twelve questions with four possible answers each."""
    folder = tmp_path_factory.mktemp("task")
    rows = [{"question": f"What is {n}?", "answer": CHOICES[n % 4]} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    text = TASK.replace("TEST", str(folder / "rows.jsonl")).replace("CHOICES", json.dumps(CHOICES))
    (folder / "of-anna.yaml").write_text(text, "utf-8")
    return folder / "of-anna.yaml"


def naive(run: Path, client: str, method: str, limit: int = 12) -> float:
    """Return the share of questions whose right answer has the highest probability."""
    tokenizer: Any = coterie.tokenizer(run, client)
    model = next(each.model for each in RunModels(run).attached([client]) if each.method == method)
    right = 0
    for number in range(limit):
        turns = [{"role": "user", "content": f"What is {number}?"}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        start = tokenizer(prompt, add_special_tokens=False).input_ids
        sums = []
        for choice in CHOICES:
            ids = torch.tensor([tokenizer(prompt + choice, add_special_tokens=False).input_ids])
            with torch.no_grad():
                logits = model(ids).logits.log_softmax(-1)
            new = ids[0, len(start) :]
            sums.append(sum(logits[0, len(start) + n - 1, t].item() for n, t in enumerate(new)))
        right += sums.index(max(sums)) == number % 4
    return right / limit


def test_scores_are_those_of_a_naive_version(coterie_command, chatted, task, monkeypatch) -> None:
    scored: list[str] = []
    scores = Harness.scores

    def counted(self: Harness, name: str, model: Any, *rest: Any) -> Any:
        scored.append(name)
        return scores(self, name, model, *rest)

    monkeypatch.setattr(Harness, "scores", counted)
    words = ("evaluate", chatted, "--client", "anna", "--tasks", task, "--limit", 8)
    result = coterie_command(*words, width=140)
    assert result.code == 0, result.err
    assert scored == ["of-anna"] * 5
    assert result.err.splitlines()[0] == "Model 1 of 5: base: anna"
    assert result.err.count("\n") == 5
    methods = ["base", "local", "fedavg", "centralized", "comigs-1g1s"]
    expected = {method: naive(chatted, "anna", method, 8) for method in methods}
    for method in methods:
        file = chatted / "evaluations" / "anna" / method / "of-anna.json"
        assert json.loads(file.read_text("utf-8"))["scores"][0]["value"] == expected[method]
    assert len(set(expected.values())) > 1
    rows = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    gain = expected["local"] - expected["base"]
    assert f"({gain:+.4f})" in rows["answers_of_anna"]
    outcome = RunFolder(chatted).result or {}
    assert f"{outcome['trained']['anna']['perplexity']:.2f}" in rows["test"]

    scored.clear()
    assert (coterie_command(*words, width=140).out, scored) == (result.out, [])
    both = evaluate(chatted, ["anna", "ben"], [str(task)], limit=8)
    assert scored == ["of-anna"] * 2  # ben's models of `local` and of the run; the others are known
    assert [table.title.partition("'")[0] for table in both] == ["small: anna", "small: ben"]
    monkeypatch.setattr("coterie.report.style.Picture.render", lambda *_: b"")  # drawing is slow
    page = write_report([chatted], chatted / "report").page.read_text("utf-8")
    for row in (row for table in both for row in table.rows):
        assert all(cell in page for cell in row)


def test_an_interrupted_evaluation_is_kept(chatted, task, tmp_path, monkeypatch) -> None:
    other = tmp_path / "again.yaml"
    other.write_text(task.read_text("utf-8").replace("answers_of_anna", "again"), "utf-8")
    scored: list[str] = []

    def stopped(self: Harness, name: str, *_: Any) -> list[dict[str, Any]]:
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append(name)
        return []

    monkeypatch.setattr(Harness, "scores", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate(chatted, ["ben"], [str(task), str(other)], limit=3)
    scored.pop()  # one call more
    with pytest.raises(KeyboardInterrupt):
        evaluate(chatted, ["ben"], [str(task), str(other)], limit=3)
    assert scored == ["of-anna", "again", "again"]  # of the base twice; then of the next model


def test_mistakes_are_one_sentence(coterie_command, chatted, task, tmp_path, monkeypatch) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(task.read_text("utf-8").replace("rows.jsonl", "lost.jsonl"), "utf-8")
    words = ("evaluate", chatted, "--client")
    for client, tasks, sentence in [
        ("zed", task, "has no client 'zed' (clients: anna, ben, everyone)."),
        ("anna", tmp_path / "none.yaml", "--tasks: there is no file"),
        ("anna", ",", "names no task"),
        ("anna", broken, "The task 'broken' or its data cannot be loaded:"),
    ]:
        result = coterie_command(*words, client, "--tasks", tasks)
        assert result.code == 2
        assert sentence in result.err.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    result = coterie_command(*words, "anna", "--tasks", task)
    assert "pip install 'coterie[eval]'" in result.err
    monkeypatch.undo()
    with pytest.raises(CoterieError, match="at least one client"):
        benchmarks.evaluate(chatted, [], [str(task)])


def test_files_with_one_name_are_refused(coterie_command, chatted, task, tmp_path) -> None:
    for other in ("of-anna.yaml", "of-anna.yml", "Of-Anna.yaml"):
        (tmp_path / other).write_bytes(task.read_bytes())
        tasks = f"{task},{tmp_path / other}"
        result = coterie_command("evaluate", chatted, "--client", "anna", "--tasks", tasks)
        assert result.code == 2
        assert f"--tasks: {task} and {tmp_path / other} have the same name" in result.err
    with pytest.raises(CoterieError, match=r"of-anna and .*of-anna\.yaml have the same name"):
        Harness(["of-anna", str(task)])
    assert Harness([str(task), f"{task.parent}/./{task.name}"]).names == ["of-anna"]


def test_tasks_that_a_file_name_cannot_hold_are_kept_apart(chatted, monkeypatch) -> None:
    tasks_of_lm_eval = ["bertaqa-7b-v1", "bertaqa-7b-v1.1", "ulqa", "ulqa_"]
    names = [*tasks_of_lm_eval, "a|b", "a b", "."]
    monkeypatch.setattr(Harness, "__init__", lambda self, _: setattr(self, "names", names))
    monkeypatch.setattr(Harness, "digest", lambda *_: None)
    monkeypatch.setattr(Harness, "scores", lambda *_: [])
    evaluate(chatted, ["ben"], names)
    stored = chatted.glob("evaluations/ben/base/*.json")
    tasks = [json.loads(file.read_text("utf-8"))["task"] for file in stored]
    assert {name: tasks.count(name) for name in names} == dict.fromkeys(names, 1)


def test_files_that_define_one_task_have_a_row_each(chatted, task, tmp_path) -> None:
    easy = task.read_text("utf-8").replace("{{answer}}", "sea")
    easy = easy.replace(json.dumps(CHOICES), "[sea]")
    (tmp_path / "easy.yaml").write_text(easy, "utf-8")
    (table,) = evaluate(chatted, ["anna"], [str(task), str(tmp_path / "easy.yaml")], limit=6)
    cells = {row[0]: row[3] for row in table.rows if row[0].startswith("answers_of_anna")}
    assert list(cells) == ["answers_of_anna (easy)", "answers_of_anna (of-anna)"]
    for task_file, score in (("easy", 1), ("of-anna", naive(chatted, "anna", "base", 6))):
        assert cells[f"answers_of_anna ({task_file})"].startswith(f"{score:.4f}")


@pytest.mark.slow
def test_names_of_tasks_are_checked_and_need_the_hub(chatted) -> None:
    with pytest.raises(CoterieError, match=r"no task 'arc_eazy'\. Did you mean 'arc_easy'\?"):
        Harness(["arc_eazy"])
    command = [sys.executable, "-m", "coterie", "evaluate", str(chatted), "--client", "anna"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    words = [*command, "--tasks", "arc_easy"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("Error: The task 'arc_easy' or its data cannot be loaded:")
    assert "without a network, use a YAML file with local data" in lines[-1]


def test_the_example_of_the_page_works(succeeds, chatted, tmp_path, monkeypatch) -> None:
    page = (ROOT / "docs" / "use" / "use-a-model.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for language, name in (("yaml", "capitals.yaml"), ("json", "capitals.jsonl")):
        [text] = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        Path(name).write_text(text, encoding="utf-8")
    (command,) = re.findall(r"^coterie (.* capitals\.yaml)$", page, re.MULTILINE)
    out = succeeds(*command.replace("runs/us", str(chatted)).split(), width=160)
    row = next(line for line in out.splitlines() if line.startswith("capitals"))
    assert row.split()[1:4] == ["acc", "↑", "3"]


@pytest.mark.parametrize("method", ["fedprompt", "comigs-1g1s"])
def test_generated_answers_are_those_of_the_loaded_model(method, values, tmp_path) -> None:
    # The right answers of the task are the texts that the client's model generates.
    run = values(method=method, rounds=1, evaluation={"keep": "last"})
    coterie.run(run, out=tmp_path / "run")
    model: Any = coterie.load(tmp_path / "run", "poet")
    tokenizer = coterie.tokenizer(tmp_path / "run")
    rows = []
    for prompt in ("The sea", "I do not know what the old house was", "A hill"):
        inputs: Any = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        answer = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        rows.append({"question": prompt, "answer": answer})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    text = TASK.replace("TEST", str(tmp_path / "rows.jsonl"))
    text = text.replace("multiple_choice", "generate_until").replace("{metric: acc}", "{metric: M}")
    text = re.sub("doc_to_choice.*", "generation_kwargs: {until: [], max_gen_toks: 5}", text)
    (tmp_path / "say.yaml").write_text(text.replace("M}", "exact_match}"), "utf-8")
    (table,) = evaluate(tmp_path / "run", ["poet"], [str(tmp_path / "say.yaml")])
    assert table.rows[1][-1].startswith("1.0000")


def test_a_damaged_file_of_scores_is_reported(chatted, task) -> None:
    evaluate(chatted, ["ben"], [str(task)], limit=1)
    file = chatted / "evaluations" / "ben" / "base" / "of-anna.json"
    file.write_text(file.read_text("utf-8").replace('"higher"', '"lower"'), "utf-8")
    with pytest.raises(CoterieError, match=r"of-anna\.json is damaged"):
        evaluate(chatted, ["ben"], [str(task)], limit=1)
    file.unlink()
