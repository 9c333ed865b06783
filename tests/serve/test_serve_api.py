"""OpenAI's API over HTTP: replies, streams, errors, keys and limits."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import LIMITS, chat_values, connected, served

import coterie
from coterie.bases import Base
from coterie.data.items import Turn
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.evaluation.generation import Sampling
from coterie.inference.speaking import Speaker
from coterie.serve.app import Limits
from coterie.serve.batches import Forward
from coterie.serve.models import Models

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Name a sea."}]
ASK: dict[str, Any] = {"model": "anna", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
CONTINUE: dict[str, Any] = {"model": "fedprompt:poet", "prompt": "The sea", "max_tokens": 12}


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post(path, json={**body, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream"
    *lines, last, empty = reply.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_lists_every_model(server: httpx.Client, models: Models) -> None:
    listed = {model["id"]: model for model in server.get("/v1/models").json()["data"]}
    described = {name: model["coterie"] for name, model in listed.items()}
    kinds = {name: model["kind"] for name, model in described.items() if name == model["model"]}
    assert kinds == {
        **{f"base:{name}": "base" for name in ("anna", "ben", "diarist", "poet", "whaler")},
        **{f"fedavg:{name}": "averaged" for name in ("anna", "ben")},
        **{f"comigs-1g1s:{name}": "personal" for name in ("anna", "ben")},
        **{f"fedprompt:{name}": "averaged" for name in ("diarist", "poet", "whaler")},
    }
    names = {name: model.name for name, model in models.names.items()}
    assert {name: model["model"] for name, model in described.items()} == names
    assert (names["ben"], described["ben"]["routing"]) == ("comigs-1g1s:ben", True)
    assert all(server.get(f"/v1/models/{name}").json() == listed[name] for name in listed)
    assert server.get("/v1/models/nobody").status_code == 404


def test_the_model_of_a_pooled_run_is_shared_by_all(tmp_path: Path) -> None:
    run = coterie.run(chat_values(method="centralized", baselines=[]), out=tmp_path / "run").path
    models = Models([run]).by_name.values()
    assert {m.name: (m.kind, m.client) for m in models} == {
        "base": ("base", None),
        "centralized:everyone": ("averaged", None),
    }


def test_one_base_has_one_name_and_names_are_unique(talks: Path, monkeypatch) -> None:
    models = Models([talks, talks])
    names = ["base", "fedavg:anna", "fedavg:ben", "comigs-1g1s:anna", "comigs-1g1s:ben"]
    assert list(models.by_name) == names
    numbers = map(str, count())
    monkeypatch.setattr("coterie.serve.models.adapter_digest", lambda *_: next(numbers))
    refusal = "both have a different model named base:anna; serve the"
    with pytest.raises(CoterieError, match=refusal):
        Models([talks, talks])


def test_equal_models_share_one_batch(models: Models) -> None:
    weights = {name: model.weights for name, model in models.by_name.items()}
    assert weights["fedavg:anna"] is weights["fedavg:ben"]
    assert len(set(map(id, weights.values()))) == 6
    assert len({id(w.base) for w in weights.values()}) == 2


def test_a_chat_has_the_answer_of_coterie_chat(server, models: Models) -> None:
    reply = server.post(CHAT, json=ASK).json()
    model = models.by_name["comigs-1g1s:anna"]
    assert model.template is not None
    speaker = Speaker(model.weights.base, model.weights.attach, model.template, Sampling(12), None)
    answer = speaker.answer("Name a sea.", lambda _: None)
    assert answer
    assert reply["choices"][0]["message"]["content"] == answer
    assert reply["model"] == "comigs-1g1s:anna"
    prompt, _ = model.chat_prompt([Turn("user", "Name a sea.")])
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] <= 12
    streamed = events(server, CHAT, {**ASK, "stream_options": {"include_usage": True}})
    deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == answer
    assert streamed[-1]["usage"] == reply["usage"]
    assert streamed[-2]["choices"][0]["finish_reason"] == reply["choices"][0]["finish_reason"]


def test_the_base_answers_what_a_gate_does_not_accept(talks: Path, monkeypatch) -> None:
    models = Models([talks])

    def accepts(self: Gate, base: Base, prompts: list[torch.Tensor]) -> list[bool]:
        return ["river" in str(base.tokenizer.decode(prompt)) for prompt in prompts]

    monkeypatch.setattr(Gate, "accepts", accepts)
    fallback = Gate(torch.zeros(1), 0.0), models.by_name["base"].weights
    names = models.names
    models.names = {**names, "gated": replace(names["anna"], fallback=fallback)}
    with served(models) as address, httpx.Client(base_url=address, timeout=60) as client:

        def says(model: str, question: str) -> str:
            messages = [{"role": "user", "content": question}]
            reply = client.post(CHAT, json={**ASK, "model": model, "messages": messages})
            return reply.json()["choices"][0]["message"]["content"]

        for question, model in (("Name a sea.", "base"), ("Name a river.", "anna")):
            assert says("gated", question) == says(model, question)
            assert says("anna", question) != says("base", question)
        body = {**CONTINUE, "model": "gated", "prompt": "The sea", "temperature": 0}
        texts = [
            client.post(TEXT, json={**body, "model": model}).json()["choices"][0]["text"]
            for model in ("gated", "anna")
        ]
        assert texts[0] == texts[1]


def test_the_base_answers_for_the_shared_model_of_a_pooled_baseline(tmp_path, monkeypatch) -> None:
    run = coterie.run(chat_values(baselines=["centralized"]), out=tmp_path / "run").path
    monkeypatch.setattr(Gate, "restored", lambda *_: Gate(torch.zeros(1), 0.0))
    models = Models([run]).by_name
    fallbacks = {name: model.fallback for name, model in models.items() if name != "base"}
    assert "centralized:everyone" in fallbacks
    assert all(pair and pair[1] is models["base"].weights for pair in fallbacks.values())


def test_another_adapter_may_be_attached_between_requests(server, models: Models) -> None:
    answer = server.post(CHAT, json=ASK).json()["choices"]
    models.by_name["fedavg:ben"].weights.attach()
    assert server.post(CHAT, json=ASK).json()["choices"] == answer


def test_a_completion_continues_the_text(server, models: Models) -> None:
    body = {**CONTINUE, "temperature": 0, "logprobs": 2}
    reply = server.post(TEXT, json=body).json()
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"]
    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"][:5])
    streamed = events(server, TEXT, body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    offsets = [n for e in streamed for n in e["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]


def test_an_empty_text_is_continued_from_the_end_token(server) -> None:
    assert server.post(TEXT, json={**CONTINUE, "prompt": ""}).json()["usage"]["prompt_tokens"] == 1


def test_a_seed_repeats_a_sampled_answer(server) -> None:
    def answer(seed: int) -> str:
        body = {**ASK, "temperature": 1.5, "top_p": 0.95, "seed": seed, "max_tokens": 20}
        return server.post(CHAT, json=body).json()["choices"][0]["message"]["content"]

    assert answer(3) == answer(3)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_log_probabilities_and_routing_come_with_each_token(server) -> None:
    body = {**ASK, "logprobs": True, "top_logprobs": 2, "coterie": {"routing": True}}
    choice = server.post(CHAT, json=body).json()["choices"][0]
    content, routing = choice["logprobs"]["content"], choice["coterie"]["routing"]
    assert [token["token"] for token in content] == [token["token"] for token in routing]
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)
    for token in routing:
        assert set(token["weights"]) == {"generalist", "specialist"}
        assert sum(token["weights"].values()) == pytest.approx(1, abs=1e-3)
    plain = server.post(CHAT, json={**body, "model": "base:ben"}).json()["choices"][0]
    assert plain["coterie"] == {"routing": None}
    tokens = [t for e in events(server, CHAT, body) for t in e["choices"][0]["coterie"]["routing"]]
    assert tokens == routing


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        (CHAT, {"model": "nobody"}, 404, "no model 'nobody'"),
        (CHAT, {"model": "fedprompt:poet"}, 400, "trained on plain text"),
        (CHAT, {"temperature": 3}, 400, "less than or equal to 2"),
        (CHAT, {"temperature": True}, 400, "temperature"),
        (CHAT, {"stop": ""}, 400, "stop"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "role"),
        (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "a"}]}, 400, "last"),
        (CHAT, {"messages": [{"role": "user", "content": "sea " * 500}]}, 400, "accepts 200"),
        (TEXT, {"logprobs": 6}, 400, "logprobs"),
        (TEXT, {"prompt": "sea " * 30}, 400, "context"),
    ],
)
def test_wrong_requests_are_refused(server, path, changes, status, message) -> None:
    body = {**(ASK if path == CHAT else CONTINUE), **changes}
    kind = {"Content-Type": "application/json"}
    reply = server.post(path, content=json.dumps(body), headers=kind)
    error = reply.json()["error"]
    assert (reply.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert message in error["message"]
    assert error["message"].endswith(".")


def test_other_pages_cannot_use_the_server(server) -> None:
    """Send text/plain, which other sites can send, and a Host header after DNS rebinding."""
    plain = {"Content-Type": "text/plain"}
    assert server.post(CHAT, content=json.dumps(ASK), headers=plain).status_code == 415
    for host, status in {"evil.example": 403, "localhost:1": 200, "[::1]:8000": 200}.items():
        assert server.get("/v1/models", headers={"Host": host}).status_code == status


def test_the_page_allows_only_itself(server) -> None:
    reply = server.get("/")
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    writing = ("innerHTML", "insertAdjacentHTML", "document.write", "style=")
    for forbidden in (*writing, "http://", "https://"):
        assert forbidden not in reply.text


def test_keys_are_required_everywhere_but_for_the_page(models: Models) -> None:
    with served(models, ("first-key", "second-key")) as address:
        client = httpx.Client(base_url=address)
        assert client.get("/").status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        for value in (None, "Bearer wrong", "Bearer first-keyx", "Basic first-key", "first-key"):
            headers = {"Authorization": value} if value else {}
            reply = client.get("/v1/models", headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}", "Host": "behind.a.proxy"}
            assert client.get("/v1/models", headers=headers).status_code == 200


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def stream_without_reading(address: str) -> socket.socket:
    """Send a request for a long answer, and return the connection after its first byte."""
    connection = connected(address)
    body = json.dumps({**ASK, "max_tokens": 64, "stream": True, "stop": "never"}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.recv(1)
    return connection


@pytest.fixture
def _slow(monkeypatch) -> None:
    """Take at least 0.1 seconds for each token."""
    original = Forward.step

    def slow(self, *arguments):
        time.sleep(0.1)
        return original(self, *arguments)

    monkeypatch.setattr(Forward, "step", slow)


@pytest.mark.usefixtures("_slow")
def test_a_full_queue_refuses_until_a_client_disconnects(models: Models) -> None:
    with served(models, limits=Limits(200, 64, queue=1)) as address:
        client = httpx.Client(base_url=address, timeout=60)
        connection = stream_without_reading(address)
        refused = client.post(CHAT, json=ASK)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 60  # `openai` ignores longer times
        assert "Retry-After" not in client.get("/v1/models/nobody").headers
        connection.close()
        wait_for(lambda: client.post(CHAT, json={**ASK, "max_tokens": 1}).status_code == 200)


@pytest.mark.usefixtures("_slow")
def test_a_stopped_server_ends_requests_with_an_error(models: Models) -> None:
    replies = []
    with served(models) as address:
        client = httpx.Client(base_url=address, timeout=60)
        body = {**ASK, "max_tokens": 64}
        streaming = client.stream("POST", CHAT, json=body | {"stream": True})
        lines = streaming.__enter__().iter_lines()
        next(lines)
        waiting = threading.Thread(target=lambda: replies.append(client.post(CHAT, json=body)))
        waiting.start()
        time.sleep(0.5)
    *_, last = [line for line in lines if line]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    waiting.join(60)
    assert replies[0].status_code == 503
    streaming.__exit__(None, None, None)


JUNK: list[Any] = [
    *(None, True, 0, -1, 10**30, 1e308, float("nan"), float("inf")),
    *("", "a", "\ud800", "\0", "x" * 5000),
    *([], {}, [[]], [None], {"a": None}, [{"role": "user"}], [{"role": "user", "content": {}}]),
]
KEYS = ["model", "messages", "prompt", "stream", "stop", "temperature", "top_p", "seed", "n",
        "max_tokens", "logprobs", "top_logprobs", "stream_options", "coterie", "\0"]  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """Draw an invalid request, mostly close to a valid one."""
    body: dict[str, Any] = {**ASK, "max_tokens": 1, "model": draw.choice(["anna", "base:ben"])}
    for _ in range(draw.randint(1, 3)):
        body[draw.choice(KEYS)] = draw.choice(JUNK)
    data = json.dumps(body).encode()
    match draw.randint(0, 9):
        case 0:
            return b"[" * draw.choice([10, 1000, 100_000]) + data
        case 1:
            return data[: draw.randrange(len(data))]
        case 2:
            place = draw.randrange(len(data))
            return data[:place] + draw.randbytes(3) + data[place + 3 :]
        case 3:
            return draw.randbytes(draw.randrange(200))
        case 4:
            return data.replace(b"1", b"1" * draw.choice([30, 5000]))
    return data


def bad_head(draw: random.Random, body: bytes) -> bytes:
    """Draw the head of an HTTP request, sometimes invalid."""
    length = draw.choice([str(len(body))] * 9 + ["-1", "x", "9" * 30, "3"])
    kind = draw.choice(["application/json"] * 6 + ["", "\xff", "application/json; charset=utf-99"])
    path = draw.choice([CHAT] * 4 + [TEXT] * 3 + ["/v1/models/%ff%00", "/../x", "//", "*"])
    method = draw.choice(["POST"] * 9 + ["GET", "PUT", "BREW"])
    odd = ["A" * 9000 + ": b\r\n", "Transfer-Encoding: chunked\r\n", ":\r\n"]
    more = draw.choice([""] * 9 + odd)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
    return f"{head}Content-Type: {kind}\r\n{more}Connection: close\r\n\r\n".encode("latin-1")


@pytest.mark.parametrize("requests", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_do_not_stop_the_server(models: Models, caplog, requests: int) -> None:
    draw = random.Random(requests)
    statuses: dict[str, int] = {}
    with served(models, limits=LIMITS) as address:
        for _ in range(requests):
            body = malformed(draw)
            with connected(address) as connection:
                connection.settimeout(0.5)
                reply = b""
                try:
                    connection.sendall(bad_head(draw, body) + body)
                    while piece := connection.recv(65536):
                        reply += piece
                except (TimeoutError, ConnectionError):
                    pass  # the request was incomplete, or was refused before its end
            status = reply[9:12].decode() if reply else "none"
            statuses[status] = statuses.get(status, 0) + 1
        reply = httpx.post(f"{address}{CHAT}", json=ASK, timeout=60)
        assert reply.status_code == 200
    assert statuses["400"] > requests / 3
    assert not any(int(status) >= 500 for status in statuses if status != "none"), statuses
    assert not caplog.records, "nothing is logged"
