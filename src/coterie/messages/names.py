"""Names of clients, which name files and certificates, too."""

import re
from typing import Annotated

from pydantic import AfterValidator


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"the name {name!r} must be 1 to 64 letters (a to z, A to Z), digits, dots, "
            "dashes and underscores, and must not start with a dot or dash"
        )
    return name


ClientName = Annotated[str, AfterValidator(_plain)]
