"""The run folder: what a run was, what it measured, and where it can go on.

run.json             the run's description, the threads and versions it ran with, its data's hashes
metrics.jsonl        a line per figure: round, client, name, value
checkpoints/00012/   state of the server and of every client after 12 rounds; the last is kept
result.json          the scores, once the run is finished
baselines/NAME/      the run folder of a baseline
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.exchange import Json, State
from coterie.files import write_bytes, write_folder, write_json, write_text


class RunFolder:
    """One run's files. Every write is atomic, so a kill loses at most the round in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, path: Path, description: Mapping[str, Json], force: bool = False
    ) -> "RunFolder":
        """A new run's folder; raises CoterieError if there is one already, unless forced."""
        if (path / "run.json").exists():
            if not force:
                raise CoterieError(
                    f"{path} already holds a run. Continue it with `coterie run --resume {path}`, "
                    "choose another folder with --out, or overwrite it with --force."
                )
            shutil.rmtree(path)
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CoterieError(f"{path} exists and is not a run folder; choose another with --out.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CoterieError(f"Could not make the folder {path}: {error.strerror}.") from error
        write_json(path / "run.json", description)
        return cls(path)

    @property
    def description(self) -> dict[str, Any]:
        """What `create` was given; raises CoterieError if the folder holds no run."""
        return self._read("run.json")

    @property
    def result(self) -> dict[str, Any] | None:
        """The scores of a finished run."""
        return self._read("result.json") if (self.path / "result.json").exists() else None

    def finish(self, result: Mapping[str, Json]) -> None:
        """Mark the run as finished."""
        write_json(self.path / "result.json", result)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out while this one works here."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CoterieError(f"Another process is working in {self.path}.") from None
            yield

    def save(self, rounds: int, states: Iterable[tuple[str, State]]) -> None:
        """Write the checkpoint after so many rounds, one state at a time; then drop older ones."""

        def fill(folder: Path) -> None:
            for name, state in states:
                write_bytes(folder / f"{name}.safetensors", state.encode())

        newest = self.path / "checkpoints" / f"{rounds:05d}"
        shutil.rmtree(newest, ignore_errors=True)
        write_folder(newest, fill)
        for folder in newest.parent.iterdir():
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def rounds(self) -> int:
        """Rounds that the newest checkpoint holds; 0 without one."""
        done = [p.name for p in (self.path / "checkpoints").glob("[0-9]*") if p.is_dir()]
        return int(max(done, default=0))

    def load(self, name: str) -> State:
        """One side's state from the newest checkpoint."""
        path = self.path / "checkpoints" / f"{self.rounds():05d}" / f"{name}.safetensors"
        try:
            return State.decode(path.read_bytes())
        except FileNotFoundError:
            raise CoterieError(f"{self.path} holds no state of {name!r}.") from None

    def append(self, lines: list[dict[str, Json]]) -> None:
        """Add figures to metrics.jsonl."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CoterieError(f"Could not write to {self.path}: {error.strerror}.") from error

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The figures, in order; a line that a kill cut off is left out."""
        path = self.path / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    def forget_from(self, round: int) -> None:
        """Drop figures of rounds that will be run again."""
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["round"] < round]
        write_text(self.path / "metrics.jsonl", "".join(kept))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise CoterieError(f"{self.path} is not the folder of a run ({name}).") from None


class Recorder:
    """Figures of the round in progress, kept until the round is complete."""

    def __init__(self, folder: RunFolder, seen: Callable[[str | None, str, Json], None]) -> None:
        self._folder = folder
        self._seen = seen
        self._lines: list[dict[str, Json]] = []
        self.round = 0

    def log(self, client: str | None, name: str, value: Json) -> None:
        """Note a figure of a client, or of the run (None)."""
        self._lines.append({"round": self.round, "client": client, "name": name, "value": value})
        self._seen(client, name, value)

    def flush(self) -> None:
        """Write the round's figures."""
        self._folder.append(self._lines)
        self._lines = []
