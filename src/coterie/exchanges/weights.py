"""Weighting of clients by their numbers of training tokens, as in FedAvg (arXiv 1602.05629)."""

from typing import Any, ClassVar

from coterie.errors import CoterieError
from coterie.messages import Field, Message, MessageError
from coterie.messages.schema import Reduce
from coterie.transforms.contract import Transform, TransformFacts

TOKENS = Field(
    "tokens", "number of training tokens, used as the client's weight in the mean", "json"
)


class TokenWeights(Transform):
    """A transform that weights clients in the mean by their numbers of training tokens.

    A client declares a number of tokens when the client joins, and again with each upload. The
    number in an upload must not be larger than the number declared when the client joined.
    """

    name: ClassVar[str] = TOKENS.name
    summary: ClassVar[str] = TOKENS.description
    reductions: ClassVar[frozenset[Reduce]] = frozenset()

    def check(self, run: TransformFacts) -> None:
        if not run.schema.averaged:
            raise CoterieError(
                f"The transform {self.name!r} has no effect with the method {run.method!r}, "
                "whose server averages no uploads. Remove it, or choose another method."
            )

    def declare(self, tokens: int) -> int:
        return tokens

    def join(self, client: str, hello: Message) -> int:
        return tokens_of(client, hello)

    def weight(self, client: str, upload: Message, joined: Any) -> float:
        tokens = tokens_of(client, upload)
        if tokens > joined:
            raise MessageError(
                f"The client {client!r} claims {tokens:,} training tokens in its upload, but "
                f"declared {joined:,} when it joined."
            )
        return float(tokens)


def tokens_of(client: str, message: Message) -> int:
    """Return the number of training tokens that a message declares.

    Raises:
        MessageError: If the number is missing or not a positive integer.
    """
    tokens = message.values.get(TOKENS.name)
    if type(tokens) is not int or tokens < 1:
        raise MessageError(f"The client {client!r} did not send its number of training tokens.")
    return tokens
