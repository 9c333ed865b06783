"""General samples: their form for each kind of data, the base's answers, and the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.bases import Base, load_base
from coterie.data.chat import chat_template
from coterie.data.examples import Sample, samples_of
from coterie.data.general import list_digest, shipped
from coterie.data.item_split import even
from coterie.data.items import Conversation, Turn
from coterie.errors import CoterieError
from coterie.evaluation import gate
from coterie.evaluation.gate import prompt_states
from coterie.federation.participants import Participant, gathered
from coterie.inference import general
from coterie.inference.general import with_general

OWN: list[dict[str, str]] = [{"request": "Hello"}, {"request": "Why?"}, {"text": "It rains."}]
OWN_TEXTS: Any = {"text": OWN}
CHATS: dict[str, Any] = {"messages": True}


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base("tiny-gpt2", "fp32", 40)


@pytest.fixture
def made(config, talks, questions, opinions, texts, base) -> Callable[..., Participant]:
    """Return a function that makes the general samples of a writer with a kind of data."""
    folders = {"messages": talks, "instructions": questions, "preferences": opinions}

    def make(data: dict[str, Any], replay: Any = OWN_TEXTS, gate: bool = True) -> Participant:
        folder = next((folders[kind] for kind in folders if kind in data), texts)
        suffix = "txt" if folder == texts else "jsonl"
        run = config(
            base="tiny-gpt2",
            data_root=str(folder),
            data={"window": 40, "limits": {"train": 900}} | data,
            clients=[{"name": "poet", "path": f"poet.{suffix}"}],
            training={"replay": replay, "gate": gate},
        )
        [client] = gathered(run, base.tokenizer).clients
        general._samples.clear()
        return with_general(run, base, client)

    return make


def decoded(base: Base, participant: Participant) -> list[str]:
    assert participant.replay is not None
    return [str(base.tokenizer.decode(ids)) for ids in participant.replay.samples.ids]


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (CHATS, "User: Hello\nAssistant:"),
        ({"instructions": {"template": "{{ instruction }} Answer:"}}, "Hello Answer:"),
        ({"instructions": {"template": "chat"}}, "User: Hello\nAssistant:"),
        ({"preferences": True}, "Hello"),
        ({"preferences": {"template": "chat"}}, "User: Hello\nAssistant:"),
    ],
    ids=str,
)
def test_requests_have_the_form_of_the_data(data, form, made, base) -> None:
    first, second, text = decoded(base, made(data))
    assert form in first
    assert form.replace("Hello", "Why?") in second
    assert text.endswith("It rains.")
    assert len(first) > first.index(form) + len(form) + 1, "the base has answered"


def test_a_base_writes_texts(made, base) -> None:
    sampled = made({}, True)
    texts = decoded(base, sampled)
    assert len(set(texts)) == general.WRITTEN["train"]
    assert len(sampled.held_out.ids) == general.WRITTEN["held out"]
    assert not {*texts} & {str(base.tokenizer.decode(ids)) for ids in sampled.held_out.ids}
    assert decoded(base, made(CHATS, {"text": "sampled"})) == texts


def test_drift_is_measured_on_other_requests(made, base) -> None:
    trained = made(CHATS)
    held_out = [str(base.tokenizer.decode(ids)) for ids in trained.held_out.ids]
    assert len(shipped(held_out=True)) / 2 < len(held_out)  # some do not fit the window
    assert not {*held_out} & {*decoded(base, trained)}
    assert trained.held_out.drift(base, base.model) == 0


def test_answers_are_cached(made, base, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    first = decoded(base, made(CHATS))
    monkeypatch.setattr(
        general, "generate_answers", lambda *_: pytest.fail("the answers are not cached")
    )
    assert decoded(base, made(CHATS)) == first
    monkeypatch.undo()
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    files = list((tmp_path / "general").iterdir())
    assert len(files) == 2
    for file in files:
        file.write_text("damaged", encoding="utf-8")
    assert decoded(base, made(CHATS)) == first
    assert all(json.loads(file.read_text(encoding="utf-8")) for file in files)


def test_a_cache_that_cannot_be_written_is_no_error(made, base, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    assert len(decoded(base, made(CHATS))) == len(OWN)


def test_only_assistants_have_gates(made, base, monkeypatch) -> None:
    monkeypatch.setattr(gate, "MARGIN", -100)
    assert made(CHATS, False).replay is made(CHATS, False).gate is None
    monkeypatch.setattr(base.tokenizer, "chat_template", base_template())
    for data in (CHATS, {"instructions": {"template": "chat"}}):
        assert made(data, False).gate is not None
        assert made(data, False, gate=False).gate is None
    for other in ({}, {"preferences": True}):
        assert made(other, False).gate is None


def test_a_gate_is_fitted_to_prompts_of_both_kinds(made, base, monkeypatch) -> None:
    monkeypatch.setattr(base.tokenizer, "chat_template", base_template())
    fitted: list[list[Tensor]] = []
    monkeypatch.setattr(gate.Gate, "fitted", lambda *states: fitted.append([*states]))
    monkeypatch.setattr(general, "MOST_PROMPTS", 5)
    data = made(CHATS, False).data
    train, validation, shown = fitted[0]
    for split, states in ((data.train, train), (data.validation, validation)):
        chosen = split.only(even(len(split), 5).tolist()).prompts(base)
        torch.testing.assert_close(states, prompt_states(base, chosen))
    assert len(train) == 5
    listed = [text.request or text.text or "" for text in shipped(held_out=False)]
    items = [Conversation((Turn("user", text), Turn("assistant", "A"))) for text in listed]
    expected = prompt_states(base, [chat_prompt(base, item) for item in items])
    torch.testing.assert_close(shown[: len(listed)], expected, rtol=1e-4, atol=1e-5)
    assert len(shown) - len(listed) == general.WRITTEN["train"]
    made(CHATS, False)
    assert fitted[1][2] is shown  # computed once for all clients


def chat_prompt(base: Base, item: Conversation) -> Tensor:
    [prompt] = samples_of(
        [Sample([([], False), ([], True)], item)], template=chat_template(base.tokenizer, None)
    ).prompts(base)
    return prompt


def base_template() -> str:
    file = Path(coterie.__file__).parent / "assets" / "chat.jinja"
    return file.read_text(encoding="utf-8")


def test_a_file_is_part_of_the_run(config, tmp_path, talks) -> None:
    lines = "\n".join(map(json.dumps, OWN))
    (tmp_path / "own.jsonl").write_text(lines, encoding="utf-8")
    run = config(data_root=str(tmp_path), training={"replay": {"text": "own.jsonl"}})
    (tmp_path / "own.jsonl").unlink()
    described = run.as_dict()["training"]["replay"]
    assert [dict(text) for text in described["text"]] == OWN
    assert "digest" not in described


def test_the_list_is_identified_by_a_digest(config, made, monkeypatch) -> None:
    run = config(training={"replay": True})
    assert run.as_dict()["training"]["replay"]["digest"] == list_digest()
    with pytest.raises(CoterieError, match="another version of Coterie's list"):
        made(CHATS, {"digest": "another"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "there is no file"),
        ("", "is empty"),
        ('{"request": " "}', "line 1 of .* needs either the field `request` or"),
        ('{"request": "a", "text": "b"}', "needs either"),
        ('{"question": "a"}', "needs either"),
        ('{"request": 1}', "not text"),
    ],
)
def test_a_file_without_requests_is_refused(lines, message, config, tmp_path) -> None:
    if lines is not None:
        (tmp_path / "own.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(CoterieError, match=message):
        config(data_root=str(tmp_path), training={"replay": {"text": "own.jsonl"}})


def test_a_list_without_requests_is_refused(config) -> None:
    with pytest.raises(CoterieError, match="name at least one request or text"):
        config(training={"replay": {"text": []}})


def test_a_base_that_answers_nothing_is_refused(made, monkeypatch) -> None:
    blank = lambda base, model, prompts, *_: [" "] * len(prompts)  # noqa: E731
    monkeypatch.setattr(general, "generate_answers", blank)
    monkeypatch.setattr(general, "_cached", lambda key, count, make: make())
    with pytest.raises(CoterieError, match="answers none of the general requests"):
        made(CHATS)


def test_requests_that_do_not_fit_the_window_are_refused(made) -> None:
    with pytest.raises(CoterieError, match=r"fits `data\.window: 40`; raise"):
        made(CHATS, {"text": [{"request": "Why? " * 60}]})
