"""Answers in conversations, against one token after another of what the template renders."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.bases import Base, load_base
from coterie.data.chat import ChatTemplate, chat_template
from coterie.data.items import Conversation, Turn
from coterie.errors import CoterieError
from coterie.evaluation.generation import Sampling, generated
from coterie.inference import speaking
from coterie.inference.speaking import Speaker

GREEDY = Sampling(tokens=12, temperature=0, top_p=1, seed=0)
TAGS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|over|>{% endfor %}"


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base("tiny-gpt2", "fp32", 16)


def speaker(base: Base, sampling: Sampling = GREEDY, model: Any = None, **more: Any) -> Speaker:
    template = more.pop("template", None) or chat_template(base.tokenizer, None)
    return Speaker(base, lambda: model or base.model, template, sampling, **more)


def ids_of(base: Base, *parts: str) -> list[int]:
    encoded: Any = base.tokenizer([*parts], add_special_tokens=False)
    return [id for ids in encoded["input_ids"] for id in ids]


@torch.no_grad()
def slowly(base: Base, turns: list[Turn], model: Any = None) -> str:
    """Generate an answer of the most probable tokens, one by one, until the end token."""
    ids = ids_of(base, *chat_template(base.tokenizer, None).opening_and_answer(turns)[:-1])
    before = len(ids)
    model = model or base.model
    while len(ids) < before + GREEDY.tokens and ids[-1] != base.tokenizer.eos_token_id:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return str(base.tokenizer.decode(ids[before:], skip_special_tokens=True)).strip()


def test_streams_what_the_plain_loop_writes_and_remembers_it(base) -> None:
    talk, turns = speaker(base, system="Be brief."), [Turn("system", "Be brief.")]
    for question in ("Name a sea.", "And a ship?", "  Who sails it?"):
        pieces: list[str] = []
        reply = talk.answer(question, pieces.append)
        turns.append(Turn("user", question))
        assert reply == "".join(pieces) == slowly(base, turns)
        assert len(pieces) > 3
        turns.append(Turn("assistant", reply))
        assert talk.turns == tuple(turns)
    talk.reset()
    assert talk.turns == (turns[0],)
    assert talk.answer("Name a sea.", lambda piece: None) == turns[2].content


def test_behind_a_soft_prompt(soft_prompted) -> None:
    base = load_base("tiny-gpt2", "fp32", 16)
    model = soft_prompted(base.model)
    reply = speaker(base, model=model).answer("Name a sea.", lambda piece: None)
    assert reply == slowly(base, [Turn("user", "Name a sea.")], model)


class Scripted:
    """A model that writes given tokens, and remembers what it has read."""

    def __init__(self, written: list[list[int]], context: int = 64) -> None:
        limits = SimpleNamespace(max_position_embeddings=context)
        self.config = SimpleNamespace(get_text_config=lambda: limits)
        self.written, self.read, self.options = iter(written), [], {}

    def generate(self, input_ids: Tensor, streamer: Any, **options: Any) -> None:
        """Pass the scripted tokens to the streamer, as transformers' `generate` does."""
        self.options = options
        self.read.append(input_ids[0].tolist())
        streamer.put(input_ids)
        for token in next(self.written):
            streamer.put(torch.tensor([token]))


def test_the_model_reads_the_templates_opening_and_nothing_else(base) -> None:
    model = Scripted([ids_of(base, " A sea.<|over|>"), ids_of(base, " It is.")])
    talk = speaker(base, model=model, template=ChatTemplate(base.tokenizer, TAGS, "a test's"))
    pieces: list[str] = []
    assert talk.answer("What?", pieces.append) == "".join(pieces) == "A sea."
    talk.answer("Is it?", pieces.append)
    first = "<|user|>What?<|over|><|assistant|>"
    expected = [first, f"{first}A sea.<|over|><|user|>Is it?<|over|><|assistant|>"]
    assert model.read == [ids_of(base, text) for text in expected]
    assert model.options["stop_strings"] == ["<|over|>"]


def test_a_model_stops_at_a_marker_of_several_tokens(base, monkeypatch) -> None:
    lengths: list[int] = []

    def watched(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
        tokens = generated(model, ids, mask, **options)
        lengths.append(tokens.shape[1] - ids.shape[1])
        return tokens

    monkeypatch.setattr(speaking, "generated", watched)
    whole = slowly(base, [Turn("user", "Name a sea.")])
    talk = speaker(base)
    marker = " ".join(whole.split()[3:5])
    monkeypatch.setattr(ChatTemplate, "markers", (marker, "<|endoftext|>"))
    assert talk.answer("Name a sea.", lambda piece: None) == whole.partition(marker)[0].strip()
    assert len(ids_of(base, " " + whole.partition(marker)[0])) < lengths[0] < GREEDY.tokens


def test_nothing_is_shown_that_later_tokens_change(base) -> None:
    model = Scripted([ids_of(base, " a dash \u2014 and \U0001f40b, <|ov or <|over|> gone")])
    talk = speaker(base, model=model, template=ChatTemplate(base.tokenizer, TAGS, "a test's"))
    pieces: list[str] = []
    assert talk.answer("What?", pieces.append) == "a dash \u2014 and \U0001f40b, <|ov or"
    assert "".join(pieces) == talk.turns[-1].content
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_came(base) -> None:
    talk = speaker(base)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.answer("Name a sea.", show)
    assert talk.turns == (Turn("user", "Name a sea."), Turn("assistant", "".join(pieces)))
    whole = slowly(base, [Turn("user", "Name a sea.")])
    assert whole.startswith("".join(pieces))
    assert whole != "".join(pieces)
    turns = [*talk.turns, Turn("user", "And?")]
    assert talk.answer("And?", lambda piece: None) == slowly(base, turns)


def test_an_answer_without_a_word_is_not_remembered(base) -> None:
    talk = speaker(base, model=Scripted([[base.tokenizer.eos_token_id], ids_of(base, " Yes.")]))
    assert (talk.answer("Well?", pytest.fail), talk.turns) == ("", ())
    assert (talk.answer("Well?", lambda piece: None), len(talk.turns)) == ("Yes.", 2)


def test_the_oldest_exchanges_are_left_out_where_the_context_ends(base) -> None:
    model = Scripted([ids_of(base, " Yes, it is so.")] * 9, context=90)
    talk = speaker(base, model=model, system="Be brief.")
    template = chat_template(base.tokenizer, None)
    for number in range(9):
        talk.answer(f"Is it so, {number}?", lambda piece: None)
        system, *turns = talk.turns[:-1]  # without the last answer
        fits = [
            n
            for n in range(0, len(turns), 2)
            if len(ids_of(base, *template.opening_and_answer([system, *turns[n:]])[:-1])) + 12 <= 91
        ]
        expected = template.opening_and_answer([system, *turns[fits[0] :]])[:-1]
        assert (model.read[-1], talk.left_out) == (ids_of(base, *expected), fits[0] // 2)
    assert talk.left_out > 2
    assert len(talk.turns) == 19  # all is remembered
    with pytest.raises(CoterieError, match=r"exceed the base's context of 90 tokens; ask a short"):
        talk.answer("Is it so? " * 30, lambda piece: None)
    assert len(talk.turns) == 19
    assert template.rendered(Conversation(talk.turns)).bytes > 0


def test_chance_is_that_of_the_seed_and_the_place_in_the_conversation(base) -> None:
    def answers(seed: int) -> list[str]:
        talk = speaker(base, Sampling(8, 1.0, 0.9, seed))
        torch.rand(3)  # not that of the process
        return [talk.answer("Name a sea.", lambda piece: None) for _ in range(2)]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert answers(1) == answers(1) != answers(2)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), torch.manual_seed(0) and torch.rand(3))


def test_with_thinking_the_model_reads_what_stands_before_it(base) -> None:
    model = Scripted([ids_of(base, "<think>Hm.</think>Yes.")])
    talk = speaker(base, Sampling(9, 0, 1, 0, thinking=True), model)
    assert talk.answer("Well?", lambda piece: None) == "<think>Hm.</think>Yes."
    opening = talk.template.opening_and_answer([Turn("user", "Well?")], True)[:-1]
    assert model.read == [ids_of(base, *opening)]
