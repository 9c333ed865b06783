"""Registry of aggregation transforms, which are built in, registered, or provided by plugins.

Built-in transforms are imported only when they are used, so listing names does not import torch.
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError
from coterie.registry import Registry, check_named

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


def register(kind: Any) -> Any:
    """Register a transform's class in this process under the class's `name`.

    Args:
        kind: A subclass of `Transform` with a `name` and a `summary`.

    Returns:
        The class itself, so that the function can be used as a decorator.

    Raises:
        CoterieError: If the class is invalid or the name is already registered.
    """
    from coterie.transforms.contract import Transform

    if not (isinstance(kind, type) and issubclass(kind, Transform)):
        raise CoterieError(
            f"{kind!r} is not a transform; it must be a subclass of coterie.Transform."
        )
    check_named(kind, TRANSFORMS.noun, "summary", ": a description in one line")
    TRANSFORMS.add(kind.name, kind)
    return kind


def _builtin(name: str) -> "type[Transform]":
    file, kind = OWN[name].split(":")
    return getattr(import_module(f"coterie.{file}"), kind)


TRANSFORMS: "Registry[type[Transform]]" = Registry(
    noun="transform",
    builtin={name: partial(_builtin, name) for name in OWN},
    group="coterie.transforms",
    accept=register,
    advice="To add a transform of your own, use --plugin FILE.py or coterie.register.",
)
