"""The replies to requests for text, as JSON or as a stream of events."""

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from coterie.serve.models import ServedModel
from coterie.serve.protocol import ChatRequest, Generation
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
        self.tokenizer = model.weights.base.tokenizer
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
        return {**self._head, "choices": [choice], "usage": self._usage()}

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
            yield {**self._event([]), "usage": self._usage()}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "choices": choices}
        return event | ({"usage": None} if self.request.stream_options.include_usage else {})

    def _choice(
        self, content: dict[str, Any], tokens: Sequence[Token], reason: str | None = None
    ) -> dict[str, Any]:
        """Return the field `choices[0]`, and count the tokens."""
        self.answer += len(tokens)
        logprobs = None
        if self.request.top is not None and tokens:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._text_logprobs(tokens)
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        if self.request.coterie.routing:
            weights = self._routing(tokens) if self.model.weights.routed else None
            choice["coterie"] = {"routing": weights}
        return choice

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the field `logprobs` of a chat's reply."""

        def described(id: int, logprob: float) -> dict[str, Any]:
            text = self._text_of(id)
            # A token that is a part of a character has no text of its own.
            data = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": _finite(logprob), "bytes": data}

        content: list[dict[str, Any]] = []
        for token in tokens:
            alternatives = [described(*alternative) for alternative in token.top]
            content.append({**described(token.id, token.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _text_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the field `logprobs` of a completion's reply, and count the characters."""
        texts = [self._text_of(token.id) for token in tokens]
        *offsets, self.offset = accumulate(map(len, texts), initial=self.offset)
        tops = [{self._text_of(id): _finite(logprob) for id, logprob in t.top} for t in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _routing(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """Return the weights of the roles of experts for each token, for the field `coterie`."""
        described = []
        for token in tokens:
            weights = {role: round(weight, 4) for role, weight in token.roles.items()}
            described.append({"token": self._text_of(token.id), "weights": weights})
        return described

    def _usage(self) -> dict[str, int]:
        """Return the field `usage`, with the numbers of tokens."""
        prompt, answer = self.prompt, self.answer
        total = prompt + answer
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": total}

    def _text_of(self, id: int) -> str:
        text: Any = self.tokenizer.decode([id])
        return text


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # OpenAI's value for improbable tokens
