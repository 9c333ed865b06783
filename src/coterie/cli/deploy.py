"""The commands `coterie server` and `coterie client`."""

import math
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import (
    Device,
    FromRound,
    Out,
    ServersDevice,
    Settings,
    device_of,
    require_resume,
)
from coterie.errors import CoterieError, imports_for

if TYPE_CHECKING:
    from coterie.cli.console import Estimate
    from coterie.config.run import RunConfig
    from coterie.deployment.client import SiteRun, Worker
    from coterie.deployment.terms import Terms
    from coterie.network.keys import Credentials
    from coterie.privacy.ledger import Budget


DELTA = 1e-5
"""The delta of the privacy budget that --epsilon sets."""
Check = Annotated[
    bool,
    Option("--check", help="Check what the run needs on this machine, without starting the run."),
]

Metrics = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT",
        help="Address for GET /health and GET /metrics (in Prometheus' format), without TLS, such "
        "as 127.0.0.1:9192. Default: none.",
    ),
]
Format = Annotated[
    Literal["text", "json"],
    Option(
        help="Format of server.log, and of the lines that the command prints if the output is not "
        "a terminal."
    ),
]
KeyFolder = Annotated[Path, Option(help="The server's key folder; see `coterie keys`.")]
Data = Annotated[
    str | None,
    Option(
        help="This client's texts: a .txt, .jsonl or .parquet file, or a folder of such files; "
        "split on this machine into training, validation and test text."
    ),
]
LocalBase = Annotated[
    str | None, Option(help="Local copy of the base, if the run's base is a folder.")
]
LocalAdapter = Annotated[
    str | None, Option(help="Local copy of the LoRA adapter, if the run's base has one.")
]
Agreed = Annotated[
    Path | None, Option(help="Run file that you agree to; any other run is declined.")
]
Yes = Annotated[bool, Option("--yes", help="Agree to any run that the server asks for.")]
Without = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Name of a client that must not take part, even if the run file lists it. With "
        "--resume: name of a client to remove from the run. Repeatable.",
    ),
]
Epsilon = Annotated[
    float | None,
    Option(
        min=0,
        max=1e9,
        help="Privacy budget (epsilon, at a delta of 1e-5) for all runs in --out together. It "
        "covers only the data to which methods and transforms add noise before sending. Default: "
        "the budget of the --run file.",
    ),
]


def server(
    file: Annotated[
        Path | None,
        Argument(help="Run file (YAML). It may list clients without the paths of texts."),
    ] = None,
    keys: KeyFolder = Path("keys"),
    address: Annotated[str, Option(help="Address and port to listen on.")] = "127.0.0.1:9092",
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        bool, Option("--resume", help="Resume the run in --out, if there is one.")
    ] = False,
    from_round: FromRound = None,
    without: Without = None,
    device: ServersDevice = None,
    metrics: Metrics = None,
    log_format: Format = "text",
    check: Check = False,
) -> None:
    """Serve a run to clients on other machines.

    Clients authenticate with their keys; create these with `coterie keys init` and
    `coterie keys add alice`. Unless --address is set, the server accepts connections from this
    machine only. The command ends after the last round. The run file can have a section such as

        deployment: {quorum: 3, deadline: 600}

    A round then needs the uploads of three clients, and waits for the other clients for at most
    600 seconds. docs/deploy/set-up.md is a step-by-step guide.

    For example:

        coterie server us.yaml --address 0.0.0.0:9092
    """
    from coterie.config.deployed import check_start, leave_out, load_deployment
    from coterie.config.values import read_values
    from coterie.network.keys import Keys

    registered = list((server_keys := Keys(keys)).clients())
    values = read_values(file, settings or ())
    if device is not None:
        values["device"] = device_of(device)
    config = load_deployment(values, registered)
    folder = out or Path("runs") / config.name
    again = resume and (folder / "run.json").exists()
    if not again:
        require_resume(from_round)
        config = leave_out(config, without or ())
        check_start(config, registered)
    with imports_for("A deployment", "deployment"):
        from coterie.cli.check import check_server
        from coterie.cli.console import Board, JsonLines
        from coterie.deployment.mailbox import MailboxServing
        from coterie.deployment.start import serve, serve_again
    if check:
        return check_server(values, config, server_keys, address, metrics)
    hint = "Finished rounds are saved. To resume, run the same command with --resume."
    as_json = log_format == "json"
    with _stoppable(hint), Board(terminal.console, as_json) as board:
        log = JsonLines() if as_json else None
        serving = MailboxServing(board, metrics, log, keys=server_keys, address=address)
        if again:
            finished = serve_again(folder, serving, from_round, without or (), config)
        else:
            finished = serve(config, folder, serving, without or ())
        board.ends(f"The run is finished and saved in {finished.path}.")


def client(
    server: Annotated[str, Option(metavar="HOST:PORT", help="Address of the server.")],
    key: Annotated[Path, Option(help="This client's key file, from `coterie keys add`.")],
    name: Annotated[
        str | None, Option(help="Name of this client, which must match the key file.")
    ] = None,
    data: Data = None,
    train: Annotated[
        str | None, Option(help="Training text (file or folder), instead of --data.")
    ] = None,
    validation: Annotated[
        str | None, Option(help="Validation text; needs --train. Default: a part of --train.")
    ] = None,
    test: Annotated[
        str | None, Option(help="Test text; needs --train. Default: a part of --train.")
    ] = None,
    base: LocalBase = None,
    adapter: LocalAdapter = None,
    public: Annotated[str | None, Option(help="Local copy of the run's public text.")] = None,
    run: Agreed = None,
    yes: Yes = False,
    epsilon: Epsilon = None,
    device: Device = "auto",
    out: Annotated[Path, Option(help="Folder of this client's run folders.")] = Path("runs"),
    check: Check = False,
) -> None:
    """Join a run as a client. Training text never leaves this machine.

    With --run FILE, the client takes part only in the run that FILE describes. With neither --run
    nor --yes, the client shows the run that the server asks it to join, and prompts for your
    agreement. An agreement holds until the end of the run.

    The client retries until the server answers. After an interruption, the same command resumes
    the run. The client's model is saved in a run folder in --out.

    For example:

        coterie client --server example.org:9092 --key alice.key --data letters --run us.yaml
    """
    if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", server):
        raise CoterieError(f"--server takes HOST:PORT, such as example.org:9092, not {server!r}.")
    credentials = _load_credentials(key, name)
    paths = {"path": data, "train": train, "validation": validation, "test": test}
    texts, devices = validate_texts(credentials.name, paths, device)
    with imports_for("A deployment", "deployment"):
        from coterie.cli.check import check_client
        from coterie.cli.console import ClientBoard
        from coterie.deployment.mailbox import take_part
        from coterie.deployment.site import Site

    agreed, limit = terms_of(run, credentials.name, epsilon)
    folders = {"base": base, "adapter": adapter, "public": public}
    local: Any = {key: _absolute(path) for key, path in folders.items()}
    local |= {"agreed": agreed, "limit": limit, "device": devices}
    site = Site(credentials.name, texts, out, asks=not yes and sys.stdin.isatty(), **local)
    if check:
        return check_client(server, credentials, site)
    if not (run or yes or sys.stdin.isatty()):
        raise CoterieError(
            "The input is not a terminal, so nobody can be asked to agree to the run. Give the "
            "run file with --run, or --yes to agree to any run that the server asks for."
        )
    with _stoppable("Progress is saved. To resume, run the same command."):
        terminal.say(f"{credentials.name}: connecting to {server}")
        with ClientBoard(terminal.console, partial(_estimate, credentials.name)) as board:
            if not yes:
                site = replace(site, agrees=board.agrees)
            worker = take_part(server, credentials, site, board, threading.Event())
    _report(worker, credentials.name)


def terms_of(
    run: Path | None, client: str, epsilon: float | None
) -> "tuple[Terms | None, Budget | None]":
    """Return the terms that a client accepts in advance, and its privacy budget for all runs.

    Terms are the settings of a run that need the client's agreement. The privacy budget limits what
    all runs of the client spend together.

    Args:
        run: The run file of the only run that the client accepts. None if the client accepts no
            terms in advance.
        client: The client's name.
        epsilon: The epsilon of the budget. If None, the budget of the run in the run file is the
            limit for all runs.

    Returns:
        A pair of the terms and the budget. The terms are None if `run` is None. The budget is None
        if `epsilon` is None and no run file with a finite privacy budget is given.
    """
    if epsilon is not None and math.isnan(epsilon):
        raise CoterieError("--epsilon takes a number, not nan.")
    from coterie.privacy.ledger import Budget, together

    limit = None if epsilon is None else Budget(epsilon, DELTA)
    if run is None:
        return None, limit
    from coterie.config.deployed import load_agreed
    from coterie.deployment.terms import agreed_terms
    from coterie.federation.pipeline import budgets_of

    config = load_agreed(run, client)
    total = together(budgets_of(config))
    if limit is None and total is not None and math.isfinite(total.epsilon):
        limit = total
    return agreed_terms(config, client), limit


def _estimate(client: str, config: "RunConfig", clients: int) -> "Estimate":
    """Return what a client needs for a run with a number of clients, as far as it is known."""
    from coterie.adapters.coverage import coverage
    from coterie.analysis.need import need_from
    from coterie.analysis.shapes import shapes_of
    from coterie.bases import load_skeleton
    from coterie.bases.devices import device_type
    from coterie.cli.console import Estimate
    from coterie.federation.sizes import message_sizes
    from coterie.methods.adapter import AdapterMethod

    method, memory = config.method, None
    try:
        shapes = shapes_of(config, client)
        if shapes is not None:
            memory = need_from(shapes, config, device_type(config.device)).memory
            base, parameters = shapes.skeleton, shapes.side.parameters()
        elif isinstance(method, AdapterMethod):
            base = load_skeleton(config.base, config.root)
            parameters = method.adapter(base, config.seed, client).parameters()
        else:
            return Estimate()
    except CoterieError:  # about the base; raised again when the client joins the run
        return Estimate()
    sizes = message_sizes(config, parameters, clients)
    up, down = sizes.largest("up").tensors, sizes.largest("down").tensors
    return Estimate(memory, up, down, coverage(base, parameters.values()).lines())


def _report(worker: "Worker", client: str) -> None:
    """Print how a client's run ended.

    Raises:
        CoterieError: The client left without the run's result, and its user did not decline.
    """
    if worker.declined:
        terminal.say(worker.error)
    elif worker.error:
        raise CoterieError(worker.error)
    elif worker.run is not None:
        _show(worker.run, client)


def _show(run: "SiteRun", client: str) -> None:
    """Print where a client's model is and how to use it."""
    folder = run.folder.path
    terminal.report_unhelped(run.config.label, run.folder.result or {})
    if spent := run.ledger.spent(DELTA):
        terminal.say(
            f"Privacy budget spent by all runs of this client: epsilon {spent:.3g} "
            f"(delta {DELTA:g})."
        )
    terminal.say(f"The run is finished; the model is in {folder}. To generate text:")
    options = '--prompt "..."' + terminal.plugin_options(run.config.plugins)
    terminal.say(f"  coterie generate {folder} --client {client} {options}")


def _load_credentials(file: Path, name: str | None) -> "Credentials":
    from coterie.network.keys import Credentials

    credentials = Credentials.load(file)
    if name not in (None, credentials.name):
        raise CoterieError(f"The key file {file} belongs to {credentials.name!r}, not {name!r}.")
    return credentials.reload()


def _absolute(path: str | None) -> str | None:
    """Make an existing path absolute, and return a name on the hub unchanged."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def validate_texts(
    name: str, paths: Mapping[str, str | None], device: str
) -> tuple[dict[str, str], str | tuple[str, ...]]:
    """Validate a client's options before the client connects to the server.

    Returns:
        A pair. The first item maps keys of a run file, such as `train`, to the absolute paths of
        the client's texts. The second item is the client's device.
    """
    from coterie.bases.devices import devices_of
    from coterie.config.errors import validated
    from coterie.config.sections import RunFile

    if (paths["path"] is None) == (paths["train"] is None):
        raise CoterieError(
            "Both --data and --train are given; give only one."
            if paths["path"]
            else "Neither --data nor --train is given; give --data (a file or folder, which is "
            "split) or --train (and --validation and --test, if you have such texts)."
        )
    texts = {key: str(Path(path).resolve()) for key, path in paths.items() if path is not None}
    run = {"clients": [{"name": name, **texts}], "device": device_of(device)}
    file = validated(RunFile, run)
    devices_of(file.device)
    for path in texts.values():
        if not Path(path).exists():
            raise CoterieError(f"No such file or folder: {path}.")
    return texts, file.device


@contextmanager
def _stoppable(hint: str) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM inside the `with` block into an exit with a hint on how to resume.

    A service manager stops a service with SIGTERM.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        terminal.exit_stopped(hint)
