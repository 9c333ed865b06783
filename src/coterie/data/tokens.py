"""From a client's texts to its splits as tokens.

Plain text becomes one stream (`Tokens`); prompts with answers, and conversations, stay samples of
their own (`Examples`), and answers that are compared are groups of samples (`Groups`).
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
    """The client's texts as tokens, with end-of-text between documents and limits applied.

    With `data.instructions` and its kin, `texts` become samples, or pairs of them. Raises
    `CoterieError` if a split of the client `name` holds fewer than window + 1 tokens, or no sample
    that fits the window, or if the tokenizer cannot be used.
    """
    splits = {}
    for split in SPLITS:
        owner = f"Client {name}: its {split} text"
        splits[split] = encoded(getattr(texts, split), tokenizer, data, split, owner)
    return ClientData(**splits)


def encoded(
    items: Sequence[Any], tokenizer: PreTrainedTokenizerBase, data: DataSpec, split: str, owner: str
) -> Split:
    """Documents or samples, up to the limit of a split (or public).

    Raises `CoterieError` as `tokenise` does; `owner` begins it: "The public text".
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
    """All clients' tokens as one client's, for centralised training; each split is concatenated.

    `public` is trained on, too.
    """
    splits = {split: [getattr(data, split) for data in datas] for split in SPLITS}
    splits["train"] += [] if public is None else [public]
    return ClientData(**{split: joined(parts) for split, parts in splits.items()})
