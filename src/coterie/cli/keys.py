"""The commands `coterie keys ...`: who may take part in a deployment, and the server's certificate.

`cryptography` is imported when a command needs it: without the extra, help still works.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import terminal

if TYPE_CHECKING:
    from coterie.network.keys import Keys

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Manage a server's keys: its certificate and the clients it accepts.",
)
DEFAULT = Path("keys")

Folder = Annotated[Path, typer.Argument(help="The server's key folder.")]
FolderOption = Annotated[Path, typer.Option("--keys", help="The server's key folder.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|ADDRESS",
        help="Host name or IP address of the server: coterie.example.org, 192.0.2.7. Repeatable.",
    ),
]
Kit = Annotated[Path | None, typer.Option("--out", help="File of the kit. Default: NAME.key.")]
Name = Annotated[str, typer.Argument(help="The client's name.")]


@app.command()
def init(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Create the server's key folder: a certificate authority and the server's certificate.

    Example:

        coterie keys init --host coterie.example.org
    """
    made = _keys().create(folder, host or ())
    terminal.say(
        f"The server's keys are in {folder}. The folder contains private keys: keep it secret.",
        f"The certificate is valid for {', '.join(made.hosts())}.",
    )
    if not host:
        terminal.say(
            "Clients on other machines cannot connect yet. Add the server's host name:",
            f"  coterie keys certify {folder} --host NAME",
        )


@app.command()
def certify(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Renew the server's certificate for two years and add hosts. Clients' kits stay valid.

    Example:

        coterie keys certify --host 192.0.2.7
    """
    server = _keys()(folder)
    server.certify(host or ())
    terminal.say(_certificate(server), "A running server uses it from now on.")


@app.command()
def add(name: Name, keys: FolderOption = DEFAULT, out: Kit = None) -> None:
    """Add a client: create its kit, a small file to transfer to the client's machine.

    Example:

        coterie keys add anna
    """
    _tell(name, _keys()(keys).add(name, out or Path(f"{name}.key")))


@app.command()
def renew(name: Name, keys: FolderOption = DEFAULT, out: Kit = None) -> None:
    """Make a new kit for a client, valid for two years. Its old kit is rejected at once.

    A client that is running continues when the new kit replaces its file.

    Example:

        coterie keys renew anna
    """
    _tell(name, _keys()(keys).renew(name, out or Path(f"{name}.key")))


@app.command("list")
def show(folder: Folder = DEFAULT) -> None:
    """List the accepted clients, the hosts of the server's certificate, and when each expires."""
    server = _keys()(folder)
    from coterie.analysis.tables import Table

    found = server.clients().items()
    rows = [(name, about.fingerprint, f"{about.expires:%Y-%m-%d}") for name, about in found]
    rows = rows or [("none yet", "add one with `coterie keys add NAME`", "")]
    head = ("client", "fingerprint (SHA-256)", "valid until")
    terminal.console.print(Table(f"Clients in {folder}", head, rows))
    terminal.say(f"\n{_certificate(server)}")


@app.command()
def remove(name: Name, keys: FolderOption = DEFAULT) -> None:
    """Remove a client: the server ends its connections and rejects it from now on."""
    _keys()(keys).remove(name)
    terminal.say(f"The server now rejects the kit of {name}.")


def _tell(name: str, kit: Path) -> None:
    """What to do with a new kit."""
    terminal.say(
        f"The kit of {name} is {kit}. It contains a private key that the server does not keep.",
        f"Transfer it to the machine of {name} over a secure channel, then delete it here.",
    )


def _certificate(server: "Keys") -> str:
    return (
        f"The server's certificate is valid for {', '.join(server.hosts())}, until "
        f"{server.expires():%Y-%m-%d}."
    )


def _keys() -> "type[Keys]":
    from coterie.network.flower import imports_for

    with imports_for("Deployment", "flower"):
        from coterie.network.keys import Keys
    return Keys
