"""Requests as programs written for OpenAI's API and for other servers send them."""

import json
from typing import Any

import httpx
import pytest

from coterie.serve import protocol
from coterie.serve.models import Models
from coterie.serve.protocol import IGNORED, NEUTRAL, ApiError, ChatRequest, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"role": "user", "content": "Name a sea."}
ASK: dict[str, Any] = {"model": "anna", "messages": [QUESTION], "temperature": 0, "max_tokens": 8}
LEVELS = ["request", "options", "message", "part"]
"""The objects of a chat request."""


def with_fields(level: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a chat request with additional fields in one of its objects."""
    extra = {name: fields if name == level else {} for name in LEVELS}
    part = {"type": "text", "text": "Name a sea.", **extra["part"]}
    message = {"role": "user", "content": [part], **extra["message"]}
    return {**ASK, "stream_options": extra["options"], "messages": [message], **extra["request"]}


def parsed(body: dict[str, Any]) -> ChatRequest:
    return protocol.parse_request(ChatRequest, json.dumps(body).encode())


def refusal(kind: type[ChatRequest | CompletionRequest], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        protocol.parse_request(kind, json.dumps(body).encode())
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("level", LEVELS)
def test_fields_without_effect_are_ignored_in_every_object(level: str) -> None:
    plain = parsed(with_fields(level, {}))
    for name in IGNORED:
        assert parsed(with_fields(level, {name: {"any": ["value"]}})) == plain
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            assert parsed(with_fields(level, {name: value})) == plain


@pytest.mark.parametrize("level", LEVELS)
def test_other_fields_are_refused_in_every_object_by_their_place(level: str) -> None:
    place = {"request": "", "options": "stream_options."}.get(level, "messages[0].")
    place += {"part": "content[0]."}.get(level, "")
    for name in ("unheard_of", *NEUTRAL):
        error = refusal(ChatRequest, with_fields(level, {name: ["a value with an effect"]}))
        assert error.field == f"{place}{name}"
        assert f"`{place}{name}` is not supported" in str(error)


def test_common_fields_of_messages_and_neutral_samplers_are_accepted(server: httpx.Client) -> None:
    """Send earlier answers as agents do, and the defaults of other servers for all samplers."""
    answer = {
        "role": "assistant",
        "content": [{"type": "text", "text": "The North Sea.", "annotations": []}],
        **{"reasoning_content": "A sea is asked for.", "tool_calls": [], "function_call": None},
        **{"refusal": None, "provider_specific_fields": {"refusal": None}},
    }
    cached = {"type": "text", "text": "Name a sea.", "cache_control": {"type": "ephemeral"}}
    samplers = {"top_k": -1, "min_p": 0, "typical_p": 1.0, "repetition_penalty": 1.0, "mirostat": 0}
    rich = {"messages": [QUESTION, answer, {"role": "user", "content": [cached]}], **samplers}
    bare = [QUESTION, {"role": "assistant", "content": "The North Sea."}, QUESTION]
    replies = [server.post(CHAT, json={**ASK, **body}) for body in (rich, {"messages": bare})]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]


AUDIO = {"type": "input_audio"}
CALLS = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def content(value: Any) -> dict[str, Any]:
    return {"messages": [{**QUESTION, "content": value}]}


@pytest.mark.parametrize(
    ("kind", "changes", "field", "reason"),
    [
        (ChatRequest, content([IMAGE]), "image_url", "supported"),
        (ChatRequest, content([AUDIO]), "messages[0].content[0].type", "should be 'text'"),
        (ChatRequest, content(5), "messages[0].content", "a string or an array"),
        (ChatRequest, CALLS, "messages[0].tool_calls", "not supported"),
        (ChatRequest, {"messages": ["Name a sea."]}, "messages[0]", "should be an object"),
        (ChatRequest, {"stop": ["a", 5]}, "stop[1]", "valid string"),
        (ChatRequest, {"stop": ["a"] * 5}, "stop", "at most 4"),
        (ChatRequest, {"stop": 5}, "stop", "a string or an array"),
        (CompletionRequest, {"prompt": ["a", "b"]}, "prompt", "at most 1"),
        (CompletionRequest, {"prompt": [[1, 2]]}, "prompt[0]", "valid string"),
        (CompletionRequest, {"prompt": {}}, "prompt", "a string or an array"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(kind, changes, field, reason) -> None:
    required = {"messages": [QUESTION]} if kind is ChatRequest else {"prompt": "The"}
    error = refusal(kind, {"model": "anna", **required, **changes})
    assert error.field.endswith(field)
    assert reason in str(error)


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens")]
)
def test_a_limit_above_the_servers_is_capped(server: httpx.Client, path: str, field: str) -> None:
    prompt = {"messages": [QUESTION]} if path == CHAT else {"prompt": "The sea"}
    body = {"model": "base:anna", **prompt, "seed": 1}
    capped = server.post(path, json={**body, field: 10**6}).json()
    assert capped["choices"] == server.post(path, json=body).json()["choices"]
    assert capped["usage"]["completion_tokens"] <= 64


def test_an_answer_ends_at_the_end_of_the_context(server: httpx.Client, models: Models) -> None:
    model = models.by_name["fedprompt:poet"]
    prompt = "sea " * 20
    body = {"model": model.name, "prompt": prompt, "max_tokens": 60, "seed": 1}
    reply = server.post(TEXT, json=body).json()
    assert model.weights.context is not None
    space = model.weights.context - len(model.text_prompt(prompt)) + 1
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == space < 60
