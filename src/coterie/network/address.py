"""Listening sockets of servers."""

import errno
import os
import re
import socket
from contextlib import suppress
from ipaddress import ip_address

from coterie.errors import CoterieError

BACKLOG = 1024
"""The maximum number of connections that wait to be accepted."""


def listen(address: str, option: str = "--address") -> socket.socket:
    """Open a listening socket.

    Args:
        address: The IP address and the port, such as 0.0.0.0:9092 or [::]:9092.
        option: The name of the option that sets the address, for error messages.

    Raises:
        CoterieError: The address is invalid, in use, or not an address of this machine.
    """
    host, _, port = address.rpartition(":")
    ip = host.removeprefix("[").removesuffix("]")
    version = 0
    with suppress(ValueError):
        version = ip_address(ip).version
    valid = version and host == (ip if version == 4 else f"[{ip}]") and "%" not in host
    if not valid or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        examples = "127.0.0.1:9192" if option == "--metrics" else "0.0.0.0:9092 or [::]:9092"
        raise CoterieError(
            f"{option} takes an IP address and a port, such as {examples}, not {address!r}."
        )
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        return socket.create_server((ip, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CoterieError(f"Could not listen on {address}: {_cause(error, port)}.") from None


def _cause(error: OSError, port: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"another program uses port {port}, perhaps a server that is still running; stop "
                "it, or choose another port"
            )
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address; 0.0.0.0 means all its addresses"
        case errno.EACCES:
            return "permission denied; choose a port above 1023"
        case _:
            return os.strerror(error.errno) if error.errno else str(error)
