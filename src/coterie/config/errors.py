"""Error messages for run files: one sentence, with the key as the user would write it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rapidfuzz.process import extractOne

from coterie.errors import CoterieError

M = TypeVar("M", bound=BaseModel)
Location = tuple[int | str, ...]
"""The keys and indices that lead to a value in a run file, such as ("clients", 0, "path")."""

EXPECTED = {
    "bool": "true or false",
    "dict": "a mapping of keys to values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a mapping of keys to values",
    "string": "text",
    "string_pattern_mismatch": "up to 64 letters (a to z, A to Z), digits, dots, dashes and "
    "underscores",
    "model_attributes": "a mapping of keys to values",
    "tuple": "a list",
}
"""Descriptions of expected values. The keys are pydantic's types of errors without their suffixes,
such as `int` for `int_parsing`."""


def validated(model: type[M], values: Mapping[str, Any], prefix: Location = ()) -> M:
    """Validate plain data and return it as an instance of `model`.

    Args:
        model: The schema of the data.
        values: The data.
        prefix: The keys and indices under which the run file contains `values`, such as
            ("method",). Empty if `values` are the whole run file.

    Raises:
        CoterieError: The data are invalid; the message names the first mistake.
    """
    try:
        valid = model.model_validate(values)
    except ValidationError as error:
        raise CoterieError(_message(error, model, values, prefix)) from error
    for location, value, converted in _converted_booleans(values, valid, prefix):
        expected = EXPECTED[type(converted).__name__]
        raise CoterieError(f"{_dotted(location)} should be {expected}, not {value!r}.")
    return valid


def _converted_booleans(
    raw: Any, valid: Any, location: Location
) -> Iterator[tuple[Location, int | float, int | float]]:
    """Yield each value that pydantic converted from a boolean to a number, or vice versa.

    Each item consists of the location, the value in the file, and the converted value.
    """
    if raw is valid:  # pydantic converted nothing inside this value
        return
    if isinstance(raw, int | float):
        if isinstance(valid, int | float) and isinstance(raw, bool) != isinstance(valid, bool):
            yield location, raw, valid
    elif isinstance(raw, Mapping):
        fields = valid if isinstance(valid, Mapping) else getattr(valid, "__dict__", {})
        for key, value in raw.items():
            if key in fields:
                yield from _converted_booleans(value, fields[key], (*location, key))
    elif isinstance(raw, list | tuple) and isinstance(valid, list | tuple):
        for index, (value, converted) in enumerate(zip(raw, valid, strict=False)):
            yield from _converted_booleans(value, converted, (*location, index))


def _message(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], prefix: Location
) -> str:
    """Return a sentence about the first of the mistakes that `error` reports."""
    # Report a misspelt key before the required key that is missing because of it.
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    locations = [_location(detail, values) for detail in details]
    # pydantic reports an error for each member of a union; the deepest location fits best.
    location = max((at for at in locations if at[: len(locations[0])] == locations[0]), key=len)
    errors = [detail for detail, at in zip(details, locations, strict=True) if at == location]
    first, key = errors[0], _dotted((*prefix, *location))
    if first["type"] == "extra_forbidden":
        keys = [*["name"] * (prefix != () and len(location) == 1), *_keys(model, location[:-1])]
        # Names of settings are short and share letters, so they need a closer match.
        near = extractOne(str(location[-1]), keys, score_cutoff=66 if prefix else 60)
        hint = f"Did you mean {_dotted((*prefix, *location[:-1], near[0]))!r}?" if near else ""
        return f"Unknown key {key!r}. {hint or 'Known keys: ' + ', '.join(keys) + '.'}"
    if first["type"] == "missing":
        return f"{key} is missing."
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith(("Input should be", "String should match")):
        expected = " or ".join(dict.fromkeys(map(_expected, errors)))
        return f"{key} should be {expected}, not {first['input']!r:.60}."
    return f"{key}: {message}." if key else f"{message[0].upper()}{message[1:]}."


def _expected(detail: ErrorDetails) -> str:
    kind = detail["type"]
    for ending in ("_type", "_parsing", "_from_float"):
        kind = kind.removesuffix(ending)
    return EXPECTED.get(kind, detail["msg"].removeprefix("Input should be "))


def _location(detail: ErrorDetails, values: Any) -> Location:
    """Return the location of an error, without the type names that pydantic inserts."""
    location: list[int | str] = []
    value = values
    for key in detail["loc"]:
        is_key = isinstance(value, Mapping) and key in value
        if is_key or (isinstance(value, Sequence) and isinstance(key, int) and key < len(value)):
            location.append(key)
            value = value[key]  # pyright: ignore[reportArgumentType, reportCallIssue]
    if detail["type"] == "missing":
        location.append(detail["loc"][-1])
    return tuple(location)


def _dotted(location: Location) -> str:
    """Format a location in the notation of the option `--set`.

    For example, ("clients", 0, "path") becomes clients[0].path.
    """
    keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in location]
    return "".join(keys).removeprefix(".")


def _keys(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys that are allowed in the mapping at a location of a run file."""
    for key in location:
        if key in model.model_fields:
            model = next(_models(model.model_fields[str(key)].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in an annotation, such as ClientSpec in tuple[ClientSpec, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
