"""The protocol between a mailbox and its clients: HTTP/1.1 under mutual TLS 1.3.

The certificate of a connection identifies the client. Every request has the headers `PROTOCOL` and
`SESSION`. A client generates a new session identifier whenever it starts.

    GET    /order            Wait for an order. 200: an `Offer`; 204: no order yet, repeat the
                             request.
    GET    /orders/TICKET    Download an order. The header `Range` gives the first byte.
    DELETE /orders/TICKET    Decline an order without a reply.
    GET    /replies/TICKET   Request a `Progress`, the number of bytes that the server has received.
    PUT    /replies/TICKET   Upload the remaining bytes of a reply. `Content-Range` gives their
                             position, and `DIGEST` the SHA-256 of the whole reply. 204: the reply
                             is complete.
    POST   /session          Heartbeat: tell the server that the client is running, for example
                             during training.
    DELETE /session          Disconnect.

The server reports errors by these status codes:

    400  A header of the upload is missing or invalid.
    403  The certificate was removed, or the client has too many connections.
    408  No byte of the upload has arrived for `STALL_SECONDS`.
    409  Another process is connected with this certificate.
    410  The order is no longer valid.
    413  The reply is too large.
    416  The requested range is outside the order, or the uploaded range does not begin at the
         reply's first missing byte.
    422  The digest does not match; the client must upload the reply from its first byte.
    426  The client uses another version of this protocol.
    500  The server could not read the order.
    507  The server could not store the reply.

An interrupted transfer continues at the first missing byte.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

VERSION = "1"
PROTOCOL = "Coterie-Protocol"
SESSION = "Coterie-Session"
DIGEST = "Coterie-SHA256"
POLL_SECONDS = 20.0
"""The time after which a request for an order is answered with 204."""
HEARTBEAT_SECONDS = 5.0
"""The interval between two requests `POST /session`."""
ABSENT_SECONDS = 15.0
"""The time without a request or transferred bytes after which a client counts as disconnected."""
STALL_SECONDS = 30.0
"""The time without transferred bytes after which a transfer is aborted."""
PIECE = 1 << 18
"""The number of bytes that a transfer reads and writes in one operation."""


class Offer(BaseModel):
    """An order that is ready for download."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ticket: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    size: Annotated[int, Field(ge=0)]
    """The number of bytes."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the bytes."""


class Progress(BaseModel):
    """The state of a reply's transfer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    received: Annotated[int, Field(ge=0)]
    """The number of bytes that the server has stored."""
