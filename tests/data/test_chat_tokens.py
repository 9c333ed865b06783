"""Conversations as tokens: what counts, where they are cut, and what a model answers from."""

import random
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import pytest
import torch
from talks import TEMPLATES, Said, Talk, needs_templates, talk
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AddedToken

from coterie.bases import Tokenizer, context_token, load_tokenizer
from coterie.data.chat import OURS, ChatTemplate, chat_template
from coterie.data.examples import Encoding, Examples, joined
from coterie.data.items import Conversation
from coterie.data.kinds.conversations import chats
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError

PUBLISHED = ("mistral", "llama3", "qwen3", "llama_2_chat", "gptoss")
WIDE = 10**6
TURN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|message|>")
"""Markers; where they are no tokens of their own, they may share a token with an answer."""


def source(name: str) -> str:
    path = OURS if name == "ours" else TEMPLATES / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def chat(name: str, base: str = "tiny-gpt2", *more: str) -> ChatTemplate:
    """A template with a base's tokenizer, and tokens that it lacks."""
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in more])
    return ChatTemplate(tokenizer, source(name), name)


def tokens(
    given: list[Conversation], template: ChatTemplate, window: int, limit: int | None = None
) -> Examples:
    encoder, _ = bare_encoder(template.tokenizer)
    ends, owner = (context_token(template.tokenizer), 0), "The train text of client anna"
    return chats(given, Encoding(encoder, ends, window, limit, owner, template))


def runs(samples: Examples, number: int) -> list[tuple[list[int], bool]]:
    """A sample's tokens in runs that count or do not."""
    own = slice(int(samples.starts[number]), int(samples.starts[number + 1]))
    both = zip(samples.counted[own].tolist(), samples.ids[own].tolist(), strict=True)
    return [([id for _, id in run], counts) for counts, run in groupby(both, itemgetter(0))]


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("base", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize(
    "name", ["ours", *(pytest.param(name, marks=needs_templates) for name in PUBLISHED)]
)
def test_tokens_that_count_are_what_the_assistant_said(name: str, base: str) -> None:
    draw = random.Random(name + base)
    template = chat(name, base, *TURN_TOKENS)
    items = [talk(draw).conversation() for _ in range(15)]
    samples = tokens(items, template, WIDE)
    assert (len(samples), samples.too_long, samples.cut) == (15, 0, 0)
    assert samples.items == tuple(items)
    for number, item in enumerate(items):
        parts = template.rendered(item).parts
        read = runs(samples, number)
        assert [said for _, said in read] == [said for _, said in parts]
        for n, ((ids, _), (part, _)) in enumerate(zip(read, parts, strict=True)):
            # Llama's decoder leaves out a space at the beginning.
            space = " " if base == "tiny-llama" else ""
            decoded = text(template.tokenizer, ids)
            assert decoded.removeprefix(space) == part.removeprefix(space), n
        last = sum(len(ids) for ids, _ in read[:-1])
        assert samples.answers[number] == samples.starts[number] + last
        assert samples.sizes[number] == template.rendered(item).bytes
    lengths = [sum(len(ids) for ids, said in runs(samples, n) if said) for n in range(15)]
    assert samples.lengths.tolist() == lengths


def test_a_model_answers_from_what_it_read_in_training() -> None:
    """The tokens before a last answer are those of the parts before it."""
    draw = random.Random(1)
    template = chat("ours")
    for _ in range(20):
        given = talk(draw)
        said = [one._replace(thinking=None) for one in given.said]
        item = Talk(given.system, said).conversation()
        samples = tokens([item], template, WIDE)
        prompt = samples.ids[: int(samples.answers[0])].tolist()
        assert text(template.tokenizer, prompt) == "".join(
            template.opening_and_answer(item.turns[:-1])[:-1]
        )


def test_a_batch_counts_what_the_samples_count() -> None:
    draw = random.Random(2)
    samples = tokens([talk(draw).conversation() for _ in range(5)], chat("ours"), WIDE)
    chosen = torch.tensor([3, 0, 3])
    batch = samples.batch(chosen)
    assert batch.counted is not None
    for row, number in enumerate(chosen.tolist()):
        start, end = int(samples.starts[number]), int(samples.starts[number + 1])
        size = end - start
        assert torch.equal(batch.ids[row, :size], samples.ids[start:end].long())
        assert torch.equal(batch.counted[row, : size - 1], samples.counted[start + 1 : end])
        assert not batch.counted[row, size - 1 :].any()
    some = samples.only([3, 0, 3])
    assert torch.equal(some.batch(range(3)).ids, batch.ids)
    both = joined([samples, some])
    assert torch.equal(both.batch(torch.tensor([5, 6, 7])).ids, batch.ids)
    assert both.markers == samples.markers == ("<|endoftext|>",)


@pytest.mark.parametrize("window", [40, 80])
def test_long_conversations_are_cut_between_exchanges(window: int) -> None:
    draw = random.Random(window)
    template = chat("ours")
    items = [talk(draw, longest=6).conversation() for _ in range(40)]
    encoder, _ = bare_encoder(template.tokenizer)

    def length(item: Conversation) -> int:
        parts = template.rendered(item).parts
        return sum(len(encoder.encode(part, add_special_tokens=False).ids) for part, _ in parts)

    wanted: list[tuple[Any, ...]] = []
    lost = cut = 0
    for item in items:
        system = item.turns[:1] if item.turns[0].role == "system" else ()
        rest = item.turns[len(system) :]
        pieces: list[tuple[Any, ...]] = []
        begun = False
        for exchange in zip(rest[::2], rest[1::2], strict=True):
            whole = (*pieces[-1], *exchange) if begun else ()
            if whole and length(Conversation(whole)) <= window + 1:
                pieces[-1] = whole
            elif length(Conversation((*system, *exchange))) <= window + 1:
                pieces.append((*system, *exchange))
                begun = True
            else:
                lost += 1
                begun = False
        wanted += pieces
        cut += len(pieces) > 1
    samples = tokens(items, template, window)
    assert [item.turns for item in samples.items if isinstance(item, Conversation)] == wanted
    assert (samples.too_long, samples.cut) == (lost, cut)
    assert lost
    assert cut
    assert max(end - start for start, end in pairwise(samples.starts.tolist())) <= window + 1
    few = tokens(items, template, window, limit=3)
    assert few.items == samples.items[:3]


def test_conversations_that_do_not_suffice_are_a_sentence() -> None:
    item = Talk(None, [Said("What do you say?", None, "So much that it is too long.")])
    for items, reason in (([item.conversation()], "conversation in which"), ([], "conversations;")):
        with pytest.raises(CoterieError, match=f"^The train text of client anna has no {reason}"):
            tokens(items, chat("ours"), 4)


def test_which_template_is_used() -> None:
    tokenizer: Any = load_tokenizer("tiny-gpt2")
    assert chat_template(tokenizer, None).name == "Coterie's"
    tokenizer.chat_template = own = source("ours").replace("User", "They")
    found = chat_template(tokenizer, None)
    assert (found.name, found.source) == ("from tiny-gpt2", own)
    given = chat_template(tokenizer, source("ours"))
    assert given.name == "data.chat_template"
    assert given.digest != found.digest


@pytest.mark.parametrize("scheme", ["prepend", "first", "always", "never"])
def test_parts_are_encoded_as_the_whole_is_up_to_an_answer(scheme: str) -> None:
    """Whenever a tokenizer puts a space: before a text, or after every special token, too."""
    letters = ["<unk>", "<s>", "</s>", "\u2581", "\n", *(chr(code) for code in range(33, 127))]
    encoder = Encoder(BPE({one: n for n, one in enumerate(letters)}, [], unk_token="<unk>"))
    if scheme == "prepend":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        encoder.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        metaspace: Any = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        encoder.pre_tokenizer = metaspace
    encoder.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    for parts in (
        ["<s><|user|>\nHi you<|assistant|>", "Yes</s>", "<|user|>And<|assistant|>", "No</s>"],
        ["User: Hi\nAnswer:", " Yes</s>"],  # An answer in the middle of a text has no space.
    ):
        whole = encoder.encode("".join(parts), add_special_tokens=False).ids
        assert [id for ids in PartEncoder(encoder).ids(parts) for id in ids] == whole
