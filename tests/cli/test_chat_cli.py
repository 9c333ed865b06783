"""`coterie chat`: with a client's model in the terminal, and others beside it."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import Said, speaker_of

import coterie.cli
from coterie.cli import talk
from coterie.data.chat import chat_template
from coterie.data.items import Conversation, Turn
from coterie.evaluation.generation import Sampling
from coterie.inference.finished import Loader, recorded
from coterie.inference.speaking import Speaker
from coterie.runs import RunFolder

HOW = ["--tokens", 6, "--temperature", 0]


Ask = Callable[..., Said]


@pytest.fixture
def ask(finished, coterie_command, monkeypatch) -> Ask:
    """Runs `coterie chat RUN` on lines of input, which is no terminal unless `typed`."""

    def ask(lines: list[str], *more: Any, typed: bool = False, run: Path = finished) -> Said:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: typed)
        monkeypatch.setattr(sys, "stdin", stdin)
        return coterie_command("chat", run, *more)

    return ask


def alone(run: Path, client: str | None, questions: list[str]) -> list[str]:
    """Return what a model answers, loaded on its own; None: the base without adapter."""
    speaker = speaker_of(run, client, "poet", Sampling(6, 0, 0.95, 0))()
    return [speaker.answer(question, lambda piece: None) for question in questions]


def test_a_question_a_line_and_nothing_but_answers(ask, finished) -> None:
    result = ask(["Name a sea.", "", "And?"], "--client", "poet", *HOW)
    assert result.code == 0
    answers = alone(finished, "poet", ["Name a sea.", "And?"])
    assert result.out.splitlines() == "\n".join(answers).splitlines()
    assert result.err == "Note: these models were not trained on conversations: poet.\n"


def test_models_side_by_side_have_histories_of_their_own(ask, finished) -> None:
    others = f"base,whaler,local:poet,{finished}:diarist"
    result = ask(["Name a sea.", "And?"], "--client", "poet", "--with", others, *HOW)
    assert result.code == 0
    inner, asked = finished / "baselines" / "local", ["Name a sea.", "And?"]
    models = {
        "poet": alone(finished, "poet", asked),
        "base": alone(finished, None, asked),
        "whaler": alone(finished, "whaler", asked),
        "local:poet": alone(inner, "poet", asked),
        f"{finished}:diarist": alone(finished, "diarist", asked),
    }
    shown = ""
    for turn in range(2):
        shown += "".join(f"{name}{answers[turn]}" for name, answers in models.items())
    assert "".join(result.out.split()) == "".join(shown.split())
    assert len({tuple(answers) for answers in models.values()}) == 5
    again = ask(["Hm?"], "--client", "poet", "--with", "local:poet,comigs-1g1s:poet", *HOW)
    assert again.code == 2  # the run itself is not beside it
    result = ask(["Hm?"], "--client", "poet", "--with", "comigs-1g1s:poet", *HOW, run=inner)
    assert result.code == 0


def test_models_on_one_base_share_it(finished) -> None:
    others = ["base", "whaler", "local:poet"]
    speakers = talk.speakers(finished, "poet", others, Sampling(6, 0, 1, 0), None)
    assert len({id(speaker.base.model) for speaker in speakers.values()}) == 1


def test_what_is_saved_is_a_conversation(ask, tmp_path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text('{"messages": []}', encoding="utf-8")  # without a line break at its end
    save = f"/save {file}"
    lines = ["Name a sea.", "And?", save, "/reset", "Who?", save, "/quit", "x"]
    result = ask(lines, "--client", "poet", "--system", "Be brief.", "--with", "base", *HOW)
    assert result.code == 0
    _, *records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    first, second = (tuple(Turn(**turn) for turn in record["messages"]) for record in records)
    roles = [turn.role for turn in first]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [turn.content for turn in first if turn.role == "user"] == ["Name a sea.", "And?"]
    assert [turn.role for turn in second] == ["system", "user", "assistant"]
    tokenizer = coterie.tokenizer(Path(sys.argv[2]))
    assert chat_template(tokenizer, None).rendered(Conversation(first)).bytes > 0
    assert "\nx" not in result.out


def test_a_typed_conversation_goes_on_after_mistakes_and_stops(ask, monkeypatch, tmp_path) -> None:
    answered, typed = [], iter(["/help", "/nope", "Stop?", KeyboardInterrupt, "Name a sea.", ""])

    def type(prompt: str) -> str:
        line = next(typed, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    def answer(self: Speaker, question: str, show: Callable[[str], None]) -> str:
        answered.append(question)
        show("It is ")
        if question == "Stop?":
            raise KeyboardInterrupt
        self.left_out = 1
        show("so.")
        return "It is so."

    monkeypatch.setattr("builtins.input", type)
    monkeypatch.setattr(Speaker, "answer", answer)
    result = ask([], "--client", "poet", typed=True)
    assert result.code == 0
    assert answered == ["Stop?", "Name a sea."]
    hint = "press Ctrl-D or type /quit"
    for words in ("/save FILE", "It is \n(Stopped.)", hint, "It is so."):
        assert words in result.out
    assert "There is no command '/nope'" in result.err
    assert result.err.count("the oldest turns are left out") == 1


def test_the_runs_own_template_is_read(values, ask, tmp_path) -> None:
    turns = [{"role": "user", "content": "Name a sea."}, {"role": "assistant", "content": "So."}]
    chats = tmp_path / "anna.jsonl"
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 12, encoding="utf-8")
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    data = {"window": 40, "messages": {}, "chat_template": own}
    clients = [{"name": "anna", "path": "anna.jsonl"}]
    run = values(rounds=1, method="local", data=data, clients=clients, data_root=str(tmp_path))
    coterie.run(run, out=tmp_path / "run")
    words = ("--client", "anna", "--with", "base", *HOW)
    result = ask(["Name it.", f"/save {chats}"], *words, run=tmp_path / "run")
    assert result.err == f"Appended to {chats}.\n"
    loader, config = Loader(), recorded(RunFolder(tmp_path / "run"))
    model = loader.load(RunFolder(tmp_path / "run"), config, "anna")
    template = chat_template(model.base.tokenizer, own)
    expected = Speaker(*model[:2], template, Sampling(6, 0, 0.95, 0)).answer(
        "Name it.", lambda _: None
    )
    assert f"anna\n{expected}\n" in result.out
    again = coterie.run({**run, "data": data | {"window": 60}}, out=tmp_path / "again")
    counts = RunFolder(again.path).description["clients"]["anna"]["samples"]
    assert sum(counts.values()) == 13


def test_wrong_input_is_one_sentence(ask, finished, tmp_path) -> None:
    long = "a question of many words " * 20
    for lines, arguments, sentence in [
        (["Hm?"], ["--client", "zed"], "has no client 'zed' (clients: diarist, poet, whaler)."),
        (["Hm?"], ["--client", "poet", "--with", "zed"], "has no client 'zed'"),
        (["Hm?"], ["--client", "poet", "--with", "local:zed"], "has no client 'zed'"),
        (["Hm?"], ["--client", "poet", "--with", "base,base"], "--with lists 'base'"),
        (["Hm?"], ["--client", "poet", "--with", "poet"], "--with lists 'poet'"),
        (["Hm?"], ["--client", "poet", "--with", "pcl-1:poet"], "available methods: local"),
        (["/save it.txt"], ["--client", "poet"], "/save writes .jsonl files only, not it.txt."),
        (["/save it.jsonl"], ["--client", "poet"], "The conversation has no answer yet"),
        (["/sav it.jsonl"], ["--client", "poet"], "There is no command '/sav it.jsonl'"),
        ([long], ["--client", "poet"], "exceed the base's context of 64 tokens"),
        (["Hm?", f"/save {tmp_path}/no/it.jsonl"], ["--client", "poet", *HOW], "Could not write"),
    ]:
        result = ask(lines, *arguments)
        assert result.code == 2, sentence
        assert sentence in result.err
        notes = "Note: these models were not trained" in result.err
        assert result.err.count("\n") == 1 + notes


def test_who_is_not_asked_after_ctrl_c_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    both: Any = dict.fromkeys(("poet", "base"), Mock(answer=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        talk.Talk(both).take("Is it?")
    assert "These models have not answered: base." in capsys.readouterr().err


def test_too_little_memory_is_one_sentence(ask, finished, coterie_command, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for place in ("inference.speaking", "evaluation.generation"):
        monkeypatch.setattr(f"coterie.{place}.generated", full)
    helps = "set a smaller number of new tokens."
    sentence = f"The GPU has too little memory for an answer; {helps}"
    assert ask(["Who?", "Where?"], "--client", "poet", *HOW, typed=True).err.count(sentence) == 2
    result = coterie_command("generate", finished, "--client", "poet", "--prompt", "The sea", *HOW)
    assert result.code == 2
    assert result.err == f"Error: The GPU has too little memory for a text; {helps}\n"
