"""Trackers, which write the metrics of a run to TensorBoard or Weights & Biases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import environ
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

from coterie.errors import imports_for
from coterie.files import parse_json, read_inside, refuse_links, write_json, writing
from coterie.messages import Json
from coterie.runs.progress import Callback, RunStart

Warn = Callable[[str], None]


class Tracker(Callback):
    """A callback that writes the numbers among a run's metrics, and nothing else.

    Numbers are written only for complete rounds, so a resumed run continues its series without
    duplicates. Numbers that are recorded several times in a round, such as the loss of each
    training step, are averaged. If writing fails, the tracker warns once, and the run continues
    without it.

    Args:
        folder: The folder for the tracker's files, inside the run folder.
        warn: Function that is called with the warning.
    """

    name: str

    def __init__(self, folder: Path, warn: Warn) -> None:
        self.folder, self.warn = folder, warn
        self._failed = False
        self._numbers: dict[int, dict[str, list[float]]] = {}

    def open(self, run: RunStart) -> None:
        """Create the writer, or continue the series of an earlier process."""
        raise NotImplementedError

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round."""
        raise NotImplementedError

    def close(self) -> None:
        """Write everything to the disk."""
        raise NotImplementedError

    def on_run_begin(self, run: RunStart) -> None:
        self._numbers = {}
        self._try(self._open, run)

    def on_metric(self, round: int, client: str | None, name: str, value: Json) -> None:
        for part, number in _numbers(value):
            tag = "/".join(filter(None, (name, part, client)))
            self._numbers.setdefault(round, {}).setdefault(tag, []).append(number)

    def on_round_end(self, round: int, scores: str) -> None:
        numbers, self._numbers = self._numbers, {}
        for of, values in sorted(numbers.items()):
            self._try(self.write, of, {tag: fmean(each) for tag, each in values.items()})

    def on_run_end(self, error: BaseException | None) -> None:
        self._try(self.close)

    def _open(self, run: RunStart) -> None:
        refuse_links(self.folder.parent, self.folder.name)
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        self.open(run)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function unless an earlier call failed; if it fails, warn."""
        if self._failed:
            return
        try:
            call(*arguments)
        except Exception as error:  # a run must not stop because a network or a disk fails
            self._failed = True
            self.warn(
                f"Warning: the tracker {self.name} failed ({type(error).__name__}: {error}); the "
                "run continues without it."
            )


def _numbers(value: Json) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a metric's value, each with its key or its index."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        parts = [("", value)]
    for name, part in parts:
        if isinstance(part, int | float) and not isinstance(part, bool):
            yield name, float(part)


class TensorBoard(Tracker):
    """A tracker that writes event files, which TensorBoard reads without a network."""

    name = "tensorboard"

    def __init__(self, folder: Path, warn: Warn) -> None:
        super().__init__(folder, warn)
        with imports_for("The tracker tensorboard", "tensorboard"):
            from tensorboardX import SummaryWriter
        self._create = SummaryWriter

    def open(self, run: RunStart) -> None:
        # The suffix keeps apart the files of two processes that start in the same second.
        done = run.done
        self._writer = self._create(
            str(self.folder), purge_step=done + 1, filename_suffix=f".{done}"
        )

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        for tag, number in numbers.items():
            self._writer.add_scalar(tag, number, round + 1)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A tracker that sends numbers to Weights & Biases, but nothing about the code or the machine.

    The environment variables of `wandb` choose the account and the project, which is `coterie` by
    default. With `WANDB_MODE=offline`, the numbers are only written to the run folder.
    """

    name = "wandb"

    def __init__(self, folder: Path, warn: Warn) -> None:
        super().__init__(folder, warn)
        with imports_for("The tracker wandb", "wandb"):
            import wandb  # pyright: ignore[reportMissingImports] - not a development dependency
        self._wandb = wandb

    def open(self, run: RunStart) -> None:
        settings = self._wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        path = self.folder.resolve().parent
        top = path.parents[1] if path.parent.name == "baselines" else path
        self._run = self._wandb.init(
            project=environ.get("WANDB_PROJECT", "coterie"),
            dir=path,
            name=path.name,
            group=top.name,
            id=self._id(),
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="round")

    def _id(self) -> str:
        """Return the run's identifier, which the folder keeps for a run that is resumed."""
        file = self.folder / "id.json"
        if not file.exists():
            write_json(file, uuid4().hex[:16])
        return str(parse_json(read_inside(self.folder, file.name)))

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        # Not `step`, because scores of a round can be recorded in the next round.
        self._run.log({"round": round + 1, **numbers})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases)}


def trackers(names: Sequence[str], path: Path, callbacks: Sequence[Callback]) -> list[Callback]:
    """Create the trackers of a run.

    Args:
        names: The names of the trackers.
        path: The run folder.
        callbacks: The other callbacks of the run, which receive the warning if a tracker fails.

    Raises:
        CoterieError: The package of a tracker is not installed.
    """

    def warn(text: str) -> None:
        for callback in callbacks:
            callback.on_warning(text)

    return [TRACKERS[name](path / name, warn) for name in names]
