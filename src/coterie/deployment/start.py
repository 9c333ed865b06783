"""Runs the server of a deployment until the run ends."""

import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.bases import load_skeleton
from coterie.config.run import RunConfig
from coterie.deployment.forgetting import check_participant, participants
from coterie.deployment.monitoring import monitored
from coterie.deployment.server import ServerRun
from coterie.deployment.status import ServerWatch
from coterie.deployment.terms import flat
from coterie.errors import CoterieError
from coterie.federation.checks import check
from coterie.federation.participants import Participant, served
from coterie.files import write_json
from coterie.inference.finished import recorded
from coterie.memory import return_freed_memory
from coterie.methods.contract import SERVER
from coterie.network.address import listen
from coterie.network.link import Link
from coterie.runs import RunFolder, describe
from coterie.runs.progress import logged

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Serving(ABC):
    """The network of a server, and the callbacks that display the server's run.

    The class also contains the address for monitoring and the format of the log. A subclass
    implements `link`, which connects the server with its clients.
    """

    watch: ServerWatch
    """The callbacks that display the run."""
    metrics: str | None = None
    """The address that serves /health and /metrics, HOST:PORT; None: they are not served."""
    log_format: logging.Formatter | None = None
    """The format of server.log; None: plain text."""

    @abstractmethod
    def link(self, folder: RunFolder, config: RunConfig) -> AbstractContextManager[Link]:
        """Connect the server with its clients.

        Args:
            folder: The run folder.
            config: The run.

        Returns:
            A context manager that yields the link, and disconnects the clients at the end.

        Raises:
            CoterieError: The network cannot be used.
        """

    def clients(self) -> Collection[str] | None:
        """Return the names of the clients that can connect, or None if they are unknown."""
        return None

    def remarks(self) -> Sequence[str]:
        """Return sentences about the network that the operator should read."""
        return ()


def serve(config: RunConfig, out: Path, serving: Serving, without: Sequence[str] = ()) -> RunFolder:
    """Serve a new run until it ends, and return the run folder.

    Args:
        config: The run.
        out: The run folder.
        serving: The settings of the server's network, and the display of the run.
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
    """Resume a run whose server has stopped, serve it until it ends, and return the run folder.

    As soon as the server is reachable again, clients that are still waiting for it continue.

    Args:
        out: The run folder.
        serving: The settings of the server's network, and the display of the run.
        from_round: The number of complete rounds after which to resume the run. There must be a
            checkpoint with exactly this number of complete rounds. None: resume from the newest
            checkpoint.
        without: The names of clients to expel.
        update: A run whose section `deployment` and key `device` replace the resumed run's section
            and key. None: no changes.

    Raises:
        CoterieError: The run cannot be resumed, or other settings of `update` differ from those of
            the run.
    """
    folder = RunFolder(out)
    config = recorded(folder)
    update = update or config
    _check_unchanged(folder, config, update, without)
    config = config.model_copy(update={"deployment": update.deployment, "device": update.device})
    names = {client.name for client in config.clients}
    for name in without:
        if name not in folder.expelled():  # a repeated command may expel the client again
            check_participant(folder, name)
    with folder.lock():
        if from_round is not None:
            folder.go_back(from_round, config.turns_in)
        for name in without:
            folder.expel(name)
        description = folder.description
        description["config"]["deployment"] = config.deployment.model_dump()
        write_json(folder.path / "run.json", description)
    if (registered := serving.clients()) is None:
        registered = names
    for name in sorted(names - {*registered} - folder.expelled()):
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


def _check_unchanged(
    folder: RunFolder, config: RunConfig, update: RunConfig, without: Collection[str]
) -> None:
    """Check that `update` differs from the resumed run `config` only in settings that can change.

    Raises:
        CoterieError: Another setting differs, or the clients differ from those of the run and its
            expelled clients although not anyone may join.
    """
    before, after = (dict(flat(_fixed(run))) for run in (config, update))
    changes = [
        f"{key} ({json.dumps(before.get(key))}, now {json.dumps(after.get(key))})"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if not update.deployment.anyone:
        names, listed = ({client.name for client in run.clients} for run in (config, update))
        added = sorted(listed - participants(folder))
        missing = sorted(names - listed - folder.expelled() - {*without})
        changes += [f"clients ({name} is not part of the run)" for name in added]
        changes += [
            f"clients ({name} is missing; expel it with --without {name})" for name in missing
        ]
    if changes:
        raise CoterieError(
            f"Some settings cannot change when a run is resumed: {'; '.join(changes)}. Restore "
            "them, or start a new run in another folder with --out."
        )


def _fixed(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run that cannot change when the run is resumed."""
    variable = ("clients", "data_root", "deployment", "device")
    settings = {k: v for k, v in config.as_dict().items() if k not in variable}
    return {**settings, "deployment": {"share_metrics": config.deployment.share_metrics}}


def _run_to_end(
    folder: RunFolder, config: RunConfig, own: Participant | None, serving: Serving
) -> RunFolder:
    log.setLevel(logging.INFO)
    return_freed_memory()
    remarks = serving.remarks()
    skeleton = load_skeleton(config.base, config.root)
    file = folder.path / "server.log"
    with folder.lock(), logged(file, log.name, log_format=serving.log_format), errors_logged():
        monitoring = None if serving.metrics is None else listen(serving.metrics, "--metrics")
        with serving.link(folder, config) as link:
            run = ServerRun(config, skeleton, folder, link, serving.watch, own)
            with monitored(run.monitor, monitoring):
                for remark in remarks:
                    run.monitor.note(remark)
                run.rounds()
        log.info("the run is finished")
    return folder


@contextmanager
def errors_logged() -> Iterator[None]:
    """Log the error or the signal that ends the `with` block."""
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
