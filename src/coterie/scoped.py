"""Context variables that have a value inside a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside the `with` block, and restore its value afterwards."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
