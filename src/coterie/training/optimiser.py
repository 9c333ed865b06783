"""Optimisers of local training: classes of `torch.optim`, whose arguments are checked."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from rapidfuzz.process import extractOne
from torch import Tensor

from coterie.errors import CoterieError
from coterie.training.spec import ADAMW, OptimiserSpec

REFUSED = {"lbfgs": "needs several gradients per batch", "sparseadam": "needs sparse gradients"}
"""Unsupported optimisers, each with the reason; updates compute one dense gradient per batch."""


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return a mapping from lower-case names to all optimisers of torch.

    The mapping includes optimisers that Coterie does not support.
    """
    kinds = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    optimisers = (kind for kind in kinds if issubclass(kind, torch.optim.Optimizer))
    return {k.__name__.lower(): k for k in optimisers if k is not torch.optim.Optimizer}


def check(spec: OptimiserSpec) -> None:
    """Check the arguments of an optimiser before the data are read.

    Raises:
        CoterieError: The optimiser does not exist, is not supported, or rejects an argument.
    """
    if spec.name == "adamw" and spec.settings == ADAMW:
        return
    parameters = signature(_class(spec.name)).parameters
    defaults = {k: p.default for k, p in parameters.items() if k not in ("params", "lr")}
    for key, value in spec.settings.items():
        if key == "lr":
            raise CoterieError(
                "training.optimiser.lr is not supported; set training.learning_rate instead."
            )
        if key not in defaults:
            hint = _hint(key, ["name", *defaults], "training.optimiser.", "Known keys")
            raise CoterieError(f"Unknown key 'training.optimiser.{key}'. {hint}")
        if expected := _expected(defaults[key], value):
            shown = list(value) if isinstance(value, tuple) else value
            raise CoterieError(f"training.optimiser.{key} should be {expected}, not {shown!r:.60}.")
    weight = torch.zeros(2, 2, requires_grad=True)
    weight.grad = torch.ones(2, 2)
    optimiser = build(spec, [weight], 1e-3)
    with _torch_errors(spec):
        optimiser.step()


def build(
    spec: OptimiserSpec, parameters: Iterable[Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    """Build an optimiser for the given parameters.

    Args:
        spec: The name and the arguments of the optimiser.
        parameters: The parameters to optimise.
        learning_rate: The initial learning rate. To change it, set `lr` in the optimiser's
            parameter groups.

    Raises:
        CoterieError: The optimiser rejects its arguments or the shapes of the parameters.
    """
    kind: Any = _class(spec.name)
    with _torch_errors(spec):
        return kind(list(parameters), lr=learning_rate, **spec.settings)


@contextmanager
def _torch_errors(spec: OptimiserSpec) -> Iterator[None]:
    """Turn torch's errors inside the `with` block into a CoterieError that names the optimiser."""
    try:
        yield
    except (
        *(ArithmeticError, AssertionError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        message = " ".join(str(error).split()).rstrip(".")
        raise CoterieError(
            f"training.optimiser: {spec.name} rejected its settings: {message}."
        ) from error


def _class(name: str) -> type[torch.optim.Optimizer]:
    available = classes()
    if name in REFUSED:
        raise CoterieError(
            f"training.optimiser cannot be {name}, which {REFUSED[name]}; choose an optimiser "
            "that uses one dense gradient per update."
        )
    if name not in available:
        hint = _hint(name, sorted(available.keys() - REFUSED), "", "Available")
        raise CoterieError(f"training.optimiser: torch has no optimiser {name!r}. {hint}")
    return available[name]


def _hint(name: str, valid: Sequence[str], prefix: str, heading: str) -> str:
    """Suggest the most similar valid name, or list all valid names if none is similar."""
    near = extractOne(name, valid, score_cutoff=60)
    return f"Did you mean {prefix + near[0]!r}?" if near else f"{heading}: {', '.join(valid)}."


def _expected(default: Any, value: Any) -> str | None:
    """Return a description of the expected type, or None if the value has this type.

    The expected type is the type of the argument's default.
    """
    match default:
        case bool():
            return None if isinstance(value, bool) else "true or false"
        case int() | float():
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            return None if fits else "a number"
        case tuple():
            fits = isinstance(value, tuple) and len(value) == len(default)
            return None if fits else f"a list of {len(default)} numbers"
    return None
