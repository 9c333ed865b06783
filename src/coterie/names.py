"""Names of clients and runs, which are also names of files on Linux, macOS and Windows."""

import re
from collections.abc import Iterable
from typing import Annotated
from unicodedata import normalize

from pydantic import AfterValidator

DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
"""Names of devices, which a file on Windows cannot have, with or without a suffix."""


def no_device(name: str) -> str:
    """Return a name unchanged; raise ValueError if it is the name of a device on Windows."""
    if DEVICE.fullmatch(name):
        raise ValueError(f"{name!r} is the name of a device on Windows; choose another name")
    return name


def check_distinct(names: Iterable[str], where: str) -> None:
    """Check that a section of the run file does not name two clients alike.

    Names that differ only in case would denote the same files on macOS and Windows.

    Raises:
        ValueError: Two names are equal or differ only in case.
    """
    seen: dict[str, str] = {}
    for name in names:
        twin = seen.get(name.lower())
        if twin == name:
            raise ValueError(f"the client name {name!r} is used twice in `{where}`")
        if twin is not None:
            raise ValueError(
                f"the client names {twin!r} and {name!r} in `{where}` differ only in case; rename "
                "one of them"
            )
        seen[name.lower()] = name


def client_name(name: str) -> str:
    """Return a name unchanged; raise ValueError if it is not a valid name of a client."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"the name {name!r} must consist of 1 to 64 characters: letters (a to z, A to Z), "
            "digits, dots, dashes and underscores; it must not start with a dot or dash"
        )
    return no_device(name)


def name_of_label(label: str, number: int) -> str:
    """Return the name of a client that is derived from the client's label in a data set.

    Args:
        label: The label.
        number: The label's number, counted from 1. It replaces a label without usable characters.
    """
    signed = re.sub(r"^-(?=\d)", "minus-", label)
    ascii_label = normalize("NFKD", signed).encode("ascii", "ignore").decode().lower()
    name = re.sub(r"[^a-z0-9._]+", "-", ascii_label)[:64].strip(".-")
    return f"label-{name or number}" if DEVICE.fullmatch(name) or not name else name


ClientName = Annotated[str, AfterValidator(client_name)]
"""A client's name, also used in the names of the client's files and in its certificate."""
RunName = Annotated[str, AfterValidator(no_device)]
"""A run's name, also used as the name of its folder."""
