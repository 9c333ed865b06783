"""The commands `coterie keys ...`: the server's certificate and the clients that it accepts.

The functions import `cryptography` when they run, so that --help is fast.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import group

if TYPE_CHECKING:
    from coterie.network.keys import Keys

app = group("Manage a server's certificate and the keys of the clients that it accepts.")
DEFAULT = Path("keys")

Folder = Annotated[Path, Argument(help="The server's key folder.")]
FolderOption = Annotated[Path, Option("--keys", help="The server's key folder.")]
Hosts = Annotated[
    list[str] | None,
    Option(
        metavar="NAME|ADDRESS",
        help="Host name or IP address by which clients reach the server, such as "
        "coterie.example.org or 192.0.2.7. Repeatable.",
    ),
]
KeyFile = Annotated[
    Path | None, Option("--out", help="Client's key file to write. Default: NAME.key.")
]
Name = Annotated[str, Argument(help="Name of the client.")]


@app.command()
def init(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Create the server's key folder, with a certificate authority and the server's certificate.

    Without --host, only clients on the server's own machine can connect.

    For example:

        coterie keys init --host coterie.example.org
    """
    created = _keys().create(folder, host or ())
    terminal.say(
        f"The server's keys are in {folder}. The folder contains private keys: keep it secret.",
        f"The certificate is valid for {', '.join(created.hosts())}.",
    )
    if not host:
        terminal.say(
            "Clients on other machines cannot connect yet. Add the server's host name:",
            f"  coterie keys certify {folder} --host NAME",
        )


@app.command()
def certify(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Renew the server's certificate for two years, and add hosts to it.

    The keys of clients stay valid. A running server uses the new certificate at once.

    For example:

        coterie keys certify --host 192.0.2.7
    """
    server = _keys()(folder)
    server.certify(host or ())
    terminal.say(
        _certificate(server), "A server that is running uses the new certificate immediately."
    )


@app.command()
def add(name: Name, keys: FolderOption = DEFAULT, out: KeyFile = None) -> None:
    """Add a client, and write its key file.

    Transfer the key file (anna.key in the example below) to the client's machine. The key is valid
    for two years.

    For example:

        coterie keys add anna
    """
    _print_instructions(name, _keys()(keys).add(name, out or Path(f"{name}.key")))


@app.command()
def renew(name: Name, keys: FolderOption = DEFAULT, out: KeyFile = None) -> None:
    """Write a new key file for a client, and reject the client's old key at once.

    The new key is valid for two years. Replace the old key file on the client's machine with the
    new one. A running client continues if you replace the file within five minutes. After five
    minutes with the old key, the client stops, and must be started again.

    For example:

        coterie keys renew anna
    """
    _print_instructions(name, _keys()(keys).renew(name, out or Path(f"{name}.key")))


@app.command("list")
def show(folder: Folder = DEFAULT) -> None:
    """List the accepted clients with their keys' expiry dates, and the server's certificate.

    For the certificate, the hosts and the expiry date are shown.
    """
    server = _keys()(folder)
    from coterie.analysis.tables import Table

    clients, faults = server.read_clients()
    rows = [
        (name, client.fingerprint, f"{client.expires:%Y-%m-%d}") for name, client in clients.items()
    ]
    rows = rows or [("none yet", "add one with `coterie keys add NAME`", "")]
    head = ("client", "fingerprint (SHA-256)", "valid until")
    terminal.console.print(Table(f"Clients in {folder}", head, rows))
    terminal.say("", *(f"Warning: {fault}." for fault in faults), _certificate(server))


@app.command()
def remove(name: Name, keys: FolderOption = DEFAULT) -> None:
    """Remove a client. The server closes the client's connections and rejects the client's key."""
    _keys()(keys).remove(name)
    terminal.say(f"The server now rejects the key of {name}.")


def _print_instructions(name: str, file: Path) -> None:
    """Print what to do with a new key file."""
    terminal.say(
        f"The key file of {name} is {file}. It contains a private key, of which the server keeps "
        "no copy.",
        f"Transfer the file to the machine of {name} over a secure channel, then delete it here.",
    )


def _certificate(server: "Keys") -> str:
    return (
        f"The server's certificate is valid for {', '.join(server.hosts())}, until "
        f"{server.expires():%Y-%m-%d}."
    )


def _keys() -> "type[Keys]":
    from coterie.network.keys import Keys

    return Keys
