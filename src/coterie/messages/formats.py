"""The numbers that formats carry, so that another version's bytes are refused in a sentence.

FORMAT is that of messages, states and run folders; a change of any of them raises it, and
CHANGELOG.md says how to go on. PROTOCOL is what servers and clients of a deployment agree on.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from coterie.errors import CoterieError

FORMAT = 2
PROTOCOL = 4
VERSION = version("coterie")
"""Of this package."""


class FormatError(CoterieError):
    """What is read was written in another format."""


def version_fields() -> dict[str, Any]:
    """What is written beside the content: the format, and by which version."""
    return {"format": FORMAT, "coterie": VERSION}


def check_format(what: str, header: Mapping[str, Any], remedy: str) -> None:
    """Raise FormatError unless the header is stamped with this version's format.

    what: the subject of the sentence; remedy: how to go on.
    """
    found = header.get("format", 1)  # the first version's formats had no number
    if found != FORMAT:
        wrote = str(header.get("coterie", "another version"))[:20]
        raise FormatError(
            f"{what} has format {found!s:.20} (written by Coterie {wrote}), but Coterie "
            f"{VERSION} reads format {FORMAT}. {remedy}"
        )
