"""Weights of clients by their numbers of training tokens, as in FedAvg (arXiv 1602.05629).

With `aggregation: {weights: tokens}`, a client declares its number of training tokens when it
joins, and again with each upload. The number in an upload is the client's weight in the mean. It
must not be larger than the number declared when the client joined.
"""

from dataclasses import replace

from coterie.messages import Field, Message, MessageError

TOKENS = Field(
    "tokens", "number of training tokens, used as the client's weight in the mean", "json"
)


def with_tokens(message: Message, tokens: int) -> Message:
    """Return a client's first message, or an upload, with the client's number of tokens."""
    return replace(message, values={**message.values, TOKENS.name: tokens})


def tokens_of(client: str, message: Message) -> int:
    """Return the number of training tokens that a message declares.

    Raises:
        MessageError: If the number is missing or not a positive integer.
    """
    tokens = message.values.get(TOKENS.name)
    if type(tokens) is not int or tokens < 1:
        raise MessageError(f"The client {client!r} did not send its number of training tokens.")
    return tokens


def weight_of(client: str, upload: Message, declared: int) -> float:
    """Return a client's weight in the mean.

    Args:
        client: The client's name.
        upload: The client's upload.
        declared: The number of training tokens that the client declared when it joined.

    Raises:
        MessageError: If the number in the upload is invalid, or larger than `declared`.
    """
    tokens = tokens_of(client, upload)
    if tokens > declared:
        raise MessageError(
            f"The client {client!r} claims {tokens:,} training tokens in its upload, but "
            f"declared {declared:,} when it joined."
        )
    return float(tokens)
