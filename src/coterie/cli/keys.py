"""The commands `coterie keys ...`: who may take part in a deployment, and the server's certificate.

`cryptography` is imported when a command needs it: without the extra, help still works.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import terminal
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.engines.flower.keys import Keys

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Keep a server's keys: its certificate, and the clients that it lets in.",
)
DEFAULT = Path("keys")

Folder = Annotated[Path, typer.Argument(help="The server's folder of keys.")]
FolderOption = Annotated[Path, typer.Option("--keys", help="The server's folder of keys.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME|ADDRESS",
        help="By which clients reach the server: coterie.example.org, 192.0.2.7. Repeatable.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(help="The client's name.", show_default=False)]


@app.command()
def init(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Begin a deployment: make the server's certificate and the authority that signs it.

    Example:

        coterie keys init --host coterie.example.org
    """
    made = _keys().create(folder, host or ())
    terminal.say(f"The server's keys are in {folder}. It holds private keys: show them to nobody.")
    terminal.say(f"Its certificate is for {', '.join(made.hosts())}.")
    if not host:
        terminal.say(
            "So it works on this machine only; for clients elsewhere add the server's name:"
        )
        terminal.say(f"  coterie keys certify {folder} --host NAME")


@app.command()
def certify(folder: Folder = DEFAULT, host: Hosts = None) -> None:
    """Renew the server's certificate for two years, and add hosts to it; clients' kits stay good.

    Example:

        coterie keys certify --host 192.0.2.7
    """
    server = _keys()(folder)
    server.certify(host or ())
    terminal.say(_certificate(server))
    terminal.say("The server uses it from its next start.")


@app.command()
def add(
    name: Name,
    keys: FolderOption = DEFAULT,
    out: Annotated[
        Path | None,
        typer.Option(help="The kit's file; default NAME.key.", show_default=False),
    ] = None,
) -> None:
    """Let a client in: make its kit, one small file to carry to the client's machine.

    Example:

        coterie keys add anna
    """
    kit = _keys()(keys).add(name, out or Path(f"{name}.key"))
    terminal.say(
        f"The kit of {name} is {kit}. It holds a private key, which the server does not keep:"
    )
    terminal.say(
        f"carry it to the machine of {name} by a way that nobody else can read, and delete it here."
    )


@app.command("list")
def show(folder: Folder = DEFAULT) -> None:
    """Show the clients that the server lets in, and its certificate's hosts and end."""
    server = _keys()(folder)
    from coterie.engines.flower.keys import fingerprint
    from coterie.results.tables import Table

    clients = [(name, fingerprint(key)) for name, key in server.clients().items()]
    rows = clients or [("none yet", "`coterie keys add NAME` lets one in")]
    terminal.console.print(Table(f"Clients in {folder}", ("client", "fingerprint (SHA-256)"), rows))
    terminal.say(f"\n{_certificate(server)}")


@app.command()
def remove(name: Name, keys: FolderOption = DEFAULT) -> None:
    """Forget a client: the server no longer lets it in."""
    _keys()(keys).remove(name)
    terminal.say(f"From now on the server refuses the kit of {name}.")


def _certificate(server: "Keys") -> str:
    return (
        f"The server's certificate is for {', '.join(server.hosts())}, until"
        f" {server.expires():%Y-%m-%d}."
    )


def _keys() -> "type[Keys]":
    try:
        from coterie.engines.flower.keys import Keys
    except ModuleNotFoundError as error:
        if error.name != "cryptography":
            raise
        raise CoterieError(
            "Deployment needs cryptography: install the extra, pip install 'coterie[flower]'."
        ) from None
    return Keys
