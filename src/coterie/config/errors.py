"""What is wrong with a run file, in one sentence that names the key as the user would write it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rapidfuzz.process import extractOne

from coterie.errors import CoterieError

M = TypeVar("M", bound=BaseModel)
Place = tuple[int | str, ...]
"""The way from the top of a run file to a value: ("clients", 0, "path")."""

WANTED = {
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
"""What pydantic's kinds of errors ask for: `int` for int_type, int_parsing and int_from_float."""


def validated(model: type[M], values: Mapping[str, Any], at: Place = ()) -> M:
    """Return plain data as a `model`.

    Args:
        model: the schema of the data.
        values: the data.
        at: the place in the file where `values` are settings beside a `name`.

    Raises:
        CoterieError: naming the first mistake.
    """
    try:
        valid = model.model_validate(values)
    except ValidationError as error:
        raise CoterieError(_sentence(error, model, values, at)) from error
    for place, value, taken in _booleans_as_numbers(values, valid, at):
        wanted = WANTED[type(taken).__name__]
        raise CoterieError(f"{_written(place)} should be {wanted}, not {value!r}.")
    return valid


def _booleans_as_numbers(
    given: Any, valid: Any, place: Place
) -> Iterator[tuple[Place, int | float, int | float]]:
    """Yield every boolean that pydantic has taken for a number, and every number for a boolean."""
    if given is valid:  # taken as it is, however deep it is nested
        return
    if isinstance(given, int | float):
        if isinstance(valid, int | float) and isinstance(given, bool) != isinstance(valid, bool):
            yield place, given, valid
    elif isinstance(given, Mapping):
        inside = valid if isinstance(valid, Mapping) else getattr(valid, "__dict__", {})
        for key, value in given.items():
            if key in inside:
                yield from _booleans_as_numbers(value, inside[key], (*place, key))
    elif isinstance(given, list | tuple) and isinstance(valid, list | tuple):
        for number, (value, held) in enumerate(zip(given, valid, strict=False)):
            yield from _booleans_as_numbers(value, held, (*place, number))


def _sentence(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], at: Place
) -> str:
    """Write the first mistake in `values`, which should have been a `model`."""
    # A misspelt key comes before the key that is then missing.
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    places = [_place(detail, values) for detail in details]
    # A value that may be of several kinds has an error for each; the deepest place is the nearest.
    place = max((p for p in places if p[: len(places[0])] == places[0]), key=len)
    found = [detail for detail, p in zip(details, places, strict=True) if p == place]
    first, where = found[0], _written((*at, *place))
    if first["type"] == "extra_forbidden":
        known = [*["name"] * (at != () and len(place) == 1), *_keys(model, place[:-1])]
        # Names of settings are short: some of their letters are in many others.
        near = extractOne(str(place[-1]), known, score_cutoff=66 if at else 60)
        hint = f"Did you mean {_written((*at, *place[:-1], near[0]))!r}?" if near else ""
        return f"Unknown key {where!r}. {hint or 'Known keys: ' + ', '.join(known) + '.'}"
    if first["type"] == "missing":
        return f"{where} is missing."
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith(("Input should be", "String should match")):
        wanted = " or ".join(dict.fromkeys(map(_wanted, found)))
        return f"{where} should be {wanted}, not {first['input']!r:.60}."
    return f"{where}: {message}." if where else f"{message[0].upper()}{message[1:]}."


def _wanted(detail: ErrorDetails) -> str:
    kind = detail["type"]
    for ending in ("_type", "_parsing", "_from_float"):
        kind = kind.removesuffix(ending)
    return WANTED.get(kind, detail["msg"].removeprefix("Input should be "))


def _place(detail: ErrorDetails, values: Any) -> Place:
    """Where the error is, without the names of types that pydantic adds to the place."""
    place: list[int | str] = []
    here = values
    for part in detail["loc"]:
        inside = isinstance(here, Mapping) and part in here
        if inside or (isinstance(here, Sequence) and isinstance(part, int) and part < len(here)):
            place.append(part)
            here = here[part]  # pyright: ignore[reportArgumentType, reportCallIssue]
    if detail["type"] == "missing":
        place.append(detail["loc"][-1])
    return tuple(place)


def _written(place: Place) -> str:
    """("clients", 0, "path") as clients[0].path."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".")


def _keys(model: type[BaseModel], place: Place) -> list[str]:
    """Return the keys that the mapping at a place may have."""
    for part in place:
        if part in model.model_fields:
            model = next(_models(model.model_fields[str(part)].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type, such as that of a section or of a list's entries."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
