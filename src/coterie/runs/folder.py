"""The run folder: a run's description, metrics, checkpoints and result.

run.json             the run's description, the number of threads, versions, and hashes of texts
metrics.jsonl        a line for each metric: round, client, name, value; and `during`, the number of
                     the turn in which the metric was recorded, if this number differs from `round`
checkpoints/00012/   after 12 turns, checksums, and states: server, server-FIELD-CLIENT (tensors of
                     one client), server-FIELD.NUMBER (of several), client-NAME, kept-NAME (best)
scores/POINT/NAME.json  the last score of each window of the test text NAME; POINT: the scored model
                     (trained, aggregated, or commonest, which always gives the commonest answer)
states/              during a run, clients' states that are newer than the newest checkpoint
result.json          the scores of a finished run
without.json         the clients that were expelled from a deployed run
received.json        the clients that have received the result of a deployed run
baselines/NAME/      the run folder of a baseline; evaluations/: scores on tasks of lm-eval
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import torch

from coterie.errors import CoterieError
from coterie.files import (
    append_to,
    link,
    open_lock,
    parse_json,
    read_inside,
    refuse_links,
    write_bytes,
    write_folder,
    write_json,
    write_text,
    writing,
)
from coterie.messages import Json, State
from coterie.messages.formats import VERSION, check_format, version_fields
from coterie.runs import read
from coterie.runs.state_file import StateFile, checksum
from coterie.runs.store import Stored

CHECKSUMS = "checksums.json"
"""The file in a checkpoint with the name and the hash of each other file in the checkpoint."""
WITHOUT = "without.json"
"""The file with the names of the clients that were expelled from a deployed run."""
RECEIVED = "received.json"
"""The file with the names of the clients that have received the result of a deployed run."""
FOLDERS = ("checkpoints", "states", "baselines", "scores", "evaluations", "tensorboard", "wandb")
LEFTOVERS = (".lock", ".run.json.*tmp")
"""Patterns of the files that remain if a process is killed while it creates a run folder."""


def describe(
    config: Mapping[str, Json],
    clients: Mapping[str, Json],
    plugins: Mapping[str, Json],
    **extra: Json,
) -> dict[str, Json]:
    """Return the content of run.json: the run, and the environment needed to repeat the run."""
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return {**environment, **extra, "plugins": plugins, "clients": clients, "config": config}


class RunFolder:
    """The files of a run. Writes are atomic: a process that is killed loses at most one turn."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def temporary(cls) -> "RunFolder":
        """Create an empty folder that is deleted together with the returned object."""
        folder = cls(Path(mkdtemp(prefix="coterie-")))
        finalize(folder, shutil.rmtree, folder.path, ignore_errors=True)
        return folder

    @classmethod
    def create(
        cls, path: Path, description: Mapping[str, Json], force: bool = False
    ) -> "RunFolder":
        """Create the folder of a new run, unless `refuse` raises CoterieError for this folder."""
        folder = cls(path)
        folder.refuse(force)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)  # the models contain private text
        with folder.lock():
            folder.refuse(force)  # another process may have created a run meanwhile
            folder._clear()
            write_json(path / "run.json", {**version_fields(), **description})
        return folder

    def refuse(self, force: bool) -> None:
        """Raise CoterieError if the folder has files; with `force`, a run folder is permitted."""
        if self.is_run:
            if not force:
                raise CoterieError(
                    f"{self.path} already contains a run. Continue it with `coterie run "
                    f"--resume {self.path}`, choose another folder with --out, or overwrite it "
                    "with --force."
                )
        elif self.path.exists() and not self._is_empty():
            raise CoterieError(
                f"{self.path} exists and is not a run folder; choose another folder with --out."
            )

    @property
    def is_run(self) -> bool:
        """Whether the folder contains a run."""
        try:
            return "config" in read.read_json(self.path, "run.json")
        except CoterieError:
            return False

    def _is_empty(self) -> bool:
        """Return whether the path is a folder with no files except those that match `LEFTOVERS`."""
        with writing(self.path):
            left = (any(fnmatchcase(p.name, g) for g in LEFTOVERS) for p in self.path.iterdir())
            return self.path.is_dir() and all(left)

    def _clear(self) -> None:
        """Delete an earlier run's files, except for run.json, which `create` overwrites later."""
        for name in ("result.json", "metrics.jsonl", "table.md", WITHOUT, RECEIVED):
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    @property
    def description(self) -> dict[str, Any]:
        """The content of run.json; raises CoterieError if it is missing, invalid or outdated."""
        description = read.read_json(self.path, "run.json")
        if "config" not in description:
            raise CoterieError(f"{self.path} is not a run folder (run.json describes no run).")
        check_format(f"The run in {self.path}", description, read.OUTDATED)
        read.check(self.path / "run.json", description, read.Description)
        return description

    @contextmanager
    def naming_versions(self) -> Iterator[None]:
        """Add run.json and the versions of Coterie to a CoterieError about the configuration."""
        try:
            yield
        except CoterieError as error:
            raise CoterieError(
                f"Coterie {VERSION} cannot use the configuration in {self.path / 'run.json'}, "
                f"which Coterie {self.description.get('coterie', 'unknown')!s:.20} wrote: {error} "
                f"{read.OUTDATED}"
            ) from error

    @property
    def result(self) -> dict[str, Any] | None:
        """The scores of a finished run; None if the run is not finished."""
        if not os.path.lexists(self.path / "result.json"):
            return None
        return read.read_json(self.path, "result.json", read.Result)

    @property
    def outcome(self) -> dict[str, Any] | None:
        """The result, the `seed` and the `items` of a run; None if the run is not finished.

        `items[point][text]` contains the scores of the model `point` for the test text `text`.
        """
        if (result := self.result) is None:
            return None
        items: dict[str, dict[str, Any]] = {}
        for path in sorted(self.path.glob("scores/*/*.json")):
            scores = read.read_json(self.path, str(path.relative_to(self.path)), read.Items)
            items.setdefault(path.parent.name, {})[path.stem] = scores
        return {**result, "seed": self.description["config"]["seed"], "items": items}

    def keep_items(self, point: str, text: str, items: Mapping[str, Json]) -> None:
        """Write `items`, the score of each window of test text `text`, for the model `point`."""
        path = self.path / "scores" / point / f"{text}.json"
        refuse_links(self.path, path.parent.relative_to(self.path))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, items)

    def finish(self, result: Mapping[str, Json]) -> None:
        """Write the result, which marks the run as finished."""
        write_json(self.path / "result.json", result)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, or raise CoterieError; delete what a killed process left incomplete."""
        with open_lock(self.path / ".lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CoterieError(
                    f"Another process is using {self.path}; wait for it, or stop it."
                ) from None
            refuse_links(self.path, "checkpoints")
            for left in (self.path / "checkpoints").glob(".*"):
                if left.suffix == ".old" and not (newest := left.with_name(left.stem[1:])).exists():
                    left.rename(newest)  # killed in `change`, between two renames
                self.drop([left])
            yield

    def save(
        self,
        turns: int,
        states: Iterable[tuple[str, State | Stored | StateFile | None]],
        *,
        files: Mapping[str, bytes] | None = None,
        keep: int = 2,
    ) -> None:
        """Write a checkpoint after `turns` turns; delete all but the newest `keep` checkpoints.

        States are written one at a time; the file of a `StateFile` is moved. A state that is None
        has not changed since the previous checkpoint; it is hard-linked, and so is a `Stored` state
        that an earlier checkpoint contains. `files` are additional files of the checkpoint.
        """
        refuse_links(self.path, "checkpoints")
        newest, previous = self.checkpoint(turns), self.checkpoint(self.turns())
        sums, saved, checksums = dict[str, str](), dict[Stored, Path](), cache(self._checksums)

        def fill(folder: Path) -> None:
            for name, state in states:
                file = f"{name}.safetensors"
                earlier = previous / file if state is None else None
                if isinstance(state, Stored):
                    earlier = state.saved if state.saved and state.saved.exists() else None
                    saved[state] = newest / file
                if earlier is not None:
                    refuse_links(earlier.parent, earlier.name)
                    link(earlier, folder / file)
                    sums[file] = checksums(earlier.parent)[earlier.name]
                elif isinstance(state, StateFile):
                    state.move(folder / file)
                    sums[file] = state.checksum
                elif state is not None:
                    put(folder / file, state.encode())
            for file, data in (files or {}).items():
                put(folder / file, data)
            write_json(folder / CHECKSUMS, sums)
            shutil.rmtree(newest, ignore_errors=True)

        def put(path: Path, data: bytes) -> None:
            write_bytes(path, data)
            sums[path.name] = checksum(data)

        write_folder(newest, fill)
        for stored, path in saved.items():
            stored.saved = path
        self.drop(sorted(newest.parent.iterdir())[:-keep])

    def change(self, change: Callable[[str, State], State | None]) -> None:
        """Replace or delete (None) each state of the newest checkpoint; delete older ones."""
        *older, newest = self.checkpoints()
        sums, aside = self._checksums(newest), newest.with_name(f".{newest.name}.old")

        def fill(folder: Path) -> None:
            for file in [*sums]:
                data = self.read(file)
                if file.endswith(".safetensors"):
                    stem = file.removesuffix(".safetensors")
                    if (state := change(stem, State.decode(data))) is None:
                        del sums[file]
                        continue
                    data = state.encode()
                write_bytes(folder / file, data)
                sums[file] = checksum(data)
            write_json(folder / CHECKSUMS, sums)
            newest.rename(aside)  # if killed here, `lock` undoes this

        try:
            write_folder(newest, fill)
        except BaseException:
            if not newest.exists():
                aside.rename(newest)
            raise
        self.drop([*older, aside])

    def checkpoint(self, turns: int) -> Path:
        """Return the path of the checkpoint after the first `turns` turns."""
        return self.path / "checkpoints" / f"{turns:05d}"

    def checkpoints(self) -> list[Path]:
        """Return the folders of all checkpoints, oldest first."""
        refuse_links(self.path, "checkpoints")
        paths = (self.path / "checkpoints").glob("[0-9]*")
        return sorted(p for p in paths if re.fullmatch(r"[0-9]{5,10}", p.name) and p.is_dir())

    def go_back(self, rounds: int, turns_in: Callable[[int], int] = int) -> None:
        """Return to the state after `rounds` rounds; delete later checkpoints and the result.

        `turns_in` returns the number of turns in a number of rounds; by default, one per round.
        """
        checkpoints = self.checkpoints()
        if (newest := self.checkpoint(turns_in(rounds))) not in checkpoints:
            turns = [int(folder.name) for folder in checkpoints]
            ends = (n for n in range(max(turns, default=0) + 1) if turns_in(n) in turns)
            kept = ", ".join(map(str, ends)) or "none"
            raise CoterieError(f"{self.path} has no checkpoint of round {rounds} (kept: {kept}).")
        for name in ("result.json", RECEIVED):
            (self.path / name).unlink(missing_ok=True)
        self.drop(folder for folder in checkpoints if folder > newest)

    def listed(self, file: str) -> set[str]:
        """Return the names of the clients that a file (`WITHOUT` or `RECEIVED`) lists."""
        if not os.path.lexists(self.path / file):
            return set()
        return set(read.read_json(self.path, file, read.Listed)["clients"])

    def write_list(self, file: str, clients: Iterable[str]) -> None:
        """Write a file that `listed` reads."""
        write_json(self.path / file, {"clients": sorted(clients)})

    def expelled(self) -> set[str]:
        """Return the names of the clients that the operator has expelled from the run."""
        return self.listed(WITHOUT)

    def expel(self, client: str) -> None:
        """Mark a client as expelled; a running server checks continuously for expelled clients."""
        self.write_list(WITHOUT, {*self.expelled(), client})

    def drop(self, checkpoints: Iterable[Path]) -> None:
        """Delete checkpoints."""
        for folder in checkpoints:
            shutil.rmtree(folder, ignore_errors=True)

    def turns(self) -> int:
        """Return the number of complete turns in the newest checkpoint; 0 without checkpoints."""
        return max((int(folder.name) for folder in self.checkpoints()), default=0)

    def load(self, name: str) -> State:
        """Return a state of the newest checkpoint; raise CoterieError if no state has this name."""
        if (state := self.find(name)) is None:
            raise CoterieError(f"{self.path} has no state for {name!r}.")
        return state

    def find(self, name: str) -> State | None:
        """Return a state of the newest checkpoint, or None if no state has this name."""
        return State.decode(self.read(f"{name}.safetensors")) if self.has(name) else None

    def read(self, file: str) -> bytes:
        """Return a file of the newest checkpoint; raise CoterieError if its hash is wrong."""
        path = self.checkpoint(self.turns()) / file
        try:
            data = read_inside(self.path, path.relative_to(self.path))
            if checksum(data) == self._checksums(path.parent)[file]:
                return data
            reason = "it has changed since it was written"
        except (OSError, ValueError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
        earlier = len(self.checkpoints()) > 1
        remedy = "go back to an earlier round with --from-round" if earlier else "start a new run"
        raise CoterieError(f"{path} is damaged ({reason}); {remedy}.")

    def digest(self) -> str:
        """Return a hash of the newest checkpoint's checksums."""
        path = self.checkpoint(self.turns()) / CHECKSUMS
        return checksum(read_inside(self.path, path.relative_to(self.path)))

    def _checksums(self, checkpoint: Path) -> dict[str, str]:
        """Return a checkpoint's recorded hashes; raise ValueError if checksums.json is damaged."""
        name = (checkpoint / CHECKSUMS).relative_to(self.path)
        return read.hashes(parse_json(read_inside(self.path, name)))

    def states(self, prefix: str) -> list[str]:
        """Return the names of the newest checkpoint's states that begin with a prefix, sorted."""
        paths = self.checkpoint(self.turns()).glob(f"{prefix}*.safetensors")
        return sorted(path.name.removesuffix(".safetensors") for path in paths)

    def has(self, name: str) -> bool:
        """Return whether the newest checkpoint contains a state."""
        return (self.checkpoint(self.turns()) / f"{name}.safetensors").exists()

    def append(self, lines: list[dict[str, Json]]) -> None:
        """Append metrics to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with writing(path), append_to(path) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Return the lines of metrics.jsonl in order, without an incomplete last line."""
        return read.read_lines(self.path, "metrics.jsonl")

    def forget_from(self, turn: int) -> None:
        """Delete metrics recorded in a turn or later, because these turns will be repeated."""
        self.rewrite(line for line in self.metrics() if read.turn_of(line) < turn)

    def rewrite(self, lines: Iterable[dict[str, Json]]) -> None:
        """Replace all lines of metrics.jsonl."""
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
