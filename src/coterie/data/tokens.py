"""Encoding of a client's texts as splits of tokens.

Plain text becomes one stream (`Tokens`). Prompts with answers, and conversations, become separate
samples (`Examples`). Prompts with several answers to compare become groups of samples (`Groups`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from coterie.bases import context_token
from coterie.data.chat import chat_template
from coterie.data.control import control_tokens, refuse_control
from coterie.data.examples import Encoding, joined
from coterie.data.parts import bare_encoder
from coterie.data.spec import DataSpec
from coterie.data.split import Split
from coterie.data.texts import SPLITS, Texts


@dataclass(frozen=True)
class ClientData:
    """A client's three splits as tokens."""

    train: Split
    validation: Split
    test: Split


def tokenise(
    texts: Texts[Any], tokenizer: PreTrainedTokenizerBase, data: DataSpec, name: str
) -> ClientData:
    """Encode a client's texts as splits, and truncate each split to its limit.

    In plain text, an end-of-text token separates the documents.

    Args:
        texts: The client's texts or items.
        tokenizer: The base's tokenizer.
        data: The run file's section `data:`, with the client's own limits.
        name: The client's name, for error messages.

    Raises:
        CoterieError: A split of plain text has fewer than window + 1 tokens, a split of samples has
            no sample that fits the window, or the tokenizer is unsuitable. The error is also raised
            if a text contains control tokens although `data.special_tokens` is `refuse`.
    """
    splits = {}
    for split in SPLITS:
        owner = f"The {split} text of client {name}"
        splits[split] = encoded(getattr(texts, split), tokenizer, data, split, owner)
    return ClientData(**splits)


def encoded(
    items: Sequence[Any], tokenizer: PreTrainedTokenizerBase, data: DataSpec, split: str, owner: str
) -> Split:
    """Encode documents or items as a split, and truncate the split to its limit.

    Args:
        items: Documents or items.
        tokenizer: The base's tokenizer.
        data: The run file's section `data:`.
        split: The name of the split: train, validation, test or public.
        owner: The words with which an error message begins, such as "The public text".

    Raises:
        CoterieError: A split of plain text has fewer than window + 1 tokens, a split of samples has
            no sample that fits the window, or the tokenizer is unsuitable. The error is also raised
            if a text contains control tokens although `data.special_tokens` is `refuse`.
    """
    encoder, end = bare_encoder(tokenizer)
    kind = data.bound
    chats = kind.has_chats(items)
    template = chat_template(tokenizer, data.chat_template) if chats else None
    if data.special_tokens == "refuse":
        refuse_control(items, control_tokens(tokenizer, template), owner)
    ends, limit = (context_token(tokenizer), end), getattr(data.limits, split)
    return kind.encode(items, Encoding(encoder, ends, data.window, limit, owner, template, split))


def pooled(datas: Sequence[ClientData], public: Split | None = None) -> ClientData:
    """Concatenate all clients' splits, for centralised training.

    Args:
        datas: The splits of each client.
        public: The public set, which is appended to the training split, or None if there is none.
    """
    splits = {split: [getattr(data, split) for data in datas] for split in SPLITS}
    splits["train"] += [] if public is None else [public]
    return ClientData(**{split: joined(parts) for split, parts in splits.items()})
