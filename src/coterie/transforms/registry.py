"""Registry of aggregation transforms, which are built in, registered, or provided by plugins.

Built-in transforms are imported only when they are used, so listing names does not import torch.
"""

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from coterie.registry import Registry

if TYPE_CHECKING:
    from coterie.transforms.contract import Transform

OWN = {
    "bounds": "exchanges.bounds:Bounds",
    "median": "transforms.reductions:Median",
    "server_optimiser": "exchanges.optimiser:ServerOptimiser",
    "tokens": "exchanges.weights:TokenWeights",
    "trimmed_mean": "transforms.reductions:TrimmedMean",
}
"""The module and class of each built-in transform, by the transform's name."""


TRANSFORMS: "Registry[type[Transform]]" = Registry(
    noun="transform",
    builtin={name: partial(resolve_name, f"coterie.{kind}") for name, kind in OWN.items()},
    group="coterie.transforms",
    base="coterie.transforms.contract:Transform",
    requires={"summary": ": a description in one line"},
)
