"""Forward passes in which each row contains one sequence.

If no mask is given, Transformers searches for packed sequences in each forward pass: it compares
position ids and reads the result, which synchronises a GPU. Each row of a batch in Coterie contains
one sequence, so the search is unnecessary.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from transformers import masking_utils

from coterie.scoped import scoped

_unpacked: ContextVar[bool] = ContextVar("unpacked", default=False)


def one_sequence_per_row() -> AbstractContextManager[None]:
    """Let Transformers skip the search for packed sequences inside the `with` block."""
    _install()
    return scoped(_unpacked, True)


@cache
def _install() -> None:
    """Replace the search function of Transformers, if this version of Transformers has one.

    Outside `one_sequence_per_row`, the new function calls the original function.
    """
    if (search := getattr(masking_utils, "find_packed_sequence_indices", None)) is None:
        return

    @wraps(search)
    def search_unless_unpacked(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # cannot trace a ContextVar, and reads no values
            return search(*args, **named)
        return None if _unpacked.get() else search(*args, **named)

    masking_utils.find_packed_sequence_indices = search_unless_unpacked
