"""Requests of OpenAI's API: what is accepted, and how errors are reported."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from coterie.data.items import Turn

IGNORED = {
    "annotations",
    "cache_control",
    "cache_prompt",
    "id",
    "include_obfuscation",
    "metadata",
    "name",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "provider_specific_fields",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "safety_identifier",
    "service_tier",
    "store",
    "thinking_blocks",
    "user",
}
"""Fields that do not change the answer, in any object of a request."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (0,)),
    **dict.fromkeys(("frequency_penalty", "no_repeat_ngram_size", "presence_penalty"), (0,)),
    **dict.fromkeys(("min_p", "min_tokens", "top_a"), (0,)),
    **dict.fromkeys(("top_k", "top_n_sigma"), (0, -1)),
    **dict.fromkeys(("length_penalty", "repeat_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("best_of", "n", "tfs_z", "typical_p"), (1,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("continue_final_message", "echo", "ignore_eos"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("bad_words", "functions", "stop_token_ids", "tool_calls", "tools"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    **dict.fromkeys(("grammar", "refusal", "suffix"), ("",)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
}
"""Unsupported fields of OpenAI's API and of other servers, with the values that do not change the
answer."""
UNSUPPORTED = "extra_forbidden"
"""The type of pydantic's errors for unsupported fields."""
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
        error = {"message": str(self), "type": kind if self.status < 500 else "server_error"}
        return {"error": {**error, "param": self.field, "code": self.code}}


class Part(BaseModel):
    """An object in a request. A field with the value null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, values: Any) -> Any:
        """Drop the fields that do not change the answer."""
        if not isinstance(values, dict):
            raise PydanticCustomError("object", "input should be an object")
        known = cls.model_fields
        return {
            name: value
            for name, value in values.items()
            if value is not None and (name in known or not _is_ignored(name, value))
        }


def _is_ignored(name: str, value: Any) -> bool:
    if name in IGNORED:
        return True
    return any(
        isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
        for neutral in NEUTRAL.get(name, ())
    )


class StreamOptions(Part):
    """The field `stream_options`."""

    include_usage: bool = False


class Extension(Part):
    """The field `coterie`, which OpenAI's API lacks."""

    routing: bool = False
    """Whether the reply contains the weights of generalist and specialist for each token."""


def _as_list(value: Any) -> Any:
    """Return a string as a list of one string."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("strings", "input should be a string or an array")
    return [value] if isinstance(value, str) else value


def _as_text_parts(value: Any) -> Any:
    """Return a string as the parts of a message's content."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else _as_list(value)


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
    stop: Annotated[list[Stop], Field(max_length=STOPS), BeforeValidator(_as_list)] = []
    coterie: Extension = Extension()

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
    content: Annotated[list[TextPart], BeforeValidator(_as_text_parts)]

    @property
    def turn(self) -> Turn:
        """The message as a turn."""
        text = "".join(part.text for part in self.content)
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

    prompt: Annotated[list[str], Field(min_length=1, max_length=1), BeforeValidator(_as_list)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        return self.logprobs


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
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """Return the reply to an invalid request. Unsupported fields are reported first."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(errors, key=lambda each: each["type"] != UNSUPPORTED)
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
    field = "".join(parts).removeprefix(".")[:100]
    if first["type"] != UNSUPPORTED:
        return ApiError(400, f"`{field}` is invalid: {first['msg'].lower()}.", field)
    if first["loc"][-1] in NEUTRAL:
        message = f"`{field}` is not supported with this value; leave the field out."
    else:
        message = f"The field `{field}` is not supported; leave it out."
    return ApiError(400, message, field)
