"""Numbers in run files: infinity and NaN are refused wherever a number is expected."""

import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coterie.config.sections import RunFile
from coterie.methods.registry import available
from coterie.transforms.registry import TRANSFORMS


def parts(annotation: Any) -> Iterator[Any]:
    """Return the members of a union or of `Annotated`, and a class as it is."""
    if typing.get_origin(annotation) in (dict, tuple, list):
        return
    arguments = typing.get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from parts(argument)


def paths(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Return the keys of all numbers of a model and of the models within it."""
    for name, field in model.model_fields.items():
        for part in parts(field.annotation):
            if part is float:
                yield (name,)
            elif isinstance(part, type) and issubclass(part, BaseModel):
                yield from ((name, *path) for path in paths(part))


MODELS: Any = {name: TRANSFORMS.get(name) for name in TRANSFORMS.names()}
MODELS |= {"run file": RunFile, **available()}
NUMBERS = {(name, path): model for name, model in MODELS.items() for path in paths(model)}


@pytest.mark.parametrize(("name", "path"), NUMBERS, ids=lambda value: str(value))
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_must_be_finite(name, path, number) -> None:
    value: Any = number
    for key in reversed(path):
        value = {key: value}
    with pytest.raises(ValidationError) as error:
        NUMBERS[name, path].model_validate(value)
    infinite = [e["loc"] for e in error.value.errors() if e["type"] == "finite_number"]
    assert any(set(path) <= {*place} for place in infinite)


def test_the_numbers_are_found() -> None:
    learning_rate, share = ("training", "learning_rate"), ("embeddings", "share")
    wanted = {("auto", ("trust",)), ("run file", learning_rate), ("fedamole", share)}
    assert wanted <= NUMBERS.keys()
    assert len(NUMBERS) > 60
