"""Conversations as tokens: what counts, where they are cut, and what a model answers from."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from talks import TEMPLATES, Exchange, Talk, talk

from coterie.bases import context_token, load_tokenizer
from coterie.data.chat import OURS, ChatTemplate, chat_template
from coterie.data.examples import Encoding, Examples, joined
from coterie.data.items import Conversation
from coterie.data.kinds.conversations import chats
from coterie.data.parts import bare_encoder
from coterie.errors import CoterieError

WIDE = 10**6


def source(name: str) -> str:
    path = OURS if name == "ours" else TEMPLATES / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def chat(name: str) -> ChatTemplate:
    return ChatTemplate(load_tokenizer("tiny-gpt2"), source(name), name)


def tokens(
    given: list[Conversation], template: ChatTemplate, window: int, limit: int | None = None
) -> Examples:
    encoder, _ = bare_encoder(template.tokenizer)
    ends, owner = (context_token(template.tokenizer), 0), "The train text of client anna"
    return chats(given, Encoding(encoder, ends, window, limit, owner, template))


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
    assert (both.items, both.bytes) == (samples.items + some.items, samples.bytes + some.bytes)
    assert some.bytes == sum(samples.only([n]).bytes for n in (3, 0, 3)) > 0
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
    assert tokens(items, template, window, limit=3).items == samples.items[:3]


def test_conversations_that_do_not_suffice_are_a_sentence() -> None:
    item = Talk(None, [Exchange("What do you say?", None, "So much that it is too long.")])
    for items, reason in (([item.conversation()], "conversation in which"), ([], "conversations;")):
        with pytest.raises(CoterieError, match=f"^The train text of client anna has no {reason}"):
            tokens(items, chat("ours"), 4)


def test_which_template_is_used() -> None:
    tokenizer: Any = load_tokenizer("tiny-gpt2")
    assert chat_template(tokenizer, None).name == "Coterie's"
    tokenizer.chat_template = own = source("ours").replace("User", "They")
    own_template = chat_template(tokenizer, None)
    assert (own_template.name, own_template.source) == ("from tiny-gpt2", own)
    given = chat_template(tokenizer, source("ours"))
    assert given.name == "data.chat_template"
    assert given.digest != own_template.digest
