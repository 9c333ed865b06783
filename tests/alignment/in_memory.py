"""Tokenizers in memory, and a distance of spellings."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def sentencepiece(texts: Iterable[str], size: int, *special: str) -> Tokenizer:
    """Train a tokenizer like Llama's: a space precedes the text; unknown text becomes bytes."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " ")
    raw.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    tokens = ["<unk>", *special, *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=tokens, show_progress=False)
    raw.train_from_iterator(texts, trainer)
    return raw


def byte_level_bpe(texts: Iterable[str], size: int, *special: str) -> Tokenizer:
    """Train a tokenizer like GPT-2's, in which an emoji is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special], **settings)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def edits(a: Sequence[object], b: Sequence[object]) -> int:
    """Compute Levenshtein's distance by its recurrence."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]
