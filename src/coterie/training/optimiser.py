"""The optimiser of a training: a class of `torch.optim`, checked and built."""

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
"""Classes that cannot be chosen, since an update here is one gradient of dense values."""


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimisers of torch by their names in lower case, the refused ones included."""
    found = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    optimisers = (kind for kind in found if issubclass(kind, torch.optim.Optimizer))
    return {k.__name__.lower(): k for k in optimisers if k is not torch.optim.Optimizer}


def check(spec: OptimiserSpec) -> None:
    """Say at once, and not after hours of data, what the class does not take.

    Raises CoterieError.
    """
    if spec.name == "adamw" and spec.settings == ADAMW:
        return
    known = dict(signature(_class(spec.name)).parameters)
    known = {key: known[key].default for key in known if key not in ("params", "lr")}
    for key, value in spec.settings.items():
        if key == "lr":
            raise CoterieError("Set training.learning_rate instead of training.optimiser.lr.")
        if key not in known:
            hint = _hint(key, ["name", *known], "training.optimiser.", "Known keys")
            raise CoterieError(f"Unknown key 'training.optimiser.{key}'. {hint}")
        if wanted := _wanted(known[key], value):
            given = list(value) if isinstance(value, tuple) else value
            raise CoterieError(f"training.optimiser.{key} should be {wanted}, not {given!r:.60}.")
    weight = torch.zeros(2, 2, requires_grad=True)
    weight.grad = torch.ones(2, 2)
    optimiser = build(spec, [weight], 1e-3)
    with _blamed(spec):
        optimiser.step()


def build(
    spec: OptimiserSpec, parameters: Iterable[Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    """An optimiser of these parameters; its groups' `lr` may be changed before every step.

    Raises CoterieError if it cannot deal with its settings or with the parameters' shapes.
    """
    kind: Any = _class(spec.name)
    with _blamed(spec):
        return kind(list(parameters), lr=learning_rate, **spec.settings)


@contextmanager
def _blamed(spec: OptimiserSpec) -> Iterator[None]:
    """What torch says against the optimiser, as one sentence."""
    try:
        yield
    except (
        *(ArithmeticError, AssertionError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise CoterieError(
            f"training.optimiser: {spec.name} rejected its settings: {said}."
        ) from error


def _class(name: str) -> type[torch.optim.Optimizer]:
    found = classes()
    if name in REFUSED:
        raise CoterieError(
            f"training.optimiser cannot be {name}, which {REFUSED[name]}; choose an optimiser "
            "that uses one dense gradient per update."
        )
    if name not in found:
        hint = _hint(name, sorted(found.keys() - REFUSED), "", "Available")
        raise CoterieError(f"training.optimiser: torch has no optimiser {name!r}. {hint}")
    return found[name]


def _hint(name: str, known: Sequence[str], prefix: str, all_of_them: str) -> str:
    """The known name that is nearest, if any is near; otherwise all of them."""
    near = extractOne(name, known, score_cutoff=60)
    return f"Did you mean {prefix + near[0]!r}?" if near else f"{all_of_them}: {', '.join(known)}."


def _wanted(default: Any, value: Any) -> str | None:
    """What a value should have been, going by the default that it replaces; None if it fits."""
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
