"""Tokenizers of each kind, with markers of chat templates that strip the space around them."""

from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
TEXT = [
    "The answer is yes, and no. What do you say? Hello there, so it is; don't stop!",
    "user assistant system turn end of text start header id think café naïve 漢字 ﬁne",
    "\n\n ... :> |>< [INST] ### User: Assistant: 1 22 333  four   spaces\n\ttabs",
] * 4
MARKERS = [
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|im_start|>", "<|im_end|>",
    "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<|message|>", "<|start|>", "<|return|>", "<|channel|>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<think>", "</think>",
]  # fmt: skip
RIGHT, LEFT = {"rstrip": True}, {"lstrip": True}
STRIPS: dict[str, dict[str, bool]] = {
    **{"plain": {}, "right": RIGHT, "left": LEFT, "both": {**LEFT, **RIGHT}},
    **{"word": {"single_word": True}, "normalised": {"normalized": True, **RIGHT}},
}


def _parts(kind: str) -> tuple[Any, Any, Any, Any, Any]:
    """Return the model, trainer, normaliser, pre-tokenizer and decoder of a kind."""
    special = ["<unk>", "<s>", "</s>"]
    options: Any = {"special_tokens": special, "show_progress": False}
    bytes = pre_tokenizers.ByteLevel.alphabet()
    bpe = models.BPE(unk_token="<unk>", byte_fallback=True)
    tokens = [*special, *(f"<0x{n:02X}>" for n in range(256))]
    merges = trainers.BpeTrainer(vocab_size=600, **options | {"special_tokens": tokens})
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    back = decoders.Sequence(steps)
    if kind == "bytes":
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=bytes, **options)
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return models.BPE(), trainer, None, split, decoders.ByteLevel()
    if kind in ("first", "always"):
        return bpe, merges, None, pre_tokenizers.Metaspace(prepend_scheme=kind), back
    if kind == "prepend":
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        return bpe, merges, normalizers.Sequence(steps), None, back
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", **options)
        split = pre_tokenizers.Metaspace(prepend_scheme="always")
        return models.Unigram(), trainer, normalizers.NFKC(), split, decoders.Metaspace()
    trainer = trainers.WordPieceTrainer(vocab_size=300, **options)
    normal = normalizers.BertNormalizer(lowercase=True)
    split = pre_tokenizers.BertPreTokenizer()
    return models.WordPiece(unk_token="<unk>"), trainer, normal, split, decoders.WordPiece()


KINDS = ("bytes", "first", "always", "prepend", "unigram", "wordpiece")


@cache
def tokenizer(kind: str, strip: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose markers strip the space on some sides."""
    model, trainer, normal, split, decoder = _parts(kind)
    made = Tokenizer(model)
    if normal is not None:
        made.normalizer = normal
    if split is not None:
        made.pre_tokenizer = split
    made.train_from_iterator(TEXT, trainer)
    made.decoder = decoder
    how = {"special": True, "normalized": False, **STRIPS[strip]}
    made.add_tokens([AddedToken(marker, **how) for marker in MARKERS])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
