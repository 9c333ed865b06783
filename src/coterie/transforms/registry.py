"""Registry of aggregation transforms, which are built in, registered, or provided by plugins.

Built-in transforms are imported only when they are used, so listing names does not import torch.
"""

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from coterie.registry import Registry

if TYPE_CHECKING:
    from coterie.transforms.contract import Transform

OWN = {"median": "Median", "trimmed_mean": "TrimmedMean"}
"""The class of each built-in transform in `transforms.reductions`, by the transform's name."""
FILE = "coterie.transforms.reductions"

TRANSFORMS: "Registry[type[Transform]]" = Registry(
    noun="transform",
    builtin={name: partial(resolve_name, f"{FILE}:{kind}") for name, kind in OWN.items()},
    group="coterie.transforms",
    base="coterie.transforms.contract:Transform",
    advice=" Bounds, weights and optimisers are other keys of the section `aggregation`.",
    requires={"summary": ": a description in one line"},
)
