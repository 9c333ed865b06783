"""Read run files: validate them without torch, then bind the method to its class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config.errors import validated
from coterie.config.sections import RunFile
from coterie.config.tune import check_trials
from coterie.config.values import read_values
from coterie.data import files

if TYPE_CHECKING:
    from coterie.config.run import RunConfig


def bind(file: RunFile) -> "RunConfig":
    """Import torch, and bind the method of a run file to its class; see `resolve`."""
    from coterie.config.run import resolve

    return resolve(file)


def load_config(path: Path | None, settings: Sequence[str] = ()) -> "RunConfig":
    """Read a run.

    Args:
        path: the run file; None: the embedded demo.
        settings: changes to it, such as `training.batch=4`.

    Raises:
        CoterieError: naming the first mistake.
    """
    return bind(validated(RunFile, read_values(path, settings)))


def load_here(
    values: dict[str, Any], tune: Mapping[str, Sequence[Any]] | None = None
) -> "RunConfig":
    """Return a run whose clients have their texts on this machine.

    Args:
        values: the plain data of a run file.
        tune: values by dotted key, of which each is validated.

    Raises:
        CoterieError: naming the first mistake, or the first missing file or folder of a client.
    """
    file = check_trials(values, tune or {})
    for client in file.clients:
        for source in (client.path, client.train, client.validation, client.test):
            if source is not None:
                place = files.resolve(Path(file.data_root), source)
                files.find_files(place, f"Client {client.name}")
    return bind(file)
