"""`coterie ask`, and the key `evaluation.questions`: the answers of a run's models side by side."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import speaker_of

import coterie.cli
from coterie.config.deployed import load_deployment, load_with_any_text
from coterie.config.run import parse
from coterie.evaluation.generation import Sampling
from coterie.inference import asking
from coterie.runs import RunFolder
from coterie.testing.small import teaching_values

QUESTIONS = ["Sea?", "Name a long river."]


def alone(run: Path, client: str | None) -> list[str]:
    """Return the answers in a chat with one model; None: the base without an adapter."""
    begin = speaker_of(run, client, "anna", Sampling(6))
    return [begin().answer(question, lambda _: None) for question in QUESTIONS]


def shown(name: str, text: str, column: int) -> str:
    """Return an answer as it should be printed if no line is too long."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no answer)"]
    return f"\n{' ' * column}".join([f"{name:<{column}}{lines[0]}", *lines[1:]])


def test_every_model_answers_every_question_once(coterie_command, chatted, monkeypatch) -> None:
    batches: list[tuple[int, int]] = []
    generate = asking.gated_answers

    def counted(gate: Any, base: Any, model: Any, examples: Any, *limits: int) -> list[str]:
        batches.append((len(examples), limits[1]))
        return generate(gate, base, model, examples, *limits)

    monkeypatch.setattr(asking, "gated_answers", counted)
    result = coterie_command("ask", chatted, *QUESTIONS, width=120)
    inner = chatted / "baselines"
    models = {
        "base": alone(chatted, None),
        "local: anna": alone(inner / "local", "anna"),
        "local: ben": alone(inner / "local", "ben"),
        "fedavg": alone(inner / "fedavg", "anna"),
        "centralized": alone(inner / "centralized", "everyone"),
        "comigs-1g1s: anna": alone(chatted, "anna"),
        "comigs-1g1s: ben": alone(chatted, "ben"),
    }
    assert alone(inner / "fedavg", "ben") == models["fedavg"]
    column = len("comigs-1g1s: anna") + 2
    expected = ""
    for n, question in enumerate(QUESTIONS):
        rows = (shown(name, texts[n], column) for name, texts in models.items())
        expected += "\n".join([f"\n{question}", *rows, ""])
    assert (result.code, result.out, result.err) == (0, expected, "")
    assert batches == [(2, 2)] * len(models)
    assert len({tuple(texts) for texts in models.values()}) == len(models)


def test_only_the_chosen_clients_answer(coterie_command, chatted) -> None:
    result = coterie_command("ask", chatted, "Sea?", "--client", "ben", "--tokens", 1)
    names = [line.partition("  ")[0] for line in result.out.splitlines()[2:] if line[0] != " "]
    assert names == ["base", "local: ben", "fedavg", "centralized", "comigs-1g1s: ben"]
    tokenizer = coterie.tokenizer(chatted)
    first = result.out.splitlines()[2].removeprefix("base").strip()
    assert first == "(no answer)" or len(tokenizer(first)["input_ids"]) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_long_answers_are_wrapped(coterie_command, chatted, monkeypatch, width) -> None:
    long = "word " * 40 + "\n\n  A second line, [bold]not markup[/bold]. \n" + "x" * 200

    monkeypatch.setattr(asking, "gated_answers", lambda *_: [long, ""])
    asked = ["So " * 60, *QUESTIONS[1:]]
    out = coterie_command("ask", chatted, *asked, "--client", "anna", width=width).out
    lines = out.splitlines()
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    assert width - 8 < max(map(len, lines))
    assert "\x1b" not in out
    column = len("comigs-1g1s: anna") + 2
    start = lines.index(next(line for line in lines if line.startswith("base")))
    assert " ".join(lines[1:start]) == " ".join(["So"] * 60)
    base = lines[start : next(n for n, line in enumerate(lines) if line.startswith("local"))]
    assert base[0].startswith("base" + " " * (column - 4) + "word word")
    assert all(line.startswith(" " * column) and line[column] != " " for line in base[1:])
    assert " " * column + "A second line, [bold]not markup[/bold]." in base
    assert "".join(line[column:] for line in base if "xxx" in line) == "x" * 200
    assert out.count("(no answer)") == 5


def test_a_question_fills_the_prompt_template(coterie_command, values, tmp_path) -> None:
    record = json.dumps({"instruction": "Is it so", "note": "?", "output": "yes"})
    (tmp_path / "poet.jsonl").write_text(f"{record}\n" * 12, encoding="utf-8")
    data = {"window": 60, "instructions": {"template": "{{ instruction }}{{ note }} Answer:"}}
    clients = [{"name": "poet", "path": "poet.jsonl"}]
    run = values(rounds=1, method="local", data=data, data_root=str(tmp_path), clients=clients)
    coterie.run(run, out=tmp_path / "run")
    file = tmp_path / "them.jsonl"
    file.write_text('{"question": "Sea", "note": "!"}\n', encoding="utf-8")
    result = coterie_command("ask", tmp_path / "run", "--questions", file, "--tokens", 6)
    fields = ["--client", "poet", "--field", "instruction=Sea", "--field", "note=!"]
    single = coterie_command("generate", tmp_path / "run", *fields, "--tokens", 6).out
    assert shown("local", single, len("local") + 2) in result.out


def test_a_run_shows_answers_at_its_end(coterie_command, chats, chatted, tmp_path) -> None:
    records = [{"question": question, "shown": question == "Sea?"} for question in QUESTIONS]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    file = Path(chats["data_root"]) / "them.jsonl"
    file.write_text(lines, encoding="utf-8")
    asked = {**chats, "evaluation": {**chats["evaluation"], "questions": "them.jsonl"}}
    (tmp_path / "mine.yaml").write_text(json.dumps(asked), encoding="utf-8")
    first = coterie_command("run", tmp_path / "mine.yaml", "--out", tmp_path / "run")
    expected = coterie_command("ask", chatted, "Sea?").out
    assert first.code == 0
    assert f"{expected}\nEach client's model on its own test text" in first.out
    assert "Name a long river." not in first.out
    assert coterie_command("run", "--resume", tmp_path / "run").out.startswith(expected)
    results = [RunFolder(run).result or {} for run in (chatted, tmp_path / "run")]
    for result in results:
        del result["seconds"]
    assert results[0] == results[1]
    assert parse(asked).digest() == parse(chats).digest()
    file.write_text('{"question": "Sea?"}\n', "utf-8")
    assert [record["question"] for record in asking.shown_questions(parse(asked))] == ["Sea?"]
    file.write_text('{"question": "", "shown": false}', "utf-8")
    refused = coterie_command("run", tmp_path / "mine.yaml", "--out", tmp_path / "refused")
    assert "the question is empty" in refused.err
    assert not (tmp_path / "refused").exists()


def test_the_key_is_refused_for_plain_text_and_ignored_in_deployments(chats, values) -> None:
    with pytest.raises(coterie.CoterieError, match=r"evaluation\.questions. needs answers"):
        parse(values(evaluation={"questions": "them.jsonl"}))
    evaluation = {**chats["evaluation"], "questions": "them.jsonl"}
    remote = {**chats, "clients": [{"name": "anna"}], "evaluation": evaluation}
    config = load_deployment(remote, ["anna"])
    assert "questions" not in config.visible_to("anna")["evaluation"]
    tried = load_with_any_text(remote)
    assert (tried.evaluation.questions, tried.evaluation.generate) == (None, None)


def test_owners_of_bases_answer(coterie_command, bases, other, questions, tmp_path) -> None:
    coterie.run(teaching_values(bases / "gpt2", other, questions, rounds=1), out=tmp_path / "run")

    def names(*more: str) -> list[str]:
        out = coterie_command("ask", tmp_path / "run", "Sea?", "--tokens", 3, *more, width=120).out
        return [line.partition("  ")[0] for line in out.splitlines()[2:] if line[0] != " "]

    owners = ("diarist", "poet", "server")
    assert names() == [f"{method}: {owner}" for method in ("base", "fedmkt") for owner in owners]
    assert names("--client", "server") == ["base: server", "fedmkt: server"]
