"""Vocabularies as bytes, so that tokens of different tokenizer families can be compared.

For example, GPT-2 writes the token " the" as "Ġthe" and Llama as "▁the"; BERT omits the space
before a word, and marks the continuation of a word with "##". Here, a token is represented by the
bytes that the token adds to a text.
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
"""Usual names of special tokens, keyed by role. They are used if a tokenizer does not declare
roles."""
SPACE = "\u2581"
"""SentencePiece's character for a space."""
STAND_INS: dict[str, int] = {sign: byte for byte, sign in bytes_to_unicode().items()}
"""The byte that each of GPT-2's printable characters represents."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens, represented by the bytes that the tokens add to a text."""

    tokens: tuple[bytes | None, ...]
    """The bytes that each token adds to a text. The index is the token's id. The entry is None for
    special tokens and for tokens that never occur. Tokens that never occur are unused ids, and
    fallback tokens for bytes that also have an ordinary token."""
    roles: Mapping[str, int]
    """A mapping from roles ("bos", "eos", "unk", "pad") to the ids of special tokens. Roles that
    the tokenizer lacks are left out."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | RawTokenizer) -> "Vocabulary":
        """Read the vocabulary of a fast tokenizer, whose decoder defines the tokens' bytes.

        Raises:
            CoterieError: The tokenizer is not a fast tokenizer.
        """
        if isinstance(tokenizer, RawTokenizer):
            return _of_raw(tokenizer, {})
        raw = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(raw, RawTokenizer):
            raise CoterieError(
                "Vocabularies can be read from fast tokenizers only; save this tokenizer as "
                "tokenizer.json."
            )
        ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ROLES}
        return _of_raw(raw, {role: i for role, i in ids.items() if isinstance(i, int)})

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens and roles."""
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
    """Create a vocabulary from the tokens' bytes.

    Args:
        spellings: A mapping from the id of each token to the token's bytes.
        special: Ids of special tokens.
        roles: A mapping from roles to the ids of special tokens; see `Vocabulary.roles`.
        fallback: Ids of single-byte tokens that are used only if no other token matches. If an
            ordinary token has the same byte, the vocabulary contains None in place of the fallback
            token. Without this rule, Llama's vocabulary would contain "A" twice, and "A" could be
            mapped to a token that Llama has never been trained on.
    """
    excluded = {*special, *roles.values()}
    tokens = {i: token for i, token in spellings.items() if i not in excluded}
    fallbacks = set(fallback)
    ordinary = {token for i, token in tokens.items() if i not in fallbacks}
    tokens = {i: t for i, t in tokens.items() if i not in fallbacks or t not in ordinary}
    size = 1 + max((*spellings, *roles.values()), default=-1)
    ordered = {role: roles[role] for role in ROLES if role in roles}
    return Vocabulary(tuple(tokens.get(i) for i in range(size)), ordered)


def roles_of(named: Mapping[str, int]) -> dict[str, int]:
    """Infer the roles of special tokens from their names.

    Args:
        named: A mapping from names to the ids of special tokens.
    """
    candidates = {
        role: [named[name] for name in names if name in named] for role, names in NAMES.items()
    }
    return {role: ids[0] for role, ids in candidates.items() if ids}


def byte_level(token: str) -> bytes:
    """Convert a token to bytes.

    If the token consists of GPT-2's printable stand-ins for bytes (see `STAND_INS`), the result
    consists of these bytes. Any other token is encoded as UTF-8.
    """
    try:
        return bytes(STAND_INS[character] for character in token)
    except KeyError:
        return token.encode()


def byte_piece(token: str) -> bytes | None:
    """Return the byte represented by a SentencePiece token such as <0x0A>.

    For tokens of any other form, return None.
    """
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(match[1]) if match else None


def _of_raw(tokenizer: RawTokenizer, roles: Mapping[str, int]) -> Vocabulary:
    """Read a tokenizer's vocabulary.

    If `roles` is empty, infer the roles of special tokens from their names.
    """
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
    """List the steps of a tokenizer's decoder in the order in which they are applied.

    The decoder, which converts tokens to text, is described in tokenizer.json.
    """
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _spell(token: str, decoders: Mapping[str, Mapping[str, Any]], added: bool) -> bytes:
    """Return the bytes of a token. The bytes of an added token are those of its own text."""
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
