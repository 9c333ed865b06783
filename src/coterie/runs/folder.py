"""The run folder: what a run was, what it measured, and where it can go on.

run.json             the run's description, the threads and versions it ran with, its data's hashes
metrics.jsonl        a line per figure: round, client, name, value; and `during`, the round in
                     which it came up, where that is a later one
checkpoints/00012/   state of the server and of every client after 12 rounds (client-NAME), what is
                     needed for each client's best model so far (kept-NAME), and the checksums of
                     these files; the newest checkpoints are kept
scores/POINT/NAME.json  what each window of a test text scored the last time, trained or aggregated
result.json          the scores, once the run is finished
without.json         the clients that were expelled from a deployed run
baselines/NAME/      the run folder of a baseline
"""

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from hashlib import blake2b
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
from coterie.messages.formats import check_format, version_fields
from coterie.messages.schema import plain
from coterie.runs import read

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"
"""In a checkpoint: the hash of each of its files, by name."""
WITHOUT = "without.json"
"""Which clients were expelled from a deployed run."""
LEFT = (".lock", ".run.json.*tmp")
"""What a start that was killed leaves behind."""


def describe(
    config: Mapping[str, Json],
    clients: Mapping[str, Json],
    plugins: Mapping[str, Json],
    **more: Json,
) -> dict[str, Json]:
    """What a run folder must say so that the run can be repeated: with what it ran, and what."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **more,
        "plugins": plugins,
        "clients": clients,
        "config": config,
    }


def _checksum(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


class RunFolder:
    """One run's files. Every write is atomic, so a kill loses at most the round in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def temporary(cls) -> "RunFolder":
        """Make an empty folder that is removed with the returned object."""
        folder = cls(Path(mkdtemp(prefix="coterie-")))
        finalize(folder, shutil.rmtree, folder.path, ignore_errors=True)
        return folder

    @classmethod
    def create(
        cls, path: Path, description: Mapping[str, Json], force: bool = False
    ) -> "RunFolder":
        """A new run's folder; raises CoterieError as `refuse` does."""
        folder = cls(path)
        folder.refuse(force)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)  # its models are personal
        with folder.lock():
            folder.refuse(force)  # another process may have begun meanwhile
            folder._clear()
            write_json(path / "run.json", {**version_fields(), **description})
        return folder

    def refuse(self, force: bool) -> None:
        """Raise CoterieError if a new run cannot begin here, for what is here already."""
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
        """Whether a run began here."""
        try:
            return "config" in read.read_json(self.path, "run.json")
        except CoterieError:
            return False

    def _is_empty(self) -> bool:
        """Whether it is a folder that holds nothing but what a killed start may have left."""
        with writing(self.path):
            left = (any(fnmatchcase(p.name, name) for name in LEFT) for p in self.path.iterdir())
            return self.path.is_dir() and all(left)

    def _clear(self) -> None:
        """Remove a run's files and no others; run.json goes last, when it is written anew."""
        for name in ("result.json", "metrics.jsonl", "table.md", WITHOUT):
            (self.path / name).unlink(missing_ok=True)
        for name in ("checkpoints", "baselines", "scores"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    @property
    def description(self) -> dict[str, Any]:
        """What `create` was given; raises CoterieError if there is no run of this format."""
        description = read.read_json(self.path, "run.json")
        if "config" not in description:
            raise CoterieError(f"{self.path} is not a run folder (its run.json is no run's).")
        remedy = "Use the version that wrote it, or start a new run in another folder."
        check_format(f"The run in {self.path}", description, remedy)
        read.check(self.path / "run.json", description, read.Description)
        return description

    @property
    def result(self) -> dict[str, Any] | None:
        """The scores of a finished run."""
        if not os.path.lexists(self.path / "result.json"):
            return None
        return read.read_json(self.path, "result.json", read.Result)

    @property
    def outcome(self) -> dict[str, Any] | None:
        """The result with the run's `seed`, and with `items`: what was kept of each test window.

        items: by point, then by the name of the text; see `keep_items`.
        """
        if (found := self.result) is None:
            return None
        items: dict[str, dict[str, Any]] = {}
        for path in sorted(self.path.glob("scores/*/*.json")):
            kept = read.read_json(self.path, str(path.relative_to(self.path)), read.Items)
            items.setdefault(path.parent.name, {})[path.stem] = kept
        return {**found, "seed": self.description["config"]["seed"], "items": items}

    def keep_items(self, point: str, text: str, items: Mapping[str, Json]) -> None:
        """Keep what each window of a test text scored at a point (trained or aggregated)."""
        path = self.path / "scores" / point / f"{text}.json"
        refuse_links(self.path, path.parent.relative_to(self.path))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, items)

    def finish(self, result: Mapping[str, Json]) -> None:
        """Mark the run as finished."""
        write_json(self.path / "result.json", result)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out while this one works here."""
        with open_lock(self.path / ".lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CoterieError(
                    f"Another process is using {self.path}; wait for it, or stop it."
                ) from None
            yield

    def save(
        self,
        rounds: int,
        states: Iterable[tuple[str, State | None]],
        *,
        files: Mapping[str, bytes] | None = None,
        keep: int = 2,
    ) -> None:
        """Write the checkpoint after so many rounds, one state at a time, and files beside them.

        None stands for a state that is as in the newest checkpoint. Then drop all but the newest
        `keep`.
        """
        refuse_links(self.path, "checkpoints")
        newest, before = self.checkpoint(rounds), self.checkpoint(self.rounds())
        sums: dict[str, str] = {}

        def fill(folder: Path) -> None:
            for name, state in states:
                file = f"{name}.safetensors"
                if state is None:
                    refuse_links(before, file)
                    link(before / file, folder / file)
                    sums[file] = self._checksums(before)[file]
                else:
                    put(folder / file, state.encode())
            for file, data in (files or {}).items():
                put(folder / file, data)
            write_json(folder / CHECKSUMS, sums)
            shutil.rmtree(newest, ignore_errors=True)

        def put(path: Path, data: bytes) -> None:
            write_bytes(path, data)
            sums[path.name] = _checksum(data)

        write_folder(newest, fill)
        self.drop(sorted(newest.parent.iterdir())[:-keep])

    def change(self, change: Callable[[str, State], State]) -> None:
        """Write the newest checkpoint anew, each state as `change` makes it; drop all others."""
        *older, newest = self.checkpoints()
        sums, aside = self._checksums(newest), newest.with_name(f".{newest.name}.old")

        def fill(folder: Path) -> None:
            for file in sums:
                data = self.read(file)
                if file.endswith(".safetensors"):
                    data = change(Path(file).stem, State.decode(data)).encode()
                write_bytes(folder / file, data)
                sums[file] = _checksum(data)
            write_json(folder / CHECKSUMS, sums)
            newest.rename(aside)  # at a kill here, the one before it is the newest

        try:
            write_folder(newest, fill)
        except BaseException:
            if not newest.exists():
                aside.rename(newest)
            raise
        self.drop([*older, aside])

    def checkpoint(self, rounds: int) -> Path:
        """Where the checkpoint after so many rounds is."""
        return self.path / "checkpoints" / f"{rounds:05d}"

    def checkpoints(self) -> list[Path]:
        """The folders of all checkpoints there are, oldest first."""
        refuse_links(self.path, "checkpoints")
        found = (self.path / "checkpoints").glob("[0-9]*")
        return sorted(p for p in found if re.fullmatch(r"[0-9]{5,10}", p.name) and p.is_dir())

    def go_back(self, rounds: int) -> None:
        """Make the checkpoint after so many rounds the newest; raises CoterieError without one."""
        found = self.checkpoints()
        if (newest := self.checkpoint(rounds)) not in found:
            kept = ", ".join(str(int(folder.name)) for folder in found) or "none"
            raise CoterieError(f"{self.path} has no checkpoint of round {rounds} (kept: {kept}).")
        (self.path / "result.json").unlink(missing_ok=True)
        self.drop(folder for folder in found if folder > newest)

    def without(self) -> set[str]:
        """Clients that an operator has expelled from the run."""
        if not os.path.lexists(self.path / WITHOUT):
            return set()
        return set(read.read_json(self.path, WITHOUT, read.Without)["clients"])

    def expel(self, client: str) -> None:
        """A client takes no part any more; its server, if it works, looks every moment."""
        write_json(self.path / WITHOUT, {"clients": sorted({*self.without(), client})})

    def drop(self, checkpoints: Iterable[Path]) -> None:
        """Remove checkpoints."""
        for folder in checkpoints:
            shutil.rmtree(folder, ignore_errors=True)

    def rounds(self) -> int:
        """Rounds that the newest checkpoint holds; 0 without one."""
        found = self.checkpoints()
        return int(found[-1].name) if found else 0

    def load(self, name: str) -> State:
        """One side's state from the newest checkpoint; raises CoterieError if it has none."""
        if (state := self.find(name)) is None:
            raise CoterieError(f"{self.path} has no state for {name!r}.")
        return state

    def find(self, name: str) -> State | None:
        """The same; None if the checkpoint has none."""
        return State.decode(self.read(f"{name}.safetensors")) if self.has(name) else None

    def read(self, file: str) -> bytes:
        """A file of the newest checkpoint; raises CoterieError if it is not as it was written."""
        path = self.checkpoint(self.rounds()) / file
        try:
            data = read_inside(self.path, path.relative_to(self.path))
            if _checksum(data) == self._checksums(path.parent)[file]:
                return data
            why = "it has changed since it was written"
        except (OSError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
        earlier = [int(folder.name) for folder in self.checkpoints()[:-1]]
        remedy = f"go back with --from-round {earlier[-1]}" if earlier else "start a new run"
        raise CoterieError(f"{path} is damaged ({why}); {remedy}.")

    def digest(self) -> str:
        """A hash of the newest checkpoint's checksums."""
        path = self.checkpoint(self.rounds()) / CHECKSUMS
        return _checksum(read_inside(self.path, path.relative_to(self.path)))

    def _checksums(self, checkpoint: Path) -> dict[str, str]:
        """The hashes of a checkpoint's files; raises ValueError if they are damaged."""
        name = (checkpoint / CHECKSUMS).relative_to(self.path)
        return read.hashes(parse_json(read_inside(self.path, name)))

    def has(self, name: str) -> bool:
        """Whether the newest checkpoint has a state."""
        return (self.checkpoint(self.rounds()) / f"{name}.safetensors").exists()

    def append(self, lines: list[dict[str, Json]]) -> None:
        """Add figures to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with writing(path), append_to(path) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The figures, in order; a line that a kill cut off is left out."""
        return read.read_lines(self.path, "metrics.jsonl")

    def forget_from(self, round: int) -> None:
        """Drop figures that came up in rounds that will be run again."""
        self.rewrite(m for m in self.metrics() if m.get("during", m["round"]) < round)

    def rewrite(self, lines: Iterable[dict[str, Json]]) -> None:
        """Replace all figures."""
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


class Recorder:
    """Figures of the round in progress, kept until the round is complete."""

    def __init__(self, seen: Callable[[int, str | None, str, Json], None]) -> None:
        self._seen = seen
        self._lines: list[dict[str, Json]] = []
        self.round = 0

    def log(self, client: str | None, name: str, value: Json, round: int | None = None) -> None:
        """Note a figure of a client, or of the run (None); of the round in progress, or `round`.

        A figure with NaN or infinity, which is no JSON, is not recorded.
        """
        if not plain(value):
            log.warning("the figure %r of %s is not finite and is not recorded", name, client)
            return
        of = self.round if round is None else round
        line = {"round": of, "client": client, "name": name, "value": value}
        self._lines.append(line if of == self.round else {**line, "during": self.round})
        self._seen(of, client, name, value)

    @property
    def count(self) -> int:
        """How many figures of the round in progress are noted."""
        return len(self._lines)

    def undo(self, start: int, end: int | None = None, *, keep: str = "nothing") -> None:
        """Forget figures of the round in progress.

        Args:
            start: `count` before the first of them.
            end: `count` after the last of them; None: all that follow.
            keep: how names of figures begin that stay.
        """
        span = self._lines[start:end]
        self._lines[start:end] = [line for line in span if line["name"].startswith(keep)]

    def take(self) -> list[dict[str, Json]]:
        """Hand out what was noted since the last time."""
        lines, self._lines = self._lines, []
        return lines
