"""The contents of orders to join a run, and limits on the orders that a client executes."""

import os
from pathlib import Path
from typing import Any

from coterie.bases import BaseSpec
from coterie.config.plugins import plugins_of
from coterie.config.run import RunConfig
from coterie.deployment.costs import MAX_DISK, too_costly
from coterie.deployment.site import Site, run_folders
from coterie.deployment.terms import disagreement
from coterie.errors import CoterieError, plural
from coterie.files import write_json
from coterie.messages import MessageError
from coterie.messages.envelope import Order, PluginFile
from coterie.runs import RunFolder, read
from coterie.turn import Turn

MAX_TRAININGS = 5
"""The maximum number of times that a client trains in one turn.

The server repeats a turn if the server's process was killed, if too few uploads were valid, if a
client was expelled, or if the operator went back to an earlier checkpoint.
"""
MAX_RUNS = 3
"""The maximum number of runs of a client in its --out folder, unless its user agrees to more.

Unfinished runs count, and so do finished runs with the requested terms. The runs
are counted on disk, so that a restart of the client does not permit more runs.
"""
MAX_UNFINISHED = 8
"""The maximum number of unfinished runs in a client's folder. Each run takes disk space."""
TRAINED = "trained.json"
"""The file in a client's run folder that stores how many times the client trained in each turn."""
DELETE = (
    "move or delete the folders that are no longer needed, and start this client again to take part"
)


def join_fields(config: RunConfig, client: str, clients: int, public: str | None) -> dict[str, Any]:
    """Return the fields that are present only in orders to join.

    Args:
        config: The server's run.
        client: The name of the client that is to join.
        clients: The number of the run's clients after this client has joined.
        public: The digest of the run's public text, or None if the run has no public text.
    """
    used = plugins_of(config.objects)
    files = {
        key: PluginFile(file=Path(plugin.file).name, sha256=plugin.sha256)
        for key, plugin in used.items()
    }
    return {
        "clients": clients,
        "public": public,
        "config": config.visible_to(client),
        "plugins": files or None,
    }


def check_turn(order: Order, config: RunConfig) -> None:
    """Raise MessageError if an order is for a turn that the run does not have.

    Args:
        order: An order for a step or for the end of the run.
        config: The run.
    """
    last, turn = config.turns - (order.kind == "step"), config.turn(order.turn)
    if order.turn > last or (order.kind == "finish" and order.turn < 1):
        raise MessageError(
            f"The server ordered {order.kind!r} in round {turn.round + 1}, but the run has only "
            f"{plural(config.rounds, 'round')}."
        )
    if order.counted is not None and not -1 <= order.counted < order.turn:
        raise MessageError(
            f"The server's order for round {turn.round + 1} says that this client's upload was "
            f"accepted in round {config.turn(order.counted).round + 1}, which is not over."
        )


class Orders:
    """Limits how many runs a client begins, and how often the client trains in each turn.

    The client trains again in a turn if the server repeats the turn.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.bases: set[BaseSpec] = set()
        """The bases of the runs that the client has accepted since it started.

        A base may be downloaded before the run has a folder, and so before the run is counted.
        """

    def refusal(self, order: Order, config: RunConfig, folder: RunFolder) -> str | None:
        """Return why this client refuses a run, or None if the client accepts the run.

        A run that the client has already begun is continued, whatever the number of runs is.

        Raises:
            Declined: The user was asked about a further run, and declined.
        """
        if reason := too_costly(config):
            return reason
        if folder.is_run:
            return None
        out, folders = self.site.out, run_folders(self.site)
        count = sum(_is_unfinished(each) or _has_terms(each, order) for each in folders)
        count = max(count, len(self.bases - {config.base}))
        if count >= MAX_RUNS and not self.site.asks:
            return (
                f"exceeds the limit of {MAX_RUNS} runs that are unfinished or have the same "
                f"settings in {out}, or of {MAX_RUNS} bases; ask the server's operator why there "
                f"are so many. If you agree to another run, {DELETE}"
            )
        if count >= MAX_RUNS and self.site.agreed is not None:  # else the user has just agreed
            self.site.ask(order, config)
        count = sum(map(_is_unfinished, folders))
        if count >= MAX_UNFINISHED:
            return f"cannot begin: this client has {count} unfinished runs in {out}; {DELETE}"
        if reason := self.disk_excess():
            return f"cannot begin: this client has {reason}"
        self.bases.add(config.base)
        return None

    def count_training(self, turn: Turn, folder: RunFolder) -> None:
        """Record in the run folder that the client trains once more in a turn.

        Raises:
            CoterieError: The client has already trained `MAX_TRAININGS` times in this turn, or the
                run folders take too much disk space.
        """
        path = folder.path / TRAINED
        counts = read.read_json(folder.path, TRAINED, read.Trained) if os.path.lexists(path) else {}
        count = counts.get(str(turn.number), 0)
        if count >= MAX_TRAININGS:
            raise CoterieError(
                f"The server has sent this client more than {MAX_TRAININGS} different downloads "
                f"for round {turn.round + 1}; ask the server's operator why. "
                f"To let this client continue, delete {path}."
            )
        if reason := self.disk_excess():
            raise CoterieError(f"This client has {reason}.")
        write_json(path, {**counts, str(turn.number): count + 1})

    def disk_excess(self) -> str | None:
        """Return a message if the run folders take too much disk space, and None otherwise."""
        files = (p for folder in run_folders(self.site) for p in folder.path.rglob("*"))
        total = sum(p.lstat().st_size for p in files if p.is_file() and not p.is_symlink())
        if total <= MAX_DISK:
            return None
        return f"run folders of {total / 2**30:.0f} GiB in total in {self.site.out}; {DELETE}"


def _is_unfinished(folder: RunFolder) -> bool:
    return not (folder.path / "result.json").exists()


def _has_terms(folder: RunFolder, order: Order) -> bool:
    """Return whether an earlier run was begun with the terms that an order requests."""
    agreed = read.read_json(folder.path, "run.json").get("agreed") if folder.is_run else None
    return isinstance(agreed, dict) and disagreement(agreed, order) is None
