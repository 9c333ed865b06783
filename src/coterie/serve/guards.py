"""Checks of every HTTP request, and the form in which errors are reported."""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from coterie.network.accepting import PlainListener
from coterie.serve.protocol import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PUBLIC = ("/", "/health")
"""The paths that need no key."""
RETRY_SECONDS = 5
"""The time after which a caller should repeat a request for which the server was too busy."""
BODY_SECONDS = 30.0
"""The maximum time for receiving a request's body."""
log = logging.getLogger(__name__)


async def body_of(request: web.Request) -> bytes:
    """Receive the body of a request.

    A content type other than JSON is refused: a browser sends JSON to another site only if the
    site allows it, so foreign web pages cannot use the server.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "The content type must be application/json.")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.") from None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Report errors in OpenAI's form, and never log the content of a request."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        message = {404: "There is no such endpoint.", 405: "The method is not allowed."}
        text = message.get(error.status, f"{error.reason}.")
        return error_response(ApiError(error.status, text))
    except (ConnectionError, web.RequestPayloadError):
        raise web.HTTPBadRequest from None  # the client has disconnected
    except Exception as error:
        report(error)
        return error_response(ApiError(500, "The server failed; its log names the error."))


def error_response(error: ApiError) -> web.Response:
    """Return a response that reports an error, and that closes the connection."""
    response = web.json_response(error.body(), status=error.status)
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    response.force_close()
    return response


def admitting(listener: PlainListener) -> Any:
    """Return a middleware that admits the connections of requests that other checks permit.

    A request for a public path does not admit its connection, which is closed.

    Args:
        listener: The listener that accepts the connections.
    """

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PUBLIC:
            response = await handler(request)
            response.force_close()
            return response
        connection = listener.permit(request.transport)
        if connection is None:
            raise ApiError(503, "The server has too many connections; try again later.")
        with connection.request():
            return await handler(request)

    return admit


def only_known_hosts(host: str) -> Any:
    """Return a middleware against DNS rebinding, if the server listens on loopback only.

    A web page whose domain resolves to the loopback address would otherwise count as the server's
    own page. Its requests name the domain in the header `Host`.

    Args:
        host: The IP address on which the server listens.
    """
    known = {"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (
            ip_address(host).is_loopback
            and re.sub(r":[0-9]+$", "", request.host.lower()) not in known
        ):
            raise ApiError(403, "The Host header must be localhost or the server's address.")
        return await handler(request)

    return check


def only_with_key(keys: Sequence[str]) -> Any:
    """Return a middleware that refuses requests to the API without one of the keys.

    Args:
        keys: The keys.
    """
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PUBLIC:
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            digest = hashlib.sha256(key.strip().encode(errors="replace")).digest()
            known = [hmac.compare_digest(digest, other) for other in digests]
            if kind.lower() != "bearer" or not any(known):
                message = "The API key is wrong or missing; send it as `Authorization: Bearer KEY`."
                raise ApiError(401, message, code="invalid_api_key")
        return await handler(request)

    return check


def report(error: Exception) -> None:
    """Log where an unexpected error occurred, without its message, which may contain a text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    log.error("%s%s", type(error).__name__, where)
