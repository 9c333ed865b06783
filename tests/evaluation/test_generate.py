"""Generated texts, against one token after another without cache, padding or other samples."""

from typing import Any

import pytest
import torch
from test_answers import adapted as randomly_adapted
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AddedToken

from coterie.bases import Base, context_token, load_base
from coterie.data.chat import ChatTemplate, chat_template
from coterie.data.examples import Encoding, Examples
from coterie.data.items import Conversation, Turn
from coterie.data.kinds.conversations import chats
from coterie.data.parts import bare_encoder
from coterie.evaluation.generation import context_length, continuations, ends_of, generate_answers
from coterie.testing.small import TOKENS

LENGTHS = (9, 2, 5, 14, 5, 1, 3, 9, 7)


def prompts() -> list[Tensor]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(1, TOKENS, (n,), generator=chance).int() for n in LENGTHS]


def adapted(folder: str) -> Base:
    """Return a base with an adapter whose values make texts differ."""
    return randomly_adapted(folder, seed=5, std=0.5)


def encoding(encoder: Tokenizer, template: ChatTemplate) -> Encoding:
    ends = context_token(template.tokenizer), 0
    return Encoding(encoder, ends, 60, None, "Client ada: its text", template)


@torch.no_grad()
def slowly(model, prompt: Tensor, count: int, end: int) -> list[int]:
    """Generate at most `count` of the most probable tokens, until the end token."""
    ids: list[int] = prompt.tolist()
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == end:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_batch_writes_what_the_plain_loop_writes(bases, family) -> None:
    base = adapted(str(bases / family))
    # A token that the loop writes in the middle of one text, or of some, ends them.
    never = slowly(base.model, prompts()[0], 6, end=-1)
    base.tokenizer.eos_token = base.tokenizer.convert_ids_to_tokens(never[3])
    end = never[3]
    expected = [slowly(base.model, prompt, 6, end) for prompt in prompts()]
    assert 0 < len(expected[0]) < 4
    assert max(map(len, expected)) == 6
    assert len({tuple(text) for text in expected}) > 5
    for batch in (1, 3, 16):
        texts = continuations(base, base.model, prompts(), 6, batch)
        assert texts == [base.tokenizer.decode(text) for text in expected]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_soft_prompt_stands_right_before_each_prompt(bases, family, soft_prompted) -> None:
    base = load_base(str(bases / family), "fp32", 16)
    model = soft_prompted(base.model)
    end: Any = base.tokenizer.eos_token_id
    expected = [slowly(model, prompt, 5, end) for prompt in prompts()]
    for batch in (1, 3, 16):
        texts = continuations(base, model, prompts(), 5, batch)
        assert texts == [base.tokenizer.decode(text) for text in expected]
    assert context_length(model) == 60


def test_text_ends_with_the_models_context(bases) -> None:
    base = adapted(str(bases / "gpt2"))
    chance = torch.Generator().manual_seed(4)
    long = [torch.randint(1, TOKENS, (n,), generator=chance).int() for n in (60, 64, 5, 60, 65, 66)]
    end: Any = base.tokenizer.eos_token_id
    counts = [5, 1, 8, 5, 0, 0]  # a context of 64, and one token more that is not read
    expected = [slowly(base.model, p, n, end) for p, n in zip(long, counts, strict=True)]
    assert [len(text) for text in expected] == counts
    texts = continuations(base, base.model, long, 8, batch=16)
    assert texts == [base.tokenizer.decode(text) for text in expected]


def test_what_the_base_would_rather_do_is_set_aside(bases) -> None:
    base = adapted(str(bases / "gpt2"))
    plain = continuations(base, base.model, prompts(), 6, 4)
    config = base.model.generation_config
    config.repetition_penalty, config.do_sample, config.temperature = 5.0, True, 9.0
    assert continuations(base, base.model, prompts(), 6, 4) == plain


def test_in_bf16(bases) -> None:
    base = load_base(str(bases / "llama"), "bf16", 16)
    texts = continuations(base, base.model, prompts(), 3, batch=4)
    assert len(texts) == len(LENGTHS)
    assert all(texts)


TALKS = [
    ("Who purrs?", "A cat."),
    ("Who trumpets of all the animals in the wood?", "An elephant."),
    ("Who barks?", "A dog."),
]
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}MARK{% endfor %}"


@pytest.mark.parametrize("marker", ["token", "text"])
def test_an_answer_ends_with_the_marker_of_its_template(bases, marker) -> None:
    base = adapted(str(bases / "gpt2"))
    words = base.tokenizer
    encoder, _ = bare_encoder(words)
    items = [Conversation((Turn("user", q), Turn("assistant", a))) for q, a in TALKS]

    def read(end: str) -> Examples:
        template = ChatTemplate(words, CHAT.replace("MARK", end), "a test's")
        return chats(items, encoding(encoder, template))

    end = "<stop>"
    if marker == "token":
        words.add_tokens([AddedToken(end, special=True)])
        encoder, _ = bare_encoder(words)
        base.model.resize_token_embeddings(len(words), mean_resizing=False)
    samples = read(end)
    assert ends_of(words, samples.markers) == (
        ([words.eos_token_id, words.convert_tokens_to_ids(end)], [])
        if marker == "token"
        else ([words.eos_token_id], [end])
    )
    places = zip(samples.starts[:-1].tolist(), samples.answers.tolist(), strict=True)
    prompts = [samples.ids[start:answer] for start, answer in places]
    written = [slowly(base.model, prompt, 6, end=-1) for prompt in prompts]
    whole = [str(words.decode(ids, skip_special_tokens=True)) for ids in written]
    stop = str(words.decode(written[0][2:4])).strip()  # two tokens, and perhaps a part of others
    texts = continuations(base, base.model, prompts, 6, 3, [stop])
    assert texts == [text.split(stop)[0] for text in whole]
    assert len(texts[0]) < len(whole[0])
    assert generate_answers(base, base.model, samples, 6, 2) == [text.strip() for text in whole]


def test_a_token_of_its_own_ends_an_answer(bases) -> None:
    base = adapted(str(bases / "gpt2"))
    words = base.tokenizer
    written = slowly(base.model, prompts()[0], 6, end=-1)
    name = str(words.convert_ids_to_tokens(written[3]))
    words.add_special_tokens({"additional_special_tokens": [name]})
    assert ends_of(words, [f" {name}"]) == ([words.eos_token_id, written[3]], [])
    first = continuations(base, base.model, prompts()[:1], 6, 1, [f" {name}"])
    assert first == [words.decode(written[: written.index(written[3])])]


def test_thinking_is_no_part_of_an_answer(bases, monkeypatch) -> None:
    base = load_base(str(bases / "gpt2"), "fp32", 16)
    encoder, _ = bare_encoder(base.tokenizer)
    template = chat_template(base.tokenizer, None)
    item = Conversation((Turn("user", "Who?"), Turn("assistant", "<think>hm</think> I.")))
    samples = chats([item], encoding(encoder, template))
    wrote = ["<think>\nWell.\n</think>\n\nI."]
    monkeypatch.setattr("coterie.evaluation.generation.continuations", lambda *_: wrote)
    assert generate_answers(base, base.model, samples, 6, 2) == ["I."]
    assert samples.items[0].answer == "I."
