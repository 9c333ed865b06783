"""Positions of samples' answers and their counterparts, against brute force over strings."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from in_memory import sentencepiece
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.alignment.knowledge import Knowledge, Positions, sample_keys
from coterie.alignment.sequence import dynamic
from coterie.bases import context_token, load_tokenizer
from coterie.data.examples import Encoding, Examples
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import examples
from coterie.data.parts import bare_encoder
from coterie.messages import MessageError
from coterie.methods.fedmkt.method import KNOWLEDGE

VOCABULARY, TOP = 50, 2
ITEMS = [
    Instruction("Who purrs?\n", "the cat"),
    Instruction("Who trumpets? ", "a very old elephant, and the cat"),
    Instruction("And in other signs?", "naïve 😀😀 猫 e\u0301"),
    Instruction("Nothing?\n", ""),
    Instruction("Nothing, after a space?", ""),
    Instruction("Who purrs? ", "the cat"),
    Instruction("Who purrs?\n", "the dog"),
]


def llama_like() -> PreTrainedTokenizerBase:
    raw = sentencepiece([item.answer for item in ITEMS[:2]] * 2, 320, "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


TOKENIZERS: dict[str, Any] = {"gpt2": load_tokenizer("tiny-gpt2"), "llama": llama_like()}
BOTH = [(a, b) for a in TOKENIZERS for b in TOKENIZERS]


def encoded(name: str, items: list[Instruction]) -> Examples:
    tokenizer = TOKENIZERS[name]
    encoder, end = bare_encoder(tokenizer)
    ends = context_token(tokenizer), end
    return examples(items, Encoding(encoder, ends, 80, None, "The public text"))


def positions(name: str, items: list[Instruction]) -> Positions:
    return Positions.of(encoded(name, items), TOKENIZERS[name])


def knowledge(of: Positions) -> Knowledge:
    """Return predictions whose numbers identify positions."""
    p, size = len(of.ends), 2 * len(of.ends)
    tokens = torch.arange(size, dtype=torch.int32).view(p, 2) % VOCABULARY
    logprobs = -torch.arange(1, size + 1).view(p, 2).half() / size - 1
    losses = torch.arange(1, len(of.samples) + 1).float()
    lognorm = -torch.arange(p).float() / p
    return Knowledge(of.samples, losses, of.starts, of.ends, tokens, logprobs, lognorm)


@cache
def read(name: str, item: Instruction) -> list[str]:
    """Return the text that has been read at each position of an answer.

    It is "?" within a character, and where the next token adds no text.
    """
    answer = item.parts[1]
    before = len(item.parts[0])
    encoder, _ = bare_encoder(TOKENIZERS[name])
    encoding = encoder.encode("".join(item.parts), add_special_tokens=False)
    offsets = [(start - before, end - before) for start, end in encoding.offsets if end > before]
    parts = []
    for n in range(len(offsets) + 1):
        upto = max((end for _, end in offsets[:n]), default=0)
        whole = all(start >= upto for start, _ in offsets[n:])
        parts.append(answer[:upto] if whole else "?")
    return parts


def texts(name: str, items: list[Instruction]) -> list[tuple[str, str, str]]:
    """Return the prompt, the answer and the text read so far of all positions."""
    return [(i.prompt, i.answer, text) for i in items for text in read(name, i)]


def by_strings(student: list[tuple[str, str, str]], teacher: list[tuple[str, str, str]]) -> Any:
    return [teacher.index(t) if t in teacher and t[2] != "?" else -1 for t in student]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_positions_line_up_with_what_is_predicted(name) -> None:
    samples, places, decode = encoded(name, ITEMS), positions(name, ITEMS), TOKENIZERS[name].decode
    assert places.answers == tuple(item.parts[1] for item in ITEMS)
    assert len(places.ends) == samples.lengths.sum() == places.starts[-1]
    dtypes = [tensor.dtype for tensor in (places.samples, places.starts, places.ends)]
    assert dtypes == [torch.int64, torch.int64, torch.int32]
    for n, item in enumerate(ITEMS):
        batch: Any = samples.batch(range(n, n + 1))
        targets = batch.ids[:, 1:][batch.counted].tolist()
        first, last = places.starts[n : n + 2].tolist()
        assert len(targets) == last - first
        assert targets[-1] == TOKENIZERS[name].eos_token_id
        ends, answer = places.ends[first:last].tolist(), places.answers[n]
        assert ends == [-1 if t == "?" else len(t) for t in read(name, item)]
        assert ends[-1] == len(answer)
        for place, end in enumerate(ends):  # independently: by what the tokens spell
            if end >= 0:
                rest = decode(targets[place:-1], clean_up_tokenization_spaces=False)
                assert rest.strip() == answer[end:].strip()


def test_each_sample_has_a_key_of_its_own() -> None:
    keys = sample_keys(ITEMS)
    assert (keys >= 0).all()
    assert len(keys.unique()) == len(ITEMS)
    assert torch.equal(sample_keys(ITEMS[::-1]).flip(0), keys)
    assert len(sample_keys([Instruction("ab", "c"), Instruction("a", "bc")]).unique()) == 2
    chosen = Instruction(ITEMS[0].prompt, ITEMS[0].answer, ("the cat", "a dog"))
    assert sample_keys([chosen]) == keys[:1]
    assert sample_keys([]).shape == (0,)


CHANGES: dict[str, Callable[[list[Instruction]], list[Instruction]]] = {
    "all": lambda items: items,
    "another order": lambda items: [items[n] for n in (4, 2, 0, 6, 1, 3, 5)],
    "some": lambda items: items[1:5:2],
    "others too": lambda items: [Instruction("Else?", "the cat"), *items[2:4]],
    "one": lambda items: items[1:2],
}


@pytest.mark.parametrize(("student", "teacher"), BOTH)
@pytest.mark.parametrize("change", CHANGES)
def test_a_counterpart_has_read_the_same_characters(student, teacher, change) -> None:
    others = CHANGES[change](ITEMS)
    own = positions(student, ITEMS)
    known = own.known(knowledge(positions(teacher, others))).tolist()
    assert known == [others.index(item) if item in others else -1 for item in ITEMS]
    got = own.by_offsets(knowledge(positions(teacher, others)))
    assert got.tolist() == by_strings(texts(student, ITEMS), texts(teacher, others))
    assert (got >= 0).any()


@pytest.mark.parametrize(("student", "teacher"), BOTH)
@pytest.mark.parametrize("change", ["all", "another order", "others too"])
def test_warping_goes_over_the_text_between_positions(student, teacher, change) -> None:
    others = CHANGES[change](ITEMS)
    got = positions(student, ITEMS).by_warping(knowledge(positions(teacher, others)))
    expected = []
    teaching = texts(teacher, others)
    for item in ITEMS:
        parts = read(student, item)
        if item not in others:
            expected += [-1] * len(parts)
            continue
        own, other = ([t for t in read(n, item) if t != "?"] for n in (student, teacher))
        pieces = [[b[len(a) :] for a, b in pairwise(t)] for t in (own, other)]
        places = dynamic(*pieces)
        for text in parts:
            place = places[own.index(text)] if text != "?" else -1
            key = (item.prompt, item.answer, other[place])
            expected.append(teaching.index(key) if place >= 0 else -1)
    assert got.tolist() == expected


@pytest.mark.parametrize("chosen", [[True] * 7, [False] * 7, [n % 3 == 1 for n in range(7)]])
def test_only_some_samples(chosen) -> None:
    whole = knowledge(positions("gpt2", ITEMS))
    part = whole.only(torch.tensor(chosen))
    numbers = [n for n in range(7) if chosen[n]]
    assert torch.equal(part.samples, whole.samples[numbers])
    assert torch.equal(part.losses, whole.losses[numbers])
    assert part.starts[0] == 0
    for n, number in enumerate(numbers):
        a, b = part.starts[n : n + 2].tolist()
        c, d = whole.starts[number : number + 2].tolist()
        for name in ("ends", "tokens", "logprobs", "lognorm"):
            assert torch.equal(getattr(part, name)[a:b], getattr(whole, name)[c:d])
    assert Knowledge.received(part.tensors(), VOCABULARY, TOP).starts[-1] == len(part.ends)
    if not numbers:
        assert (positions("gpt2", ITEMS).by_offsets(part) == -1).all()
        assert (positions("gpt2", ITEMS).by_warping(part) == -1).all()


@pytest.mark.parametrize("chosen", [torch.tensor([5, 0, 2]), torch.tensor([False] * 6 + [True])])
def test_positions_of_some_samples(chosen) -> None:
    places = positions("gpt2", ITEMS)
    numbers = torch.arange(7)[chosen].tolist()
    spans = [range(*places.starts[n : n + 2].tolist()) for n in numbers]
    assert places.of_samples(chosen).tolist() == [place for span in spans for place in span]
    assert places.of_samples(torch.zeros(7, dtype=torch.bool)).tolist() == []


def test_what_was_told_is_received() -> None:
    whole = knowledge(positions("llama", ITEMS))
    received = Knowledge.received(whole.tensors(), VOCABULARY, TOP)
    for got in (Knowledge.of(whole.tensors()), received):
        for name, tensor in whole.tensors().items():
            assert torch.equal(got.tensors()[name], tensor)
    kinds = {name: str(t.dtype).removeprefix("torch.") for name, t in whole.tensors().items()}
    assert kinds == KNOWLEDGE.dtype  # all that may travel, and nothing else
    lacking = replace(whole, tokens=torch.full_like(whole.tokens, -1))
    Knowledge.received(lacking.tensors(), VOCABULARY, TOP)


TOLD = knowledge(positions("gpt2", ITEMS)).tensors()


Change = Callable[[Tensor], Any]


def altered(name: str, how: Change) -> dict[str, Tensor]:
    return TOLD | {name: how(TOLD[name])}


def changed(name: str, place: int, value: float) -> dict[str, Tensor]:
    tensor = TOLD[name].clone()
    tensor.view(-1)[place] = value
    return TOLD | {name: tensor}


DAMAGE = {
    "starts late": changed("starts", 0, 1),
    "stops early": changed("starts", -1, 3),
    "goes back": changed("starts", 2, 0),
    "an empty sample": changed("starts", 1, 0),
    "beyond what fits 64 bits": changed("starts", 1, 2**63 - 1),
    "reads backwards": changed("ends", 0, 99),
    "better than certain": changed("losses", 1, -0.1),
    "before the text": changed("ends", 0, -2),
    "a whole sample within a character": altered("ends", lambda t: torch.full_like(t, -1)),
    "a token too many": changed("tokens", 3, VOCABULARY),
    "a token too few": changed("tokens", 3, -2),
    "more than all": changed("lognorm", 1, 0.5),
    "a sample twice": knowledge(positions("gpt2", [*ITEMS[:2], ITEMS[0]])).tensors(),
    **{
        f"{change} of {name}": altered(name, how)
        for name in TOLD
        for change, how in {
            "one dimension more": lambda t: t[None],
            "one less": lambda t: t[0],
            "the last": lambda t: t[-1:],
            "all but the last": lambda t: t[:-1],
            "nothing": lambda t: t[:0],
        }.items()
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage) -> None:
    with pytest.raises(MessageError, match=r"invalid|does not have the shape"):
        Knowledge.received(DAMAGE[damage], VOCABULARY, TOP)


def test_more_tokens_at_a_position_than_asked_for_are_refused() -> None:
    with pytest.raises(MessageError, match="invalid"):
        Knowledge.received(TOLD, VOCABULARY, TOP - 1)


def test_a_position_beyond_the_answer_has_no_counterpart() -> None:
    places = positions("gpt2", ITEMS[:1])
    offer = knowledge(places)
    longer = replace(offer, ends=torch.where(offer.ends == len("the cat"), 99, offer.ends))
    assert (places.by_warping(offer) >= 0).all()
    assert (places.by_warping(longer) == -1).all()


@pytest.mark.parametrize("name", TOLD)
def test_what_is_missing_is_named(name) -> None:
    with pytest.raises(MessageError, match=name):
        Knowledge.received({n: t for n, t in TOLD.items() if n != name}, VOCABULARY, TOP)
