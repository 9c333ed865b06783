"""Orders: what a server sends, and what a client obeys: the rounds that were agreed, and few
repetitions."""

import os
from pathlib import Path
from typing import Any

from coterie.config.plugins import plugins_of
from coterie.config.run import RunConfig
from coterie.deployment.costs import MAX_DISK, too_costly
from coterie.deployment.site import Site
from coterie.errors import CoterieError, plural
from coterie.files import write_json
from coterie.messages import MessageError
from coterie.messages.envelope import Order, PluginFile
from coterie.runs import RunFolder, read

MAX_TRAININGS = 5
"""How often a client trains in one round. A round is opened again when the server was killed, lost
too many uploads, expelled a client, or went back to an earlier checkpoint."""
MAX_NEW_RUNS = 3
"""How many new runs a client begins between its start and its end."""
MAX_UNFINISHED = 8
"""How many unfinished runs a client keeps in its folder; each takes disk space."""
TRAINED = "trained.json"
"""In a client's run folder: how often each round was trained, by round."""
DELETE = "delete the folders that are no longer needed, and start this client again to take part"


def join_fields(config: RunConfig, client: str, public: str | None) -> dict[str, Any]:
    """Return what an order to join says of the run, beside what every order does.

    public: the digest of the run's public text, if it has one.
    """
    used = plugins_of(config.objects)
    files = {
        key: PluginFile(file=Path(plugin.file).name, sha256=plugin.sha256)
        for key, plugin in used.items()
    }
    return {"public": public, "config": config.visible_to(client), "plugins": files or None}


def check_round(order: Order, exchanges: int) -> None:
    """Raise MessageError for an order outside the rounds of a run.

    Args:
        order: A step of a round, or the end of the run.
        exchanges: How many rounds the run has, with one message each way.
    """
    most = exchanges - (order.kind == "step")
    if order.round > most or (order.kind == "finish" and order.round < 1):
        raise MessageError(
            f"The server ordered {order.kind!r} in round {order.round + 1}, but the run has only "
            f"{plural(exchanges, 'round')}."
        )
    if order.counted is not None and not -1 <= order.counted < order.round:
        raise MessageError(
            f"The server counts round {order.counted + 1} before round {order.round + 1} is over."
        )


class Orders:
    """What one client has done for its server so far."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.runs: set[str] = set()
        """The ids of the runs that were begun since somebody was last asked about them."""

    def refusal(self, order: Order, config: RunConfig, folder: RunFolder) -> str | None:
        """Note a run; return why this client does not begin it, or None if it does, or goes on."""
        if why := too_costly(config):
            return why
        if folder.is_run or order.run in self.runs:
            return None
        if len(self.runs) >= MAX_NEW_RUNS:
            if not (self.site.asks and self.site.agrees(order, config)):
                return (
                    f"is the server's new run number {len(self.runs) + 1} since this client "
                    "started; ask its operator why, and start this client again to take part"
                )
            self.runs.clear()
        out = self.site.out
        pattern = f"*-{self.site.name}-*/run.json"
        unfinished = [p for p in out.glob(pattern) if not p.with_name("result.json").exists()]
        if len(unfinished) >= MAX_UNFINISHED:
            return f"comes after {len(unfinished)} unfinished runs in {out}; {DELETE}"
        if why := self.too_large():
            return f"comes after {why}"
        self.runs.add(order.run)
        return None

    def count_training(self, order: Order, folder: RunFolder) -> None:
        """Note a training in the run's folder, where it outlives this process.

        Raises:
            CoterieError: The round was trained too often, or the runs take too much disk space.
        """
        path = folder.path / TRAINED
        counts = read.read_json(folder.path, TRAINED, read.Trained) if os.path.lexists(path) else {}
        count = counts.get(str(order.round), 0)
        if count >= MAX_TRAININGS:
            raise CoterieError(
                f"The server has ordered round {order.round + 1} more than {MAX_TRAININGS} times "
                f"with different downloads; ask its operator why. To go on, delete {path}."
            )
        if why := self.too_large():
            raise CoterieError(f"This client has {why}.")
        write_json(path, {**counts, str(order.round): count + 1})

    def too_large(self) -> str | None:
        """Return how the run folders take too much disk space; None if they do not."""
        folders = self.site.out.glob(f"*-{self.site.name}-*")
        files = (p for folder in folders if not folder.is_symlink() for p in folder.rglob("*"))
        total = sum(p.lstat().st_size for p in files if p.is_file() and not p.is_symlink())
        if total <= MAX_DISK:
            return None
        return f"runs of {total / 2**30:.0f} GiB in {self.site.out}; {DELETE}"
