"""Which optimiser makes the updates of a training, as a run file chooses it.

`training.optimiser` is the name of a class of `torch.optim`, in any case, or a mapping of `name`
and that class's own keyword arguments. The learning rate is not among them: it has a schedule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from rapidfuzz.process import extractOne
from torch import Tensor

from coterie.errors import CoterieError

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
"""What adamw has where a run file does not say otherwise; others have torch's defaults."""
REFUSED = {"lbfgs": "asks for many gradients of one batch", "sparseadam": "takes sparse gradients"}
"""Classes that cannot be chosen, since an update here is one gradient of dense values."""


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimisers of torch by their names in lower case, the refused ones included."""
    found = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    optimisers = (kind for kind in found if issubclass(kind, torch.optim.Optimizer))
    return {k.__name__.lower(): k for k in optimisers if k is not torch.optim.Optimizer}


class OptimiserSpec(BaseModel):
    """Key `training.optimiser` of a run file; keys beside `name` are the class's own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """A name alone is a mapping, too; names are in lower case and numbers are numbers."""
        values = {"name": values} if isinstance(values, str) else values
        if not isinstance(values, Mapping):
            raise ValueError("give a name, such as sgd, or a mapping of `name` and its settings")
        name = str(values.get("name", "adamw")).lower()
        given = {str(key): _read(value) for key, value in values.items() if key != "name"}
        return {"name": name, **(ADAMW if name == "adamw" else {}), **given}

    @model_validator(mode="after")
    def _works(self) -> Self:
        """Said at once, and not after hours of data: what the class does not take."""
        if self.name == "adamw" and self.settings == ADAMW:
            return self
        known = dict(signature(_class(self.name)).parameters)
        known = {key: known[key].default for key in known if key not in ("params", "lr")}
        for key, value in self.settings.items():
            if key == "lr":
                raise CoterieError(
                    "The learning rate is training.learning_rate, with its schedule; leave"
                    " training.optimiser.lr out."
                )
            if key not in known:
                raise _unknown(key, list(known))
            if wanted := _wanted(known[key], value):
                raise CoterieError(
                    f"training.optimiser.{key} should be {wanted}, not {_written(value)!r:.60}."
                )
        weight = torch.zeros(2, 2, requires_grad=True)
        weight.grad = torch.ones(2, 2)
        optimiser = self.build([weight], 1e-3)
        with self._blamed():
            optimiser.step()
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments, without the learning rate."""
        return dict(self.model_extra or {})

    def build(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """An optimiser of these parameters; its groups' `lr` may be changed before every step.

        Raises CoterieError if it cannot deal with its settings or with the parameters' shapes.
        """
        kind: Any = _class(self.name)
        with self._blamed():
            return kind(list(parameters), lr=learning_rate, **self.settings)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """What torch says against the optimiser, as one sentence."""
        try:
            yield
        except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise CoterieError(f"training.optimiser: {self.name} cannot work: {said}.") from error


def _class(name: str) -> type[torch.optim.Optimizer]:
    found = classes()
    if name in REFUSED:
        raise CoterieError(
            f"training.optimiser cannot be {name}, which {REFUSED[name]}: an update here is one"
            " gradient of dense values."
        )
    if name not in found:
        names = sorted(found.keys() - REFUSED)
        near = extractOne(name, names, score_cutoff=60)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."
        raise CoterieError(f"training.optimiser: torch has no optimiser {name!r}. {hint}")
    return found[name]


def _unknown(key: str, known: Sequence[str]) -> CoterieError:
    near = extractOne(key, known, score_cutoff=60)
    hint = f"Did you mean 'training.optimiser.{near[0]}'?" if near else ""
    hint = hint or f"Known keys: {', '.join(['name', *known])}."
    return CoterieError(f"Unknown key 'training.optimiser.{key}'. {hint}")


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


def _read(value: Any) -> Any:
    """A value of YAML, in which 1e-8 is text, as torch takes it."""
    if isinstance(value, list | tuple):
        return tuple(map(_read, value))
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
