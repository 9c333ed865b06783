"""The commands of a deployment: `coterie server` and `coterie client`."""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from coterie.cli import terminal
from coterie.cli.options import Out
from coterie.errors import CoterieError

EXTRA = "install the extra, pip install 'coterie[flower]'"


def server(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run file (YAML). Its clients need no path.", show_default=False),
    ] = None,
    keys: Annotated[Path, typer.Option(help="The server's folder; see `coterie keys`.")] = Path(
        "keys"
    ),
    address: Annotated[
        str, typer.Option(help="Where clients reach this server: an address and a port.")
    ] = "127.0.0.1:9092",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a key of the run file: rounds=4. Repeatable."),
    ] = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, if there is one.")
    ] = False,
) -> None:
    """Serve a run to clients on other machines, until its last round.

    Clients are let in by their keys (`coterie keys init`, `coterie keys add alice`). With
    --address 0.0.0.0:9092 they reach it from other machines, through nginx, which must be
    installed. The run file may have a section

        deployment: {quorum: 3, deadline: 600}

    after which a round needs three clients, and ends after ten minutes without the rest.
    docs/deploy.md takes you from nothing to three machines.
    """
    deploy = _deployment()
    from coterie.config import load_deployment
    from coterie.engines.deployed.console import Board

    registered = list((folder_of_keys := deploy.Keys(keys)).clients())
    config = load_deployment(file, settings or (), registered)
    folder = out or Path("runs") / config.name
    how = "Finished rounds are kept; go on with the same command and --resume."
    with _stoppable(how), Board(terminal.console) as board:
        if resume and (folder / "run.json").exists():
            done = deploy.serve_again(folder, folder_of_keys, address, board)
        else:
            done = deploy.serve(config, folder, folder_of_keys, address, board)
    terminal.say(f"The run is finished; it is in {done.path}.")


def client(
    server: Annotated[str, typer.Option(help="The server: HOST:PORT.")],
    key: Annotated[Path, typer.Option(help="This client's kit, from `coterie keys add`.")],
    name: Annotated[
        str | None, typer.Option(help="Default: the kit's name.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="File or folder of .txt, .jsonl or .parquet, divided into splits here.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[
        str | None, typer.Option(help="Or: the text to train on ...", show_default=False)
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="... and that for validation ...", show_default=False)
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="... and that for testing.", show_default=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The run's base, where it lies on this machine.", show_default=False),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(help="The run's public text, where it lies here.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where this client's runs are kept.")] = Path("runs"),
) -> None:
    """Take part in a run as one client. The text never leaves this machine.

    It waits for its server for ever, and goes on where it was after any stop. What travels is
    printed when it has joined; the run's folder then holds the model.

        coterie client --server example.org:9092 --key alice.key --data ./my-texts
    """
    deploy = _deployment()
    if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", server):
        raise CoterieError(f"The server is HOST:PORT, as example.org:9092, not {server!r}.")
    from coterie.engines.deployed.console import ClientBoard

    kit = deploy.Kit.load(key)
    if name not in (None, kit.name):
        raise CoterieError(f"The kit {key} is that of {kit.name!r}, not of {name!r}.")
    given = {"path": data, "train": train, "validation": validation, "test": test}
    texts = {k: str(Path(v).resolve()) for k, v in given.items() if v is not None}
    _check_texts(kit.name, texts)
    site = deploy.Site(kit.name, texts, out, _place(base), _place(public))
    with _stoppable("What is done is kept; the same command goes on."):
        terminal.say(f"{kit.name}: looking for {server}")
        with ClientBoard(terminal.console) as seen:
            worker = deploy.take_part(server, kit, site, seen, threading.Event())
    if worker.run is not None:
        folder = worker.run.folder.path
        terminal.say(f"The run is finished; this client's model is in {folder}. Write with it:")
        terminal.say(f'  coterie generate {folder} --client {kit.name} --prompt "..."')


def _place(path: str | None) -> str | None:
    """A path wherever the command is run; a name on the hub as it is."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def _check_texts(name: str, texts: dict[str, str]) -> None:
    """Raise CoterieError now for what would be an error at the first order."""
    from coterie.config import parse

    parse({"clients": [{"name": name, **texts}]})
    for path in texts.values():
        if not Path(path).exists():
            raise CoterieError(f"There is no {path}.")


def _deployment() -> Any:
    try:
        from coterie.engines.flower import deploy
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "coterie":
            raise
        raise CoterieError(f"A deployment needs {error.name}: {EXTRA}.") from None
    return deploy


@contextmanager
def _stoppable(how: str) -> Iterator[None]:
    """Turn Ctrl-C, and a service manager's SIGTERM, into a sentence that says how to go on."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        terminal.stopped(how)
