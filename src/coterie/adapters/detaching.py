"""Bases without their adapters for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from coterie.adapters.adapter import attached, detach


@contextmanager
def detached(base: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield a base without its adapter; attach the adapter again at the end of the `with` block."""
    adapter = attached(base)
    detach(base)
    try:
        yield base
    finally:
        if adapter is not None:
            adapter.attach(base)
