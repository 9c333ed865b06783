"""The rules by which the tokenizers of GGUF files split text before byte-pair encoding.

A GGUF file names its rule (`tokenizer.ggml.pre`), and llama.cpp knows the regular expressions of
each name. The reader of transformers uses GPT-2's rule for the names that it does not know, and
ignores whether a word that is a token skips the merges, and whether a text begins with a space.
"""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from coterie.bases.gguf_header import Header

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"]
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = "|".join([*CASED, r"\p{N}", CASED_REST])
GPT4O = "|".join([*(f"{words}{CONTRACTIONS}?" for words in CASED), r"\p{N}{1,3}", CASED_REST])
FALCON = [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
RULES: dict[str, list[str]] = {
    name: rule
    for names, rule in {
        "gpt-2 phi-2 mpt olmo jais trillion gigachat mellum a.x-4.0 exaone4": [GPT2],
        "smollm starcoder refact command-r codeshell exaone minerva-7b": [r"\p{N}", GPT2],
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 dbrx smaug-bpe glm4": [LLAMA3],
        "chatglm-bpe": [LLAMA3],
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan": [QWEN2],
        "qwen35": [QWEN35],
        "seed-coder": [SEED],
        "tekken": [TEKKEN],
        "gpt-4o llama4 kanana2": [GPT4O],
        "falcon": FALCON,
        "poro-chat bloom gpt3-finnish": [SENTENCES],
        "viking": [SENTENCES, r"\p{N}"],
    }.items()
    for name in names.split()
}
"""The regular expressions of each name, each of which splits the pieces of the one before."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
"""The names of rules with which a word that is a token is not merged from its parts.

llama.cpp also begins a text with the beginning-of-text token for these names, unless the file says
otherwise.
"""
MODELS = {"gpt2": "merges", "llama": "scores"}
"""The kinds of tokenizers that are supported, with the key that each needs."""
MARK = "▁"
"""SentencePiece's mark of a space."""
SPECIAL = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")


def check_tokenizer_keys(header: Header) -> None:
    """Check that the tokenizer of a GGUF file can be read, and that its rule is known.

    Raises:
        ValueError: A key is missing or has a value that is not supported.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in header.fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = fields["model"]
    if kind not in MODELS:
        raise ValueError(f"its tokenizer {kind!r} (tokenizer.ggml.model) is not supported.")
    if MODELS[kind] not in fields:
        raise ValueError(f"its header lacks tokenizer.ggml.{MODELS[kind]}.")
    for key in SPECIAL:
        if (token := fields.get(key, 0)) >= (count := len(fields["tokens"])):
            raise ValueError(
                f"its header sets tokenizer.ggml.{key} to {token:,}, but lists {count:,} tokens."
            )
    if kind == "gpt2" and fields.get("pre") not in RULES:
        rule = "lacks tokenizer.ggml.pre, the rule by which its tokenizer splits text"
        if "pre" in fields:
            rule = f"sets tokenizer.ggml.pre to {fields['pre']!r}, a rule that is not supported"
        raise ValueError(f"its header {rule}; convert the model again with a newer llama.cpp.")


def apply_rule(tokenizer: Any, header: Header) -> None:
    """Make a tokenizer split text by the rule of its GGUF file.

    Args:
        tokenizer: The tokenizer that transformers read from the file; modified in-place.
        header: The file's header.
    """
    encoder = tokenizer.backend_tokenizer
    if header.fields["tokenizer.ggml.model"] == "llama":
        _mark_spaces(encoder, header.fields.get("tokenizer.ggml.add_space_prefix", True))
        return
    name = header.fields["tokenizer.ggml.pre"]
    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in RULES[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if name in WHOLE_WORDS:
        encoder.model.ignore_merges = True
        tokenizer.add_bos_token = header.fields.get("tokenizer.ggml.add_bos_token", True)


def _mark_spaces(encoder: Tokenizer, prefixed: bool) -> None:
    """Replace spaces by SentencePiece's mark.

    Args:
        encoder: The tokenizer; modified in-place.
        prefixed: Whether a text begins with one more space, even if it begins with a space already.
    """
    marks = [normalizers.Prepend(MARK)] if prefixed else []
    strips = [decoders.Strip(" ", 1, 0)] if prefixed else []
    encoder.pre_tokenizer = None
    encoder.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", MARK)])
    spaces = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*spaces, *strips])
