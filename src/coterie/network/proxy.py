"""The HTTP proxy through which a client connects to a server."""

from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_for(server: str) -> str | None:
    """Return the URL of the environment's proxy for a server, or None if no proxy is used.

    A server on this machine is never reached through a proxy.

    Args:
        server: The server's address, HOST:PORT.
    """
    host = server.rpartition(":")[0].removeprefix("[").removesuffix("]")
    is_local = host.lower() in ("localhost", "localhost.")
    with suppress(ValueError):
        is_local = is_local or ip_address(host).is_loopback
    return None if is_local or proxy_bypass(host) else getproxies().get("https")


def through_proxy(server: str) -> str:
    """Return text that names the proxy for a server, or an empty text if no proxy is used."""
    if (proxy := proxy_for(server)) is None:
        return ""
    address = urlsplit(proxy).netloc.rpartition("@")[2]  # without a user name and password
    return f" through the proxy {address or proxy} (https_proxy)"
