"""Deployment and simulation on Flower, which carries bytes and knows nothing of methods."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from coterie.errors import CoterieError

# Read when flwr is imported: a site's machine reports nothing to anybody.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

FLOWER = "1.41.0"
"""The version of Flower that private.py is written for; the extras in pyproject.toml pin it."""


@contextmanager
def imports_for(what: str, extra: str) -> Iterator[None]:
    """Within the block, an import that fails is a CoterieError that says what to install.

    what: what needs the import, to begin a sentence with. extra: the extra of Coterie's that
    installs it.
    """
    install = f"install the extra: pip install 'coterie[{extra}]'."
    try:
        yield
    except ImportError as error:
        name = error.name or ""
        if name.startswith("flwr."):  # Flower is there, and this is not in it or lacks a name
            raise CoterieError(
                f"{what} needs Flower {FLOWER}, but Flower {version('flwr')} is installed and "
                f"its {name} is missing or different; {install}"
            ) from error
        if not isinstance(error, ModuleNotFoundError) or name.split(".")[0] in ("", "coterie"):
            raise
        raise CoterieError(f"{what} needs {name}; {install}") from None
