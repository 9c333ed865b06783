"""The vocabulary of a client's tokenizer in a message: fields, encoding and decoding."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from coterie.alignment.vocabulary import Vocabulary
from coterie.messages import Field, Json, MessageError

MOST_TOKENS, LONGEST_TOKEN, MOST_BYTES = 2**19, 2**10, 2**23
"""The largest number of tokens in a vocabulary, of bytes in a token, and of bytes in all tokens.

Each limit is twice the largest value among current tokenizers.
"""
VOCABULARY = (
    Field(
        "vocabulary",
        "bytes of all tokens, concatenated; length of each token",
        {"spelling": "uint8", "lengths": "int32"},
    ),
    Field("roles", "tokens that begin, end or pad a text", "json"),
)


def encode_vocabulary(vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Encode a vocabulary as tensors for a message. A token without bytes has the length -1."""
    spelling = b"".join(token or b"" for token in vocabulary.tokens)
    lengths = [-1 if token is None else len(token) for token in vocabulary.tokens]
    return {
        "spelling": torch.frombuffer(bytearray(spelling), dtype=torch.uint8),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def decode_vocabulary(tensors: Mapping[str, Tensor], roles: Json) -> Vocabulary:
    """Read a vocabulary from a message.

    Args:
        tensors: The group `vocabulary` of the message.
        roles: The value `roles` of the message.

    Returns:
        The vocabulary.

    Raises:
        MessageError: The message has no valid vocabulary.
    """
    empty = torch.zeros(0)
    lengths, spelling = (tensors.get(name, empty) for name in ("lengths", "spelling"))
    valid = lengths.dim() == spelling.dim() == 1 and len(lengths) > 0 and isinstance(roles, dict)
    valid = valid and len(lengths) <= MOST_TOKENS and int(lengths.max()) <= LONGEST_TOKEN
    if not valid or int(lengths.clamp(min=0).long().sum()) != len(spelling):
        raise MessageError("The client did not send a valid vocabulary.")
    if len(spelling) > MOST_BYTES:
        raise MessageError(f"The client's vocabulary has more than {MOST_BYTES:,} bytes.")
    if not all(isinstance(i, int) and 0 <= i < len(lengths) for i in roles.values()):
        raise MessageError(
            "The client's vocabulary assigns a role to a token ID that it does not contain."
        )
    data, sizes = spelling.numpy().tobytes(), lengths.tolist()
    ends = accumulate(max(0, size) for size in sizes)
    tokens = (None if n < 0 else data[end - n : end] for n, end in zip(sizes, ends, strict=True))
    return Vocabulary(tuple(tokens), roles)
