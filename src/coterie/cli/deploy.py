"""The commands of a deployment: `coterie server`, `client`, `expel` and `forget`."""

import math
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import (
    Device,
    FromRound,
    Out,
    ServersDevice,
    Settings,
    check_run,
    device_of,
    needs_resume,
)
from coterie.errors import CoterieError, plural
from coterie.network.flower import imports_for

if TYPE_CHECKING:
    from coterie.config.run import RunConfig
    from coterie.deployment.client import SiteRun
    from coterie.deployment.terms import Terms
    from coterie.network.keys import Kit
    from coterie.privacy.ledger import Budget

DELTA = 1e-5
"""Of the limit on what is spent."""
Check = Annotated[
    bool, typer.Option("--check", help="Try what the run needs on this machine; start nothing.")
]

KeyFolder = Annotated[Path, typer.Option(help="The server's key folder; see `coterie keys`.")]
Data = Annotated[
    str | None,
    typer.Option(help="File or folder of .txt, .jsonl or .parquet, split on this machine."),
]
Agreed = Annotated[
    Path | None, typer.Option(help="The run file that you agree to; any other run is refused.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Agree to whatever run the server asks for.")]
Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Run without a client of the run file; with --resume, expel it. Repeatable.",
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1e9,
        help="Privacy budget of all this client's runs in --out together, for what methods and "
        "transforms send under noise (epsilon; delta is 1e-5). Default: that of the --run file.",
    ),
]
ServersRun = Annotated[Path, typer.Argument(help="The server's run folder.")]
ClientName = Annotated[str, typer.Option(help="The client's name.")]


def server(
    file: Annotated[
        Path | None, typer.Argument(help="A run file (YAML). Its clients need no path.")
    ] = None,
    keys: KeyFolder = Path("keys"),
    address: Annotated[str, typer.Option(help="Address and port to listen on.")] = "127.0.0.1:9092",
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the folder, if there is one.")
    ] = False,
    from_round: FromRound = None,
    without: Without = None,
    device: ServersDevice = None,
    check: Check = False,
) -> None:
    """Serve a run to clients on other machines until its last round.

    Clients authenticate with their keys (`coterie keys init`, `coterie keys add alice`). To accept
    clients from other machines, set --address 0.0.0.0:9092. The run file can have a section

        deployment: {quorum: 3, deadline: 600}

    With it, a round needs three clients and waits at most ten minutes for the others.
    docs/deploy/deployment.md is a step-by-step guide.
    """
    from coterie.config.deployed import check_start, load_deployment
    from coterie.config.values import read_values

    with imports_for("A deployment", "flower"):
        from coterie.network.keys import Keys

    registered = list((folder_of_keys := Keys(keys)).clients())
    values = read_values(file, settings or ())
    if device is not None:
        values["device"] = device_of(device)
    config = load_deployment(values, registered, without or ())
    folder = out or Path("runs") / config.name
    again = resume and (folder / "run.json").exists()
    if not again:
        needs_resume(from_round)
        check_start(config, registered)
    with imports_for("A deployment", "flower"):
        from coterie.cli.check import check_server
        from coterie.cli.console import Board
        from coterie.deployment import start as deploy
    if check:
        return check_server(values, config, folder_of_keys, address)
    how = "Finished rounds are saved. To resume, run the same command with --resume."
    with _stoppable(how), Board(terminal.console) as board:
        if again:
            done = deploy.serve_again(
                folder, folder_of_keys, address, board, from_round, without or (), config
            )
        else:
            done = deploy.serve(config, folder, folder_of_keys, address, board, without or ())
    terminal.say(f"The run is finished and saved in {done.path}.")


def client(
    server: Annotated[str, typer.Option(help="Address of the server, HOST:PORT.")],
    key: Annotated[Path, typer.Option(help="This client's kit, from `coterie keys add`.")],
    name: Annotated[str | None, typer.Option(help="The client's name. Default: the kit's.")] = None,
    data: Data = None,
    train: Annotated[str | None, typer.Option(help="Training text, instead of --data.")] = None,
    validation: Annotated[str | None, typer.Option(help="Validation text, with --train.")] = None,
    test: Annotated[str | None, typer.Option(help="Test text, with --train.")] = None,
    base: Annotated[str | None, typer.Option(help="Local path of the run's base.")] = None,
    public: Annotated[str | None, typer.Option(help="Local path of the run's public text.")] = None,
    run: Agreed = None,
    yes: Yes = False,
    epsilon: Epsilon = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder of this client's runs.")] = Path("runs"),
    check: Check = False,
) -> None:
    """Join a run as a client. Training text never leaves this machine.

    With --run, the client takes part in the run of that file and in no other. Without it, it shows
    what the server asks for, and waits for your answer. What was agreed holds until the run's end.

    The client keeps retrying until the server answers, and resumes after an interruption. Its model
    is saved in the run's folder.

        coterie client --server example.org:9092 --key alice.key --data ./my-texts --run us.yaml
    """
    if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", server):
        raise CoterieError(f"--server takes HOST:PORT, such as example.org:9092, not {server!r}.")
    kit = _kit(key, name)
    given = {"path": data, "train": train, "validation": validation, "test": test}
    texts, place = _checked(kit.name, given, device)
    with imports_for("A deployment", "flower"):
        from coterie.cli.check import check_client
        from coterie.cli.console import ClientBoard
        from coterie.deployment import start as deploy

    agreed, limit = _agreed(run, kit.name, epsilon)
    own = {"base": _place(base), "public": _place(public), "device": place}
    site = deploy.Site(kit.name, texts, out, agreed=agreed, limit=limit, **own)
    if check:
        return check_client(server, kit, site)
    if not (run or yes or sys.stdin.isatty()):
        raise CoterieError(
            "Nobody can be asked here whether to take part; give the run file with --run, or --yes "
            "to agree to whatever the server asks for."
        )
    with _stoppable("Progress is saved. To resume, run the same command."):
        terminal.say(f"{kit.name}: connecting to {server}")
        with ClientBoard(terminal.console, lambda config: _memory(config, kit.name)) as seen:
            if not yes:
                site = replace(site, agrees=seen.agrees, asks=sys.stdin.isatty())
            worker = deploy.take_part(server, kit, site, seen, threading.Event())
    if worker.declined:
        raise CoterieError(f"The run {worker.declined}. Nothing more was sent.")
    if worker.error:
        raise CoterieError(worker.error)
    if worker.run is not None:
        _show(worker.run, kit.name)


def expel(run: ServersRun, client: ClientName) -> None:
    """Expel a client from a deployed run, also while the server is working.

    The round in progress begins anew, and the run continues without it: with a quorum of all
    clients, all others are enough. The server drops what the method keeps of this client alone.

        coterie expel runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import check_participant
    from coterie.runs import RunFolder

    folder = RunFolder(run)
    check_participant(folder, client)
    folder.expel(client)
    terminal.say(
        f"{client} takes no further part in {run}.",
        f"Its kit can still connect; `coterie keys remove {client}` ends that.",
        f"To delete what the server keeps of it: `coterie forget {run} --client {client}`",
    )


def forget(run: ServersRun, client: ClientName) -> None:
    """Delete what a server keeps of a client that leaves: its state, figures and log lines.

    The server must have stopped; resume it afterwards. What was averaged into the model cannot be
    taken out again: this says in which rounds, and how to train without the client.

        coterie forget runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import forget as forget_in
    from coterie.runs import RunFolder

    done = forget_in(RunFolder(run), client)
    terminal.say(
        f"Deleted what {run} kept of {client}: what the last checkpoint had of it, all earlier "
        f"checkpoints, {plural(done.metrics, 'figure')} and {plural(done.log_lines, 'line')} of "
        "logs. The name itself is still in run.json and without.json."
    )
    if done.rounds:
        terminal.say(
            f"Its uploads counted in {plural(len(done.rounds), 'round')}, the last time in round "
            f"{done.rounds[-1]}. What they changed in the shared parameters, and in the models of "
            "the other clients, cannot be taken back.",
            "To train again without it, begin a new run:",
            f"  coterie server FILE --without {client} --out FOLDER",
        )
    terminal.say(f"Its kit can still connect; `coterie keys remove {client}` ends that.")


def _agreed(
    run: Path | None, client: str, epsilon: float | None
) -> "tuple[Terms | None, Budget | None]":
    """What a run file says that a client agrees to, and what all its runs may spend."""
    if epsilon is not None and math.isnan(epsilon):
        raise CoterieError("--epsilon takes a number, and not nan.")
    from coterie.privacy.ledger import Budget, together

    limit = None if epsilon is None else Budget(epsilon, DELTA)
    if run is None:
        return None, limit
    from coterie.config.deployed import load_agreed
    from coterie.deployment.terms import agreed_terms

    config = load_agreed(run, client)
    own = together(config.budgets)
    if limit is None and own is not None and math.isfinite(own.epsilon):
        limit = own
    return agreed_terms(config, client), limit


def _memory(config: "RunConfig", client: str) -> int | None:
    """The bytes of memory that a client needs for a run; None if nobody can tell."""
    from coterie.analysis.need import need_of

    try:
        need = need_of(config, client)
    except CoterieError:  # of the base, whose error comes when the run is joined
        return None
    return None if need is None else need.memory


def _show(run: "SiteRun", client: str) -> None:
    """Where a client's model is, and how to use it."""
    folder = run.folder.path
    terminal.tell_unhelped(run.config.label, run.folder.result or {})
    if spent := run.ledger.spent(DELTA):
        terminal.say(
            f"What was sent under noise has spent an epsilon of {spent:.3g} (delta {DELTA:g}) in "
            "all runs of this client."
        )
    terminal.say(f"The run is finished; the model is in {folder}. To generate text:")
    given = '--prompt "..."' + terminal.plugin_options(run.config.plugins)
    terminal.say(f"  coterie generate {folder} --client {client} {given}")


def _kit(file: Path, name: str | None) -> "Kit":
    with imports_for("A deployment", "flower"):
        from coterie.network.keys import Kit

    kit = Kit.load(file)
    if name not in (None, kit.name):
        raise CoterieError(f"The kit {file} belongs to {kit.name!r}, not {name!r}.")
    return kit.again()


def _place(path: str | None) -> str | None:
    """A path wherever the command is run; a name on the hub as it is."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def _checked(
    name: str, given: Mapping[str, str | None], device: str
) -> tuple[dict[str, str], str | tuple[str, ...]]:
    """Where a client's texts are, and its device; raises CoterieError now for an error at the first
    order."""
    from coterie.config.errors import validated
    from coterie.config.sections import RunFile

    if (given["path"] is None) == (given["train"] is None):
        raise CoterieError(
            "Both --data and --train are given; give only one."
            if given["path"]
            else "Neither --data nor --train is given; give --data (a file or folder, which is "
            "split) or --train (with --validation and --test, if there are any)."
        )
    texts = {key: str(Path(path).resolve()) for key, path in given.items() if path is not None}
    run = {"clients": [{"name": name, **texts}], "device": device_of(device)}
    checked = validated(RunFile, run)
    for path in texts.values():
        if not Path(path).exists():
            raise CoterieError(f"No such file or folder: {path}.")
    return texts, checked.device


@contextmanager
def _stoppable(how: str) -> Iterator[None]:
    """Turn Ctrl-C, and a service manager's SIGTERM, into a sentence that says how to go on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        terminal.stopped(how)
