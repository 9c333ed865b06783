"""Bases: loading, storage formats, and the modules to which adapters can be attached."""

from importlib import import_module
from typing import TYPE_CHECKING

from coterie.bases.spec import BaseSpec as BaseSpec

if TYPE_CHECKING:
    from coterie.bases.loading import EMBEDDED as EMBEDDED
    from coterie.bases.loading import Base as Base
    from coterie.bases.loading import Bases as Bases
    from coterie.bases.loading import Tokenizer as Tokenizer
    from coterie.bases.loading import check_base as check_base
    from coterie.bases.loading import context_token as context_token
    from coterie.bases.loading import is_local as is_local
    from coterie.bases.loading import is_shipped as is_shipped
    from coterie.bases.loading import load_base as load_base
    from coterie.bases.loading import load_skeleton as load_skeleton
    from coterie.bases.loading import load_tokenizer as load_tokenizer
    from coterie.bases.loading import place as place
    from coterie.bases.loading import weights_digest as weights_digest


def __getattr__(name: str) -> object:
    """Import a name from `coterie.bases.loading` when the name is first used.

    This import needs torch. Because it is delayed, run files can be checked without torch.
    """
    return getattr(import_module("coterie.bases.loading"), name)
