"""Weights of clients in the mean: their numbers of training tokens (McMahan et al., 1602.05629)."""

from typing import Any, ClassVar

from coterie.aggregation.transform import Transform, TransformFacts
from coterie.errors import CoterieError
from coterie.messages import Field, Message, MessageError
from coterie.messages.schema import Reduce

TOKENS = Field("tokens", "number of training tokens, the client's weight in the mean", "json")


class TokenWeights(Transform):
    """Every client's weight in the mean is its number of training tokens.

    The client declares it when it joins and with every upload, which may claim fewer tokens.
    """

    name: ClassVar[str] = TOKENS.name
    summary: ClassVar[str] = TOKENS.description
    reductions: ClassVar[frozenset[Reduce]] = frozenset()

    def check(self, run: TransformFacts) -> None:
        """Refuse a method without a mean."""
        if not run.schema.reduced("mean"):
            raise CoterieError(
                f"The transform {self.name!r} has no effect with the method {run.method!r}, in "
                "which the server takes no mean; remove it."
            )

    def declare(self, tokens: int) -> int:
        """Return the number of training tokens."""
        return tokens

    def join(self, client: str, hello: Message) -> int:
        """Return the largest weight that the client may claim."""
        return tokens_of(client, hello)

    def weight(self, client: str, upload: Message, joined: Any) -> float:
        """Return the number of tokens that came with the upload."""
        tokens = tokens_of(client, upload)
        if tokens > joined:
            raise MessageError(
                f"{client} claims {tokens:,} training tokens, but declared {joined:,} when it "
                "joined."
            )
        return float(tokens)


def tokens_of(client: str, message: Message) -> int:
    """Return the number of training tokens in a message."""
    tokens = message.values.get(TOKENS.name)
    if type(tokens) is not int or tokens < 1:
        raise MessageError(f"{client} did not send its number of training tokens.")
    return tokens
