"""Bases: loading them, their storage formats, and where adapters can stand in them."""

from coterie.bases.loading import (
    EMBEDDED,
    UNUSABLE,
    Base,
    Bases,
    Tokenizer,
    context_token,
    is_folder,
    load_base,
    load_skeleton,
    load_tokenizer,
)

__all__ = [
    "EMBEDDED",
    "UNUSABLE",
    "Base",
    "Bases",
    "Tokenizer",
    "context_token",
    "is_folder",
    "load_base",
    "load_skeleton",
    "load_tokenizer",
]
