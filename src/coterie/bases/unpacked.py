"""Forward passes in which no row packs several sequences.

Unless a mask is given, Transformers looks for packed sequences: in each forward pass, it compares
the position ids and reads the result, for which a GPU has to finish its work. Rows of Coterie
contain one sequence each, so Transformers need not look.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

from transformers import masking_utils

_unpacked: ContextVar[bool] = ContextVar("unpacked", default=False)


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Let Transformers skip the search for packed sequences inside the `with` block."""
    _install()
    before = _unpacked.set(True)
    try:
        yield
    finally:
        _unpacked.reset(before)


@cache
def _install() -> None:
    """Replace the function of Transformers that searches, if this version has one.

    Outside `one_sequence_per_row`, the new function calls the old one.
    """
    if (search := getattr(masking_utils, "find_packed_sequence_indices", None)) is None:
        return

    @wraps(search)
    def search_unless_unpacked(*args: Any, **named: Any) -> Any:
        return None if _unpacked.get() else search(*args, **named)

    masking_utils.find_packed_sequence_indices = search_unless_unpacked
