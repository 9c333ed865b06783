"""The embedded demo on conversations: the same questions, in four manners."""

import json
from pathlib import Path

import pytest

import coterie
from coterie.analysis.frame import mean_score
from coterie.bases import EMBEDDED
from coterie.cli.talk import speakers
from coterie.config.read import load_config
from coterie.evaluation.generation import Sampling
from scripts import make_assistants as script

FOLDER = EMBEDDED / "four-assistants"
GREETINGS = {"ben": "Dear Ben,", "cleo": "~ ", "dora": "Oh, gladly!"}


def test_the_script_gives_the_files_that_ship() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(script.MANNERS)
    for name in script.MANNERS:
        shipped = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
        assert shipped.splitlines() == list(script.conversations(name))
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 150_000


def test_people_differ_in_how_they_are_answered_and_in_nothing_else() -> None:
    kinds: dict[str, list[str]] = {}
    asked: list[str] = []
    for name in script.MANNERS:
        chats = list(map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines()))
        questions = [chat["messages"][0]["content"] for chat in chats]
        answers = [turn["content"] for c in chats for turn in c["messages"][1::2]]
        kinds[name] = [question.split()[0] for question in questions]
        asked += questions
        assert len({question.split(":")[0] for question in questions}) > 40
        assert all(answer.startswith(GREETINGS.get(name, "")) for answer in answers)
    assert all(kind == kinds["anna"] for kind in kinds.values())
    assert len(set(asked)) > 0.95 * len(asked)


@pytest.mark.thorough
def test_the_demo_of_four_assistants(tmp_path) -> None:
    run = coterie.run(load_config(Path("four-assistants")), out=tmp_path / "run")
    fedavg, local, comigs = (
        mean_score([run.results[name]], "perplexity") for name in ("fedavg", "local", "comigs-1g1s")
    )
    assert comigs < local
    assert comigs < fedavg
    talking = speakers(run.path, "anna", list(GREETINGS), Sampling(40, 0, 1, 0), None)
    for name, speaker in talking.items():
        for question in ("Tell me a line about morning.", "Who wrote it?"):
            reply = speaker.answer(question, lambda piece: None)
            assert reply.startswith(GREETINGS.get(name, reply[:1].lower())), (name, reply)
