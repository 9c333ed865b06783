"""An answer is encoded as what goes on after its prompt."""

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from coterie.bases import load_tokenizer
from coterie.data.examples import Encoding
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import examples
from coterie.data.parts import PartEncoder, bare_encoder

SPACE = "\u2581"
SPACES = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
DIGITS = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
PREFIXED = {
    "a normaliser": (normalizers.Sequence(SPACES), None),
    "one normaliser": (normalizers.Prepend(" "), None),
    "words' pieces": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")),
    "bytes": (None, pre_tokenizers.Sequence(DIGITS)),
}


def characters(normalizer: normalizers.Normalizer, pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A tokenizer of single characters."""
    alphabet = sorted({*"Isityesno?", " ", SPACE, *pre_tokenizers.ByteLevel.alphabet()})
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    return made


@pytest.mark.parametrize("kind", PREFIXED.values(), ids=PREFIXED)
@pytest.mark.parametrize("answer", [" yes", "no", " so it is", ""])
def test_prompt_and_answer_are_the_tokens_of_both_together(kind, answer) -> None:
    encoder = characters(*kind)
    [[prompt, after]] = PartEncoder(encoder).batch([["Is it?", answer]])
    assert prompt.ids + after.ids == encoder.encode(f"Is it?{answer}").ids
    assert prompt.ids == encoder.encode("Is it?").ids
    ends = [end for _, end in after.offsets]
    assert ends == list(range(1, len(answer) + 1))


def test_a_tokenizer_is_copied_once() -> None:
    tokenizers = [load_tokenizer("tiny-gpt2") for _ in range(2)]
    first, again = [[bare_encoder(each)[0] for each in tokenizers] for _ in range(2)]
    assert [id(encoder) for encoder in first] == [id(encoder) for encoder in again]
    assert first[0] is not first[1]
    assert first[0] is not tokenizers[0].backend_tokenizer


def test_a_part_of_the_samples_is_as_if_there_were_no_others() -> None:
    encoder, end = bare_encoder(load_tokenizer("tiny-gpt2"))
    items = [Instruction(f"{n} and {n}:", f"{2 * n}") for n in (1, 20, 300, 4000)]
    how = Encoding(encoder, (end, end), 40, None, "ada")
    made = (examples(i, how) for i in (items, [items[2], items[1]]))
    whole, wanted = made
    found = whole.only([2, 1])
    for name in ("ids", "starts", "answers"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert (found.bytes, found.items) == (wanted.bytes, wanted.items)
