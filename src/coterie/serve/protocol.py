"""Requests and replies of OpenAI's API: what is accepted, and how errors are reported."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from coterie.bases import Tokenizer
from coterie.data.items import Turn
from coterie.serve.scheduler import Token

IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that do not change the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Unsupported fields, with the values that do not change the answer."""
STOPS = 4
"""The maximum number of texts in `stop`."""


class ApiError(Exception):
    """A reply that reports an error.

    Args:
        status: The HTTP status.
        message: A sentence for the user.
        field: The field of the request that is wrong, if any.
        code: A machine-readable name of the error, if OpenAI defines one.
    """

    def __init__(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code

    def body(self) -> dict[str, Any]:
        """Return the body of the reply."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        error = {
            "message": str(self),
            "type": kind if self.status < 500 else "server_error",
            "param": self.field,
            "code": self.code,
        }
        return {"error": error}


class Part(BaseModel):
    """A part of a request. A field with the value null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Part):
    """The field `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # changes no text, and is not supported


class Extension(Part):
    """The field `coterie`, which OpenAI's API lacks."""

    routing: bool = False
    """Whether the reply contains the weights of generalist and specialist for each token."""


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Generation(Part):
    """Fields of all requests for text."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] = []
    coterie: Extension = Extension()

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """The number of alternatives that are reported with each token's log-probability."""
        return None


class TextPart(Part):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] = []

    @property
    def turn(self) -> Turn:
        """The message as a turn."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Turn("system" if self.role == "developer" else self.role, text)


class ChatRequest(Generation):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def turns(self) -> list[Turn]:
        """The messages as turns.

        Raises:
            ApiError: The last message is not the user's.
        """
        if self.messages[-1].role != "user":
            raise ApiError(400, "The last message must have the role user.", "messages")
        return [message.turn for message in self.messages]


class CompletionRequest(Generation):
    """A request to /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


R = TypeVar("R", bound=Generation)


def parse_request(kind: type[R], body: bytes) -> R:
    """Parse the body of a request.

    Args:
        kind: The class of the request.
        body: The body, in JSON.

    Raises:
        ApiError: The body is invalid, or requests what is not supported.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON ({error}).") from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object.")
    known = kind.model_fields
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or (name in IGNORED and name not in known):
            continue
        if name in known:
            rest[name] = value
        elif not any(_equal(value, neutral) for neutral in NEUTRAL.get(name, ())):
            raise ApiError(400, _unsupported(name), name[:100])
    try:
        return kind.model_validate(rest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))[:100]
        raise ApiError(400, f"`{field}` is invalid: {first['msg'].lower()}.", field) from None


def _equal(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _unsupported(name: str) -> str:
    shown = name if len(name) <= 50 else f"{name[:50]}..."
    if name in NEUTRAL:
        return f"`{shown}` is not supported with this value; leave the field out."
    return f"The field `{shown}` is not supported; leave it out."


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's reply."""

    def described(id: int, logprob: float) -> dict[str, Any]:
        text = _token_text(tokenizer, id)
        # A token that is a part of a character has no text of its own.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    content = [
        {
            **described(token.id, token.logprob),
            "top_logprobs": [described(*alternative) for alternative in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[Token], tokenizer: Tokenizer, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the field `logprobs` of a completion's reply, and the offset of the next token.

    Args:
        tokens: The tokens.
        tokenizer: The tokenizer.
        offset: The number of characters of the tokens before these tokens.
    """
    texts = [_token_text(tokenizer, token.id) for token in tokens]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    tops = [
        {_token_text(tokenizer, id): _finite(logprob) for id, logprob in token.top}
        for token in tokens
    ]
    described = {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return described, offset + sum(map(len, texts))


def routing(tokens: Sequence[Token], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the weights of the roles of experts for each token, for the field `coterie`."""

    def rounded(roles: Mapping[str, float]) -> dict[str, float]:
        return {role: round(weight, 4) for role, weight in roles.items()}

    return [{"token": _token_text(tokenizer, t.id), "weights": rounded(t.roles)} for t in tokens]


def usage(prompt: int, answer: int) -> dict[str, int]:
    """Return the field `usage` of a reply, from the numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _token_text(tokenizer: Tokenizer, id: int) -> str:
    text: Any = tokenizer.decode([id])
    return text


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # OpenAI's value for improbable tokens
