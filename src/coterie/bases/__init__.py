"""Bases: loading them, their storage formats, and where adapters can stand in them."""

from importlib import import_module
from typing import TYPE_CHECKING

from coterie.bases.spec import BaseSpec

if TYPE_CHECKING:
    from coterie.bases.loading import (
        EMBEDDED,
        Base,
        Bases,
        Tokenizer,
        check_base,
        context_token,
        is_folder,
        load_base,
        load_skeleton,
        load_tokenizer,
        place,
    )

__all__ = [
    "EMBEDDED",
    "Base",
    "BaseSpec",
    "Bases",
    "Tokenizer",
    "check_base",
    "context_token",
    "is_folder",
    "load_base",
    "load_skeleton",
    "load_tokenizer",
    "place",
]


def __getattr__(name: str) -> object:
    """Import torch when it is asked for: run files are checked without it."""
    if name not in __all__:
        raise AttributeError(f"module 'coterie.bases' has no attribute {name!r}")
    return getattr(import_module("coterie.bases.loading"), name)
