"""The HTTP server: OpenAI's API and the web page."""

import asyncio
import base64
import functools
import hashlib
import json
import logging
import re
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from coterie.errors import CoterieError, plural
from coterie.evaluation.generation import Sampling, ends_of
from coterie.inference.streaming import StreamedText
from coterie.network.accepting import PlainListener
from coterie.serve import guards
from coterie.serve.models import Models, ServedModel
from coterie.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    parse_request,
)
from coterie.serve.replies import Reply
from coterie.serve.scheduler import Failure, Piece, Request, Scheduler

BODY = 2**20
"""The maximum size of a request's body in bytes."""
CHARACTERS = 32
"""The maximum number of characters of a prompt per token of the limit `Limits.prompt`.

A longer prompt is refused before it is tokenised. Text has far fewer characters per token.
"""
WRITE_SECONDS = 30.0
"""The time after which a streamed answer is abandoned if the caller does not read it."""
STOP_SECONDS = 5.0
"""The maximum time for sending the last replies when the server stops."""
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""A logger without output for aiohttp, which would otherwise log every invalid request."""
OPTIONS: dict[str, Any] = {
    "access_log": None,
    "handler_cancellation": True,  # a client that disconnects frees its place
    "logger": SILENT,
    "shutdown_timeout": STOP_SECONDS,
}
"""Options of aiohttp's server."""


@dataclass(frozen=True)
class Limits:
    """The limits on requests.

    Attributes:
        prompt: The maximum number of tokens of a prompt.
        answer: The maximum number of tokens of an answer.
        queue: The maximum number of requests that are running or waiting.
        seconds: The maximum time for answering a request.
    """

    prompt: int = 4096
    answer: int = 1024
    queue: int = 64
    seconds: float = 300.0


def serve(models: Models, listening: socket.socket, keys: Sequence[str], limits: Limits) -> None:
    """Serve models until the process receives SIGINT or SIGTERM.

    Args:
        models: The models.
        listening: The listening socket, which is closed at the end.
        keys: The keys that requests may present; if empty, requests need no key.
        limits: The limits on requests.
    """

    async def until_signal() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await serve_until_cancelled(models, listening, keys, limits)

    asyncio.run(until_signal())


async def serve_until_cancelled(
    models: Models, listening: socket.socket, keys: Sequence[str], limits: Limits
) -> None:
    """Serve models until this coroutine is cancelled. The arguments are those of `serve`."""
    listener = PlainListener(listening)
    runner = web.AppRunner(application(models, listener, keys, limits), **OPTIONS)
    await runner.setup()
    assert runner.server is not None
    try:
        await listener.serve(runner.server)
    finally:
        await runner.cleanup()


def application(
    models: Models, listener: PlainListener, keys: Sequence[str], limits: Limits
) -> web.Application:
    """Create the server's application.

    Args:
        models: The models.
        listener: The listener that accepts the server's connections.
        keys: The keys that requests may present; if empty, requests need no key.
        limits: The limits on requests.
    """
    api = Api(models, limits)
    # A page of another site has no key, and a reverse proxy may pass on its own name.
    host = listener.listening.getsockname()[0]
    check = guards.only_with_key(keys) if keys else guards.only_known_hosts(host)
    middlewares = [guards.errors_as_json, check, guards.admitting(listener)]
    app = web.Application(middlewares=middlewares, client_max_size=BODY)
    app.router.add_get("/", page)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", api.list_models)
    app.router.add_get("/v1/models/{name}", api.show_model)
    app.router.add_post("/v1/chat/completions", api.chat)
    app.router.add_post("/v1/completions", api.complete)

    async def start(_: web.Application) -> None:
        api.scheduler.start()

    async def stop(_: web.Application) -> None:
        await asyncio.to_thread(api.scheduler.stop)

    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    return app


class Api:
    """The handlers of OpenAI's API.

    Args:
        models: The models.
        limits: The limits on requests.
    """

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits = models, limits
        self.scheduler = Scheduler(limits.queue, guards.report)
        self.created = int(time.time())

    async def list_models(self, _: web.Request) -> web.Response:
        """List the models."""
        data = [self._described(name) for name in self.models.names]
        return web.json_response({"object": "list", "data": data})

    async def show_model(self, request: web.Request) -> web.Response:
        """Describe one model."""
        return web.json_response(self._described(request.match_info["name"]))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer the last message of a conversation."""
        wanted = parse_request(ChatRequest, await guards.body_of(request))
        model, turns = self._model(wanted.model), wanted.turns
        self._check_length([turn.content for turn in turns])
        try:
            ids, markers = await asyncio.to_thread(model.chat_prompt, turns)
        except CoterieError as error:
            raise ApiError(400, str(error), "messages") from None
        return await self._answer(request, wanted, model, ids, markers)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Continue a text."""
        wanted = parse_request(CompletionRequest, await guards.body_of(request))
        model = self._model(wanted.model)
        [text] = wanted.prompt
        self._check_length([text])
        ids = await asyncio.to_thread(model.text_prompt, text)
        return await self._answer(request, wanted, model, ids, ())

    async def _answer(
        self,
        request: web.Request,
        wanted: Generation,
        model: ServedModel,
        ids: list[int],
        markers: Sequence[str],
    ) -> web.StreamResponse:
        """Generate an answer, and send it."""
        tokens = self._answer_limit(wanted, model, len(ids))
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        sampling = Sampling(tokens, wanted.temperature, wanted.top_p, seed)
        tokenizer = model.weights.base.tokenizer
        ends, stops = ends_of(tokenizer, markers)
        is_chat = isinstance(wanted, ChatRequest)
        text = StreamedText(tokenizer, ends, [*stops, *wanted.stop], strip=is_chat)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece | Failure] = asyncio.Queue()

        def deliver(piece: Piece | Failure) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        deadline = time.monotonic() + self.limits.seconds
        roles = wanted.coterie.routing and model.weights.routed
        job = Request(model.weights, ids, sampling, text, deliver, deadline, wanted.top, roles)
        if is_chat:
            job.fallback = model.fallback
        if not self.scheduler.submit(job):
            raise ApiError(429, "The server has too many requests; try again later.")
        try:
            first = await queue.get()
            if isinstance(first, Failure):
                raise ApiError(first.status, first.message)
            pieces, reply = rest_of(first, queue), Reply(wanted, model, len(ids))
            if wanted.stream:
                return await send_events(request, reply, pieces)
            return web.json_response(reply.whole([piece async for piece in pieces]))
        finally:
            job.cancelled = True

    def _model(self, name: str) -> ServedModel:
        model = self.models.names.get(name)
        if model is None:
            message = f"There is no model {name[:100]!r}; GET /v1/models lists the models."
            raise ApiError(404, message, "model", "model_not_found")
        return model

    def _check_length(self, texts: Sequence[str]) -> None:
        """Refuse a prompt that is certainly too long, before it is tokenised.

        Args:
            texts: The texts of the prompt's messages. Each message takes at least one token.
        """
        most, length = self.limits.prompt, sum(map(len, texts))
        if length > most * CHARACTERS or len(texts) > most:
            raise _too_long(
                f"The prompt has {length} characters in {plural(len(texts), 'message')}, and the "
                f"server accepts {most * CHARACTERS} characters and {plural(most, 'token')}."
            )

    def _answer_limit(self, wanted: Generation, model: ServedModel, prompt: int) -> int:
        """Return the maximum number of tokens of an answer to a prompt of a given length."""
        if prompt > self.limits.prompt:
            raise _too_long(
                f"The prompt has {prompt} tokens, and the server accepts {self.limits.prompt}."
            )
        limit = min(wanted.limit or self.limits.answer, self.limits.answer)
        context = model.weights.context
        if context is None:
            return limit
        remaining = context - prompt + 1  # the model does not read the last token
        if remaining < 1:
            raise _too_long(
                f"The prompt has {prompt} tokens, but the context of the model has {context}."
            )
        return min(limit, remaining)

    def _described(self, name: str) -> dict[str, Any]:
        model = self._model(name)
        extension = {
            "model": model.name,
            "client": model.client,
            "method": model.method,
            "kind": model.kind,
            "own": model.own,
            "chat": model.chats,
            "routing": model.weights.routed,
        }
        head = {"id": name, "object": "model", "created": self.created, "owned_by": "coterie"}
        return {**head, "coterie": extension}


def _too_long(message: str) -> ApiError:
    """Return the reply to a request whose prompt is too long."""
    return ApiError(400, message, code="context_length_exceeded")


async def rest_of(first: Piece, queue: "asyncio.Queue[Piece | Failure]") -> AsyncIterator[Piece]:
    """Yield the pieces of an answer.

    Args:
        first: The first piece.
        queue: The following pieces.

    Raises:
        ApiError: The answer cannot be completed.
    """
    piece: Piece | Failure = first
    while isinstance(piece, Piece):
        yield piece
        if piece.reason:
            return
        piece = await queue.get()
    raise ApiError(piece.status, piece.message)


async def send_events(
    request: web.Request, reply: Reply, pieces: AsyncIterator[Piece]
) -> web.StreamResponse:
    """Send an answer as server-sent events."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)

    async def send(event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError from None

    try:
        for event in reply.opening():
            await send(event)
        async for piece in pieces:
            for event in reply.events(piece):
                await send(event)
        await response.write(b"data: [DONE]\n\n")
    except ApiError as error:  # the status has been sent already
        await send(error.body())
    await response.write_eof()
    return response


async def health(_: web.Request) -> web.Response:
    """Report that the server is ready; it listens only after all models are loaded."""
    return web.json_response({"status": "ok"})


async def page(_: web.Request) -> web.Response:
    """Send the web page."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """Read the page, and compute a policy that allows its own style and script only."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    def sources(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digests = [hashlib.sha256(block.encode()).digest() for block in blocks]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; style-src {sources('style')}; script-src {sources('script')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy
