"""The contents of orders to join a run, and limits on the orders that a client executes."""

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
"""The maximum number of times that a client trains in one round.

The server repeats a round if the server's process was killed, if too few uploads were valid, if a
client was expelled, or if the operator went back to an earlier checkpoint.
"""
MAX_NEW_RUNS = 3
"""The maximum number of new runs that a client begins before its user must agree again."""
MAX_UNFINISHED = 8
"""The maximum number of unfinished runs in a client's folder. Each run takes disk space."""
TRAINED = "trained.json"
"""The file in a client's run folder that stores how many times each round was trained."""
DELETE = "delete the folders that are no longer needed, and start this client again to take part"


def join_fields(config: RunConfig, client: str, public: str | None) -> dict[str, Any]:
    """Return the fields that are present only in orders to join.

    Args:
        config: The server's run.
        client: The name of the client that is to join.
        public: The digest of the run's public text, or None if the run has no public text.
    """
    used = plugins_of(config.objects)
    files = {
        key: PluginFile(file=Path(plugin.file).name, sha256=plugin.sha256)
        for key, plugin in used.items()
    }
    return {"public": public, "config": config.visible_to(client), "plugins": files or None}


def check_round(order: Order, exchanges: int) -> None:
    """Raise MessageError if an order is for a round that the run does not have.

    Args:
        order: An order for a step or for the end of the run.
        exchanges: The number of exchanges in the run.
    """
    last = exchanges - (order.kind == "step")
    if order.round > last or (order.kind == "finish" and order.round < 1):
        raise MessageError(
            f"The server ordered {order.kind!r} in round {order.round + 1}, but the run has only "
            f"{plural(exchanges, 'round')}."
        )
    if order.counted is not None and not -1 <= order.counted < order.round:
        raise MessageError(
            f"The server's order for round {order.round + 1} says that this client's upload was "
            f"accepted in round {order.counted + 1}, which is not over."
        )


class Orders:
    """Limits how many new runs a client begins, and how often the client trains in each round.

    The client trains again in a round if the server repeats the round.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.runs: set[str] = set()
        """The ids of the runs that the client has begun since the user was last asked."""

    def refusal(self, order: Order, config: RunConfig, folder: RunFolder) -> str | None:
        """Return why this client refuses a run, or None if the client accepts the run.

        A new run that the client accepts counts towards the limit `MAX_NEW_RUNS`. A run that the
        client has already begun does not count again.

        Raises:
            Declined: The user was asked again after several new runs, and declined.
        """
        if reason := too_costly(config):
            return reason
        if folder.is_run or order.run in self.runs:
            return None
        if len(self.runs) >= MAX_NEW_RUNS:
            if not self.site.asks:
                return (
                    f"exceeds the limit of {MAX_NEW_RUNS} new runs since this client started; ask "
                    "the server's operator why there are so many runs, and start this client again "
                    "to take part"
                )
            self.site.ask(order, config)
            self.runs.clear()
        out = self.site.out
        pattern = f"*-{self.site.name}-*/run.json"
        unfinished = [p for p in out.glob(pattern) if not p.with_name("result.json").exists()]
        if len(unfinished) >= MAX_UNFINISHED:
            count = len(unfinished)
            return f"cannot begin: this client has {count} unfinished runs in {out}; {DELETE}"
        if reason := self.disk_excess():
            return f"cannot begin: this client has {reason}"
        self.runs.add(order.run)
        return None

    def count_training(self, order: Order, folder: RunFolder) -> None:
        """Record in the run folder that the client trains once more in the round of an order.

        Raises:
            CoterieError: The client has already trained `MAX_TRAININGS` times in this round, or the
                run folders take too much disk space.
        """
        path = folder.path / TRAINED
        counts = read.read_json(folder.path, TRAINED, read.Trained) if os.path.lexists(path) else {}
        count = counts.get(str(order.round), 0)
        if count >= MAX_TRAININGS:
            raise CoterieError(
                f"The server has sent this client more than {MAX_TRAININGS} different downloads "
                f"for round {order.round + 1}; ask the server's operator why. "
                f"To let this client continue, delete {path}."
            )
        if reason := self.disk_excess():
            raise CoterieError(f"This client has {reason}.")
        write_json(path, {**counts, str(order.round): count + 1})

    def disk_excess(self) -> str | None:
        """Return a message if the run folders take too much disk space, and None otherwise."""
        folders = self.site.out.glob(f"*-{self.site.name}-*")
        files = (p for folder in folders if not folder.is_symlink() for p in folder.rglob("*"))
        total = sum(p.lstat().st_size for p in files if p.is_file() and not p.is_symlink())
        if total <= MAX_DISK:
            return None
        return f"run folders of {total / 2**30:.0f} GiB in total in {self.site.out}; {DELETE}"
