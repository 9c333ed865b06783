"""Encoding of a client's texts as splits of tokens.

Plain text becomes one stream (`Tokens`). Prompts with answers, and conversations, become separate
samples (`Examples`). Prompts with several answers to compare become groups of samples (`Groups`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
    splits: dict[str, Any] = {}
    for split in SPLITS:
        owner = f"The {split} text of client {name}"
        splits[split] = encoded(getattr(texts, split), tokenizer, data, split, owner)
    kept, moved = divided(splits["validation"], data.window, data.validation_for_training)
    if moved is not kept:
        splits |= {"train": joined([splits["train"], moved]), "validation": kept}
    return ClientData(**splits)


def divided(split: Split, window: int, fraction: float) -> tuple[Split, Split]:
    """Divide a split into two parts, each spread evenly over the split.

    Args:
        split: The split.
        window: The number of tokens predicted in each sample of plain text.
        fraction: The fraction of the samples in the second part.

    Returns:
        The two parts. Tokens of plain text after its last whole sample are in both parts. If one of
        the parts would be empty, both are the whole split.
    """
    order = torch.arange(len(split.samples(window, window + 1)))
    second = order * fraction % 1 + fraction >= 1
    if second.all() or not second.any():
        return split, split
    return split.without(order[second], window), split.without(order[~second], window)


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
