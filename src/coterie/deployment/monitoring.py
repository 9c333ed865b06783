"""`GET /health` and `GET /metrics` (in Prometheus' text format) of a running server."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import socket

from coterie.deployment.status import Monitor, Status
from coterie.network.accepting import PlainListener

STOP_SECONDS = 1.0
"""The maximum time for sending the last replies when the server stops."""
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""A logger without output for aiohttp, which would otherwise log every invalid request."""

METRICS = {
    "coterie_rounds": "Number of rounds of the run.",
    "coterie_rounds_complete": "Number of complete rounds.",
    "coterie_remaining_seconds": "Estimated time until the end of the run, not counting the "
    "time spent waiting for a quorum.",
    "coterie_status_timestamp_seconds": "Time of these values, in seconds since 1970.",
    "coterie_client_present": "Whether the client is connected (1) or not (0).",
    "coterie_client_received_bytes_total": "Bytes received from the client.",
    "coterie_client_sent_bytes_total": "Bytes sent to the client.",
    "coterie_client_last_reply_timestamp_seconds": "Time of the client's last reply, in seconds "
    "since 1970.",
    "coterie_client_excluded_rounds_total": "Rounds without an accepted upload of the client.",
}
"""The description of each metric. Metrics that end with `_total` are counters, which begin at 0
when the server starts; all others are gauges."""


def values_of(status: Status) -> Iterator[tuple[str, str | None, float | None]]:
    """Yield (name, client, value) for each metric.

    The client is None for metrics of the run. A value is None if it is unknown.
    """
    yield "coterie_rounds", None, status.rounds
    yield "coterie_rounds_complete", None, status.done
    yield "coterie_remaining_seconds", None, status.seconds_left
    yield "coterie_status_timestamp_seconds", None, status.updated
    for name, client in sorted(status.clients.items()):
        yield "coterie_client_present", name, client.state not in ("away", "declined")
        yield "coterie_client_received_bytes_total", name, client.bytes_up
        yield "coterie_client_sent_bytes_total", name, client.bytes_down
        yield "coterie_client_last_reply_timestamp_seconds", name, client.last_reply
        yield "coterie_client_excluded_rounds_total", name, client.excluded


def exposition(status: Status) -> str:
    """Return all metrics in Prometheus' text format."""
    lines: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, client, value in values_of(status):
        if value is not None:
            label = "" if client is None else f"{{client={json.dumps(client)}}}"
            lines[name].append(f"{name}{label} {float(value):.15g}\n")
    return "".join(
        f"# HELP {name} {METRICS[name]}\n# TYPE {name} {type_of(name)}\n{''.join(values)}"
        for name, values in lines.items()
        if values
    )


def type_of(metric: str) -> str:
    """Return the type of a metric in Prometheus."""
    return "counter" if metric.endswith("_total") else "gauge"


@contextmanager
def monitored(monitor: Monitor, listening: socket | None) -> Iterator[None]:
    """Serve /health and /metrics on a socket, without TLS, while the with block runs.

    Args:
        monitor: The run's status.
        listening: The socket; None to serve nothing.
    """
    if listening is None:
        yield
        return

    loop = asyncio.new_event_loop()
    task = loop.create_task(_serve(monitor, listening))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    with listening:
        thread = threading.Thread(target=run, name="monitoring", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(5 * STOP_SECONDS)


async def _serve(monitor: Monitor, listening: socket) -> None:
    """Answer requests until this coroutine is cancelled.

    Each connection is closed after one reply, and within `PENDING_SECONDS` in any case.
    """
    from aiohttp import web  # a server app of Flower has no address for monitoring

    async def answer(request: web.BaseRequest) -> web.Response:
        status = monitor.status
        if request.method != "GET" or request.path not in ("/health", "/metrics"):
            response = web.Response(status=404)
        elif request.path == "/health":
            age = time.time() - status.updated
            response = web.json_response({"updated_seconds_ago": round(age, 1)})
        else:
            headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            response = web.Response(body=exposition(status).encode(), headers=headers)
        response.force_close()
        return response

    server = web.Server(answer, access_log=None, logger=SILENT)
    try:
        await PlainListener(listening).serve(server)
    finally:
        await server.shutdown(STOP_SECONDS)
