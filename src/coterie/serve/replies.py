"""The replies to requests for text, as JSON or as a stream of events."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from coterie.serve.models import ServedModel
from coterie.serve.protocol import (
    ChatRequest,
    Generation,
    chat_logprobs,
    routing,
    text_logprobs,
    usage,
)
from coterie.serve.scheduler import Piece, Token


class Reply:
    """The reply to a request, composed from the pieces of the answer.

    Args:
        request: The request.
        model: The model that answers.
        prompt: The number of tokens of the prompt.
    """

    def __init__(self, request: Generation, model: ServedModel, prompt: int) -> None:
        self.request, self.model, self.prompt = request, model, prompt
        self.chat = isinstance(request, ChatRequest)
        self.answer = self.offset = 0
        kind = "chat.completion" if self.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the reply with all pieces of the answer."""
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(content, tokens, pieces[-1].reason)
        return {**self._head, "choices": [choice], "usage": usage(self.prompt, self.answer)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the event that begins a streamed reply, if there is such an event."""
        if self.chat:
            yield self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, ())])

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events for a piece of a streamed answer."""
        detailed = self.request.top is not None or self.request.coterie.routing
        if piece.text or detailed:
            content = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
            reason = None if self.chat else piece.reason
            yield self._event([self._choice(content, piece.tokens, reason)])
        else:
            self.answer += len(piece.tokens)
        if piece.reason and (self.chat or not (piece.text or detailed)):
            content = {"delta": {}} if self.chat else {"text": ""}
            yield self._event([self._choice(content, (), piece.reason)])
        if piece.reason and self.request.stream_options.include_usage:
            yield {**self._event([]), "usage": usage(self.prompt, self.answer)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "choices": choices}
        return event | ({"usage": None} if self.request.stream_options.include_usage else {})

    def _choice(
        self, content: dict[str, Any], tokens: Sequence[Token], reason: str | None = None
    ) -> dict[str, Any]:
        """Return the field `choices[0]`, and count the tokens."""
        tokenizer = self.model.weights.base.tokenizer
        self.answer += len(tokens)
        logprobs = None
        if self.request.top is not None and tokens:
            if self.chat:
                logprobs = chat_logprobs(tokens, tokenizer)
            else:
                logprobs, self.offset = text_logprobs(tokens, tokenizer, self.offset)
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        if self.request.coterie.routing:
            weights = routing(tokens, tokenizer) if self.model.weights.routed else None
            choice["coterie"] = {"routing": weights}
        return choice
