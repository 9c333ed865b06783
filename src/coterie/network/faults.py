"""Describes why a client cannot reach the server."""

import httpx

from coterie.errors import CoterieError
from coterie.network.certificates import clock_text
from coterie.network.link import LONGEST_LINE
from coterie.network.proxy import through_proxy

STATUS = {
    403: "has removed this key, or this client has too many connections",
    409: "is connected to another process that uses this key; stop one of the two processes",
    413: "refuses this client's reply because it is too large",
    426: "uses another version of the protocol; install the same version of Coterie on both sides",
    507: "could not store this client's reply; its disk may be full",
}
"""The predicate of an error message whose subject is the server, by status code."""


def is_refusal(error: Exception) -> bool:
    """Return whether an error indicates that the server refuses the client's key or version."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (403, 426)
    # A server that refuses a certificate closes the connection after the handshake.
    return isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and any(
        words in str(error)
        for words in ("UNKNOWN_CA", "CERTIFICATE", "disconnected without", "reset by peer")
    )


def reason_of(server: str, error: Exception, was_connected: bool = False) -> str:
    """Return the reason why a server cannot be reached, as a sentence without a full stop.

    Args:
        server: The server's address, HOST:PORT.
        error: The error of a request.
        was_connected: Whether the server responded to the previous request. If it did, a closed
            connection is reported as interrupted, not as refused. If the server does refuse the
            client, the next attempt to connect also fails, and is then reported as refused.
    """
    if isinstance(error, CoterieError):  # an error of the key file
        return str(error).rstrip(".")
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        return f"{server} {STATUS.get(code, f'responded with status {code}')}"
    text = str(error)
    is_closed = is_refusal(error) or "peer closed" in text
    if is_refusal(error) and not was_connected:
        return (
            f"{server} closed the connection{through_proxy(server)}; if this repeats, the server "
            "has removed or renewed this key; ask for a new key file"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{server} {_certificate_fault(text)}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return f"{server} is unreachable{through_proxy(server)}"
    if isinstance(error, httpx.RemoteProtocolError | httpx.DecodingError) and not is_closed:
        return f"{server} sent an invalid response ({text})"[:LONGEST_LINE]
    return f"the connection to {server} was interrupted"


def _certificate_fault(text: str) -> str:
    """Describe the fault of the server's certificate that a TLS error message reports."""
    if "has expired" in text:
        return f"has a certificate that has expired, {clock_text()}"
    if "not yet valid" in text:
        return f"has a certificate that is not valid yet, {clock_text()}"
    if "mismatch" in text:
        return (
            "has a certificate that is not valid for this host name or address; on the server, add "
            "the name to the certificate with `coterie keys certify --host`"
        )
    return "has a certificate from an authority that this key file does not trust"
