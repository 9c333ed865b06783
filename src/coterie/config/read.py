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
    """Call `resolve`, which binds a run file's method and transforms to their classes.

    Calling this function imports torch.
    """
    from coterie.config.run import resolve

    return resolve(file)


def load_config(path: Path | None, settings: Sequence[str] = ()) -> "RunConfig":
    """Read a run file.

    Args:
        path: The run file, or None for the embedded demo.
        settings: Changes to the file, such as `training.batch=4`.

    Returns:
        The validated configuration.

    Raises:
        CoterieError: The run file is invalid; the message names the first mistake.
    """
    return bind(validated(RunFile, read_values(path, settings)))


def load_here(
    values: dict[str, Any], tune: Mapping[str, Sequence[Any]] | None = None
) -> "RunConfig":
    """Return a run whose clients' texts are on this machine.

    Args:
        values: The plain data of a run file.
        tune: The values that tuning tries for each dotted key. The run file is validated with each
            of these values. None: no tuning.

    Raises:
        CoterieError: The run file is invalid, or a file or folder of a client is missing.
    """
    file = check_trials(values, tune or {})
    for client in file.clients:
        for source in (client.path, client.train, client.validation, client.test):
            if source is not None:
                path = files.resolve(Path(file.data_root), source)
                files.find_files(path, f"Client {client.name}")
    return bind(file)
