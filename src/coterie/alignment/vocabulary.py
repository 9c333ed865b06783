"""A tokenizer's vocabulary in bytes, so that tokens of different families can be compared.

GPT-2 writes the token " the" as "Ġthe", Llama as "▁the", and BERT writes a word without its space
and the rest of a word with "##". Here each of them is the bytes that it adds to a text.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coterie.errors import CoterieError

ROLES = ("bos", "eos", "unk", "pad")
NAMES = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "[PAD]"),
}
"""What special tokens are usually called, for tokenizers that do not say."""
SPACE = "\u2581"
"""SentencePiece's sign for a space."""
STAND_INS: dict[str, int] = {sign: byte for byte, sign in bytes_to_unicode().items()}
"""GPT-2's printable characters for bytes."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens as canonical bytes."""

    tokens: tuple[bytes | None, ...]
    """By id, the bytes that a token adds to a text; None: a special token, or one that no text
    has (an empty id, or a byte's token where that byte has a token of its own)."""
    roles: Mapping[str, int]
    """Ids of the tokens "bos", "eos", "unk" and "pad", those that there are."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | RawTokenizer) -> "Vocabulary":
        """The vocabulary of a fast tokenizer; its decoder tells how it writes tokens.

        Raises CoterieError for a tokenizer that is not a fast one.
        """
        if isinstance(tokenizer, RawTokenizer):
            return _of_raw(tokenizer, {})
        raw = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(raw, RawTokenizer):
            raise CoterieError(
                "Vocabularies can be read from fast tokenizers only; save this one as "
                "tokenizer.json."
            )
        ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ROLES}
        return _of_raw(raw, {role: i for role, i in ids.items() if isinstance(i, int)})

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens and roles: equal vocabularies have equal ones."""
        digest = blake2b(digest_size=16)
        digest.update(json.dumps(dict(self.roles), sort_keys=True).encode())
        for token in self.tokens:
            digest.update(b"none;" if token is None else b"%d:%b;" % (len(token), token))
        return digest.hexdigest()


def spelled(
    spellings: Mapping[int, bytes],
    special: Iterable[int],
    roles: Mapping[str, int],
    fallback: Iterable[int] = (),
) -> Vocabulary:
    """A vocabulary of tokens' bytes by id, less the special ones.

    fallback: ids of tokens for single bytes that text becomes only where nothing else spells it.
    Those that something else does spell have no bytes: or Llama's "A" would be found twice, and
    the nearest token of another vocabulary's "A" would be one that its model has never seen.
    """
    apart = {*special, *roles.values()}
    tokens = {i: token for i, token in spellings.items() if i not in apart}
    idle = set(fallback)
    pieces = {token for i, token in tokens.items() if i not in idle}
    tokens = {i: token for i, token in tokens.items() if i not in idle or token not in pieces}
    size = 1 + max((*spellings, *roles.values()), default=-1)
    ordered = {role: roles[role] for role in ROLES if role in roles}
    return Vocabulary(tuple(tokens.get(i) for i in range(size)), ordered)


def roles_of(named: Mapping[str, int]) -> dict[str, int]:
    """The roles of special tokens, by their usual names."""
    found = {
        role: [named[name] for name in names if name in named] for role, names in NAMES.items()
    }
    return {role: ids[0] for role, ids in found.items() if ids}


def byte_level(token: str) -> bytes:
    """The bytes of a token in GPT-2's printable stand-ins; of any other text, its UTF-8."""
    try:
        return bytes(STAND_INS[character] for character in token)
    except KeyError:
        return token.encode()


def byte_piece(token: str) -> bytes | None:
    """The byte of a SentencePiece token such as <0x0A>; None of another token."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(found[1]) if found else None


def _of_raw(tokenizer: RawTokenizer, roles: Mapping[str, int]) -> Vocabulary:
    """roles: what is known of them; where nothing is, they are told by their names."""
    described = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {token["content"] for token in described["added_tokens"]}
    special = {
        token["content"]: token["id"] for token in described["added_tokens"] if token["special"]
    }
    if not roles:
        roles = roles_of(special)
        unknown = described["model"].get("unk_token")
        if unknown in ids:
            roles["unk"] = ids[unknown]
    decoders = {step["type"]: step for step in _steps(described["decoder"])}
    spellings = {i: _spell(token, decoders, token in added) for token, i in ids.items()}
    fallback = ()
    if "ByteFallback" in decoders:
        fallback = [i for token, i in ids.items() if byte_piece(token) is not None]
    return spelled(spellings, special.values(), roles, fallback)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's steps, as tokenizer.json describes them."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _spell(token: str, decoders: Mapping[str, Mapping[str, Any]], added: bool) -> bytes:
    """The bytes of a token; of an added one, which is matched in the text itself, its own."""
    if "ByteLevel" in decoders:
        return token.encode() if added else byte_level(token)
    if "WordPiece" in decoders:
        prefix = decoders["WordPiece"]["prefix"]
        return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
    if "ByteFallback" in decoders and (byte := byte_piece(token)) is not None:
        return byte
    if "Metaspace" in decoders or _replaces_space(decoders.get("Replace")):
        return token.replace(SPACE, " ").encode()
    return token.encode()


def _replaces_space(step: Mapping[str, Any] | None) -> bool:
    return step is not None and step["pattern"] == {"String": SPACE} and step["content"] == " "
