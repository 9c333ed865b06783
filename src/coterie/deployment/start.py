"""Entry points of a deployment: functions that run a server or a client until the run ends."""

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from coterie.bases import load_skeleton
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.forgetting import check_participant
from coterie.deployment.monitoring import monitored
from coterie.deployment.server import ServerRun
from coterie.deployment.site import Site
from coterie.deployment.status import ServerWatch
from coterie.errors import CoterieError
from coterie.federation.checks import check
from coterie.federation.participants import Participant, served
from coterie.files import refuse_links
from coterie.inference.finished import recorded
from coterie.methods.contract import SERVER
from coterie.network.client import keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.link import Seen
from coterie.network.listener import listen
from coterie.network.mailbox import Mailbox
from coterie.network.server import MailboxServer
from coterie.runs import RunFolder, describe
from coterie.runs.progress import logged

log = logging.getLogger("coterie")
MiB = 2**20


@dataclass(frozen=True)
class Serving:
    """The keys, the addresses and the output of a server."""

    keys: Keys
    """The keys of the server and the clients."""
    address: str
    """The address to listen on, HOST:PORT."""
    watch: ServerWatch
    """The display of the run."""
    metrics: str | None = None
    """The address for /health and /metrics, HOST:PORT; None: no such address."""
    log_format: logging.Formatter | None = None
    """The format of server.log; None: plain text."""


def serve(config: RunConfig, out: Path, serving: Serving, without: Sequence[str] = ()) -> RunFolder:
    """Serve a new run until it ends, and return the run folder.

    Args:
        config: The run.
        out: The run folder.
        serving: The keys, the address and the display.
        without: The names of clients that must not take part, even if they have a key.

    Raises:
        CoterieError: The folder or the address is in use, or the run cannot be carried out.
    """
    earlier = RunFolder(out)
    if earlier.checkpoints():
        raise CoterieError(
            f"{out} already contains a run; continue it with --resume, or choose another "
            "folder with --out."
        )
    names = tuple(sorted(client.name for client in config.clients))
    check(config, names, config.data.public is not None)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    own = served(config)
    described = {} if own is None else {SERVER: own.described()}
    clients = {name: {} for name in names}
    id = secrets.token_hex(8)  # identifies the run to clients when the server is restarted
    description = describe(config.as_dict(), clients, config.plugins, run=id, **described)
    # A folder without a checkpoint is left from a failed start and can be overwritten.
    folder = RunFolder.create(out, description, force=earlier.is_run)
    for name in without:
        folder.expel(name)
    return _run_to_end(folder, config, own, serving)


def serve_again(
    out: Path,
    serving: Serving,
    from_round: int | None = None,
    without: Sequence[str] = (),
    update: RunConfig | None = None,
) -> RunFolder:
    """Resume a run whose server has stopped.

    Clients that are still waiting for the server then continue.

    Args:
        out: The run folder.
        serving: The keys, the address and the display.
        from_round: The number of complete rounds after which to resume the run. There must be a
            checkpoint with exactly this number of complete rounds. None: resume from the newest
            checkpoint.
        without: The names of clients to expel.
        update: A run that provides the new section `deployment` and the new device. None: no
            changes.

    Raises:
        CoterieError: The run cannot be resumed.
    """
    folder = RunFolder(out)
    config = recorded(folder)
    update = update or config
    if update.deployment.share_metrics != config.deployment.share_metrics:
        raise CoterieError(
            "deployment.share_metrics has changed since clients agreed to the run; restore it, or "
            "start a new run."
        )
    config = config.model_copy(update={"deployment": update.deployment, "device": update.device})
    for name in without:
        if name not in folder.expelled():  # a repeated command may expel the client again
            check_participant(folder, name)
    with folder.lock():
        if from_round is not None:
            folder.go_back(from_round)
        for name in without:
            folder.expel(name)
    without_key = {client.name for client in config.clients} - serving.keys.clients().keys()
    for name in sorted(without_key - folder.expelled()):
        serving.watch.note(
            f"{name} has no key; create one with `coterie keys add {name}`, or leave the client "
            f"out with --without {name}"
        )
    torch.set_num_threads(folder.description["threads"])
    own = served(config)
    if own is not None and own.digest() != folder.description[SERVER]["data"]:
        raise CoterieError(
            f"The public set or server.test has changed since the run in {out} began; restore "
            "it, or start a new run."
        )
    return _run_to_end(folder, config, own, serving)


def _run_to_end(
    folder: RunFolder, config: RunConfig, own: Participant | None, serving: Serving
) -> RunFolder:
    log.setLevel(logging.INFO)
    remarks = serving.keys.remarks()
    skeleton = load_skeleton(config.base, config.root)
    largest = config.deployment.largest_message * MiB
    file = folder.path / "server.log"
    with folder.lock(), logged(file, log.name, log_format=serving.log_format), errors_logged():
        refuse_links(folder.path, "mailbox")
        mailbox = Mailbox(folder.path / "mailbox")
        run = ServerRun(config, skeleton, folder, mailbox, serving.watch, own)
        for remark in remarks:
            run.monitor.note(remark)
        monitoring = None if serving.metrics is None else listen(serving.metrics, "--metrics")
        listening = listen(serving.address)
        with (
            monitored(run.monitor, monitoring),
            MailboxServer(mailbox, serving.keys, listening, largest),
        ):
            run.rounds()
        log.info("the run is finished")
    return folder


@contextmanager
def errors_logged() -> Iterator[None]:
    """Log the error or the signal that ends the with block."""
    try:
        yield
    except KeyboardInterrupt:
        log.info("stopped")
        raise
    except CoterieError as error:
        log.error(error)
        raise
    except Exception:
        log.exception("the server failed")
        raise


def take_part(
    server: str, credentials: Credentials, site: Site, seen: Seen, stop: threading.Event
) -> Worker:
    """Take part in a run as a client until the run ends.

    Args:
        server: The server's address, HOST:PORT.
        credentials: The client's name, certificate and private key.
        site: The client's texts and settings.
        seen: A function that is called whenever something happens that the user should see.
        stop: An event that ends the client early when it is set.
    """
    log.setLevel(logging.INFO)
    site.out.mkdir(parents=True, exist_ok=True)
    file = site.out / f"client-{site.name}.log"
    with logged(file, log.name), closing(Worker(site, seen)) as worker:
        keep_serving(server, credentials, worker, stop, seen)
    return worker
