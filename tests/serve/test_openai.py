"""The package `openai` as the client."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from serving import served

from coterie.serve.models import Models

QUESTION: Any = [{"role": "user", "content": "Name a sea."}]


@pytest.fixture(scope="module")
def client(models: Models) -> Iterator[OpenAI]:
    with served(models, ("right",)) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="right", max_retries=0)


def test_it_chats_and_streams(client: OpenAI) -> None:
    assert "comigs-1g1s:anna" in [model.id for model in client.models.list()]
    assert client.models.retrieve("comigs-1g1s:anna").owned_by == "coterie"
    asked: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(model="anna", **asked)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    streamed: Any = {"stream": True, "stream_options": {"include_usage": True}, **asked}
    events = list(client.chat.completions.create(model="anna", **streamed))
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[-1].usage == whole.usage


def test_it_reads_log_probabilities_and_the_extension(client: OpenAI) -> None:
    asked: Any = {"model": "ben", "messages": QUESTION, "max_tokens": 4, "top_logprobs": 2}
    extra = {"coterie": {"routing": True}}
    reply = client.chat.completions.create(**asked, logprobs=True, extra_body=extra)
    choice: Any = reply.choices[0]
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert len(choice.coterie["routing"]) == len(choice.logprobs.content)


def test_it_completes_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fedprompt:poet", "prompt": "The", "max_tokens": 4}
    reply = client.completions.create(**asked, logprobs=1)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs is not None
    stream = client.completions.create(**asked, seed=1, stream=True)
    assert [event.choices[0].finish_reason for event in stream][-1] == "length"


def test_errors_have_their_classes(client: OpenAI) -> None:
    create = client.chat.completions.create
    wrong = OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(NotFoundError, match="no model 'nobody'"):
        create(model="nobody", messages=QUESTION)
    with pytest.raises(BadRequestError, match="`n` is not supported"):
        create(model="anna", messages=QUESTION, n=2)
    with pytest.raises(AuthenticationError, match="API key"):
        wrong.models.list()
    with pytest.raises(APIStatusError) as raised:
        create(model="anna", messages=QUESTION, max_tokens=0)
    assert (raised.value.status_code, raised.value.param) == (400, "max_tokens")  # pyright: ignore
