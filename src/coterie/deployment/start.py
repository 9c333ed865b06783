"""A server and a client of a real deployment, each from its start to the run's end."""

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx
import torch

from coterie.bases import load_skeleton
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.forgetting import check_participant
from coterie.deployment.server import ServerRun, ServerWatch
from coterie.deployment.site import Site
from coterie.errors import CoterieError
from coterie.federation.participants import Participant, check, served
from coterie.inference.finished import recorded
from coterie.methods.contract import SERVER
from coterie.network.flower.fleet import keep_serving
from coterie.network.flower.link import FlowerLink, SuperLink
from coterie.network.keys import Keys, Kit
from coterie.network.link import Seen
from coterie.runs import RunFolder, describe
from coterie.runs.progress import logged

log = logging.getLogger("coterie")
MiB = 2**20


def serve(
    config: RunConfig,
    out: Path,
    keys: Keys,
    address: str,
    watch: ServerWatch,
    without: Sequence[str] = (),
) -> RunFolder:
    """Begin a run as its server and bring it to its end; returns its folder.

    without: clients that may not take part, even if they have a key.
    Raises CoterieError for anything that can be mended: a folder in use, an address in use, ...
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
    id = secrets.token_hex(8)  # by which clients know it, whatever becomes of this process
    description = describe(config.as_dict(), clients, config.plugins, run=id, **described)
    # A start that came to nothing has left a run without a round; it is begun anew.
    folder = RunFolder.create(out, description, force=earlier.is_run)
    for name in without:
        folder.expel(name)
    return _bring_to_its_end(folder, config, own, keys, address, watch)


def serve_again(
    out: Path,
    keys: Keys,
    address: str,
    watch: ServerWatch,
    from_round: int | None = None,
    without: Sequence[str] = (),
    now: RunConfig | None = None,
) -> RunFolder:
    """Go on with a run of which the server has stopped; clients that wait for it go on too.

    from_round: from the state after so many rounds, if that is kept. without: clients to expel.
    now: how clients are waited for, and the device, from now on; default: as before.
    """
    folder = RunFolder(out)
    config = recorded(folder)
    now = now or config
    if now.deployment.share_metrics != config.deployment.share_metrics:
        raise CoterieError(
            "Clients have agreed to deployment.share_metrics as it was when the run began; set it "
            "back, or begin a new run."
        )
    config = config.model_copy(update={"deployment": now.deployment, "device": now.device})
    for name in without:
        if name not in folder.without():  # else the same command as before
            check_participant(folder, name)
    with folder.lock():
        if from_round is not None:
            folder.go_back(from_round)
        for name in without:
            folder.expel(name)
    lacking = {client.name for client in config.clients} - keys.clients().keys()
    for name in sorted(lacking - folder.without()):
        watch.note(f"{name} has no key; add one, or run without it: --without {name}")
    torch.set_num_threads(folder.description["threads"])
    own = served(config)
    if own is not None and own.digest() != folder.description[SERVER]["data"]:
        raise CoterieError(
            f"The public set or server.test has changed since the run in {out} began; restore "
            "it, or start a new run."
        )
    return _bring_to_its_end(folder, config, own, keys, address, watch)


def _bring_to_its_end(
    folder: RunFolder,
    config: RunConfig,
    own: Participant | None,
    keys: Keys,
    address: str,
    watch: ServerWatch,
) -> RunFolder:
    log.setLevel(logging.INFO)
    for remark in keys.remarks():
        watch.note(remark)
    skeleton = load_skeleton(config.base, config.root)
    largest = config.deployment.largest_message * MiB
    with (
        folder.lock(),
        logged(folder.path / "server.log", log.name),
        SuperLink(folder.path / "flower", keys, address, largest) as superlink,
    ):
        link = FlowerLink(superlink, largest)
        try:
            ServerRun(config, skeleton, folder, link, watch, own).rounds()
        except httpx.HTTPError as error:
            raise CoterieError(
                f"Flower's SuperLink does not respond ({error}); continue with --resume. See "
                f"{superlink.folder / 'superlink.log'}."
            ) from error
    return folder


def take_part(server: str, kit: Kit, site: Site, seen: Seen, stop: threading.Event) -> Worker:
    """Be a client of a server until the run ends, or until `stop`."""
    log.setLevel(logging.INFO)
    site.out.mkdir(parents=True, exist_ok=True)
    file = site.out / f"client-{site.name}.log"
    with logged(file, log.name), closing(Worker(site, seen)) as worker:
        keep_serving(server, kit, worker, stop, seen)
    return worker
