"""Versions of the file and wire formats, by which data from other versions are recognised.

`FORMAT` is the version of messages, states and run folders. A change to any of them increments
`FORMAT`, and CHANGELOG.md explains what to do with older data. `PROTOCOL` is the version of the
network protocol, which must be equal on the server and the clients of a deployment.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from coterie.errors import CoterieError

FORMAT = 2
PROTOCOL = 5
VERSION = version("coterie")
"""The installed version of Coterie."""


class FormatError(CoterieError):
    """A file or message has a format that this version of Coterie does not read."""


def version_fields() -> dict[str, Any]:
    """Return the header fields `format` (a number) and `coterie` (the version of Coterie)."""
    return {"format": FORMAT, "coterie": VERSION}


def check_format(source: str, header: Mapping[str, Any], remedy: str) -> None:
    """Check that a header declares the format that this version reads.

    Args:
        source: Name of the file or message, with which the error message begins.
        header: The header that was read.
        remedy: Last sentence of the error message, which says what to do.

    Raises:
        FormatError: The header declares another format, or no format.
    """
    number = header.get("format", 1)  # the first version's formats had no number
    if number != FORMAT:
        wrote = str(header.get("coterie", "another version"))[:20]
        raise FormatError(
            f"{source} has format {number!s:.20} (written by Coterie {wrote}), but Coterie "
            f"{VERSION} reads format {FORMAT}. {remedy}"
        )
