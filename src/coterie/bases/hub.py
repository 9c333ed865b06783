"""Checks of the bases in the Hugging Face hub's cache on this machine."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from coterie.bases.checks import CONFIG, check_files, check_tokenizer_files, check_weights
from coterie.bases.spec import BaseSpec
from coterie.errors import CoterieError


def snapshot(base: BaseSpec) -> Path | None:
    """Return the folder of a base in the hub's cache; None if the cache does not contain it."""
    try:
        return Path(snapshot_download(base.name, revision=base.revision, local_files_only=True))
    except (OSError, ValueError):  # it is not in the cache; its name is not a valid name on the hub
        return None


def check_snapshot(base: BaseSpec, *checks: Callable[[Path], None]) -> None:
    """Check the files of a base in the hub's cache. Pass if the cache does not contain the base.

    Args:
        base: A base on the hub.
        checks: Functions that raise CoterieError if the folder of a base is incomplete or damaged.

    Raises:
        CoterieError: A file is missing or damaged.
    """
    if (folder := snapshot(base)) is None:
        return
    try:
        for check in checks:
            check(folder)
    except CoterieError as fault:
        revision = f" --revision {base.revision}" if base.revision else ""
        raise CoterieError(
            f"The base {base.name!r} could not be loaded from the cache of the Hugging Face hub: "
            f"{fault} To replace damaged files, run `hf download {base.name}{revision} "
            "--force-download`."
        ) from None


def check_all(folder: Path) -> None:
    """Check that a base's folder has a configuration, a tokenizer and all weight files.

    Raises:
        CoterieError: A file is missing or damaged.
    """
    if not (folder / CONFIG).is_file():
        raise CoterieError(f"{folder} has no {CONFIG}; download it.")
    for check in (check_files, check_tokenizer_files, check_weights):
        check(folder)
