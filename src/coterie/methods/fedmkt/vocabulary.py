"""A client's vocabulary as a message: the fields that hold it, writing and reading."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from coterie.alignment.vocabulary import Vocabulary
from coterie.messages import Field, Json, MessageError

MOST_TOKENS, LONGEST_TOKEN, MOST_BYTES = 2**19, 2**10, 2**23
"""Of a client's vocabulary, of a token, and of all: twice what the largest of today's have."""
VOCABULARY = (
    Field(
        "vocabulary",
        "bytes of all tokens, concatenated, and the length of each",
        {"spelling": "uint8", "lengths": "int32"},
    ),
    Field("roles", "tokens that begin, end or pad a text", "json"),
)


def spelt(vocabulary: Vocabulary) -> dict[str, Tensor]:
    """A vocabulary for a message; -1 is the length of a token without bytes."""
    spelling = b"".join(token or b"" for token in vocabulary.tokens)
    lengths = [-1 if token is None else len(token) for token in vocabulary.tokens]
    return {
        "spelling": torch.frombuffer(bytearray(spelling), dtype=torch.uint8),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def read(vocabulary: Mapping[str, Tensor], roles: Json) -> Vocabulary:
    """The vocabulary in a message; raises MessageError if there is none."""
    empty = torch.zeros(0)
    lengths, spelling = (vocabulary.get(name, empty) for name in ("lengths", "spelling"))
    sound = lengths.dim() == spelling.dim() == 1 and len(lengths) > 0 and isinstance(roles, dict)
    sound = sound and len(lengths) <= MOST_TOKENS and int(lengths.max()) <= LONGEST_TOKEN
    if not sound or int(lengths.clamp(min=0).long().sum()) != len(spelling):
        raise MessageError("The client sent no vocabulary.")
    if len(spelling) > MOST_BYTES:
        raise MessageError(f"The client's vocabulary has more than {MOST_BYTES:,} bytes.")
    if not all(isinstance(i, int) and 0 <= i < len(lengths) for i in roles.values()):
        raise MessageError("The client's vocabulary assigns roles to unknown tokens.")
    spelt, sizes = spelling.numpy().tobytes(), lengths.tolist()
    after = accumulate(max(0, size) for size in sizes)
    tokens = (None if n < 0 else spelt[end - n : end] for n, end in zip(sizes, after, strict=True))
    return Vocabulary(tuple(tokens), roles)
