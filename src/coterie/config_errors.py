"""What is wrong with a run file, in one sentence that names the key as the user would write it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rapidfuzz.process import extractOne

from coterie.errors import CoterieError
from coterie.methods import Method, available

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
    "string_pattern_mismatch": "up to 64 letters, digits, dots, dashes and underscores",
    "model_attributes": "a mapping of keys to values",
    "tuple": "a list",
}
"""What pydantic's kinds of errors ask for: `int` for int_type, int_parsing and int_from_float."""

RENAMED = {
    "training.rates": "training.learning_rates",
    "training.decay": "training.learning_rate_decay",
    "training.fresh_optimiser": "training.reset_optimiser",
    "training.betas": "training.optimiser.betas",
    "training.weight_decay": "training.optimiser.weight_decay",
    "training.clip": "training.max_grad_norm",
    "evaluation.figure": "evaluation.metric",
}
"""Keys of a run file that had another name once. Those under `method.` are for methods that do not
have the old key; where the new one is under `method.` too, for those that have it."""
RENAMED_VALUES = {
    ("evaluation.metric", "written"): "exact_match",
    ("shows", "written"): "exact_match",
}
"""The same of values, by their key; `shows` is one of a table file."""


def refuse_renamed(values: Mapping[str, Any], default: str = "local") -> None:
    """Raise CoterieError, in one sentence, if a run or table file has a key's or value's old name.

    default: the method of a run file that names none.
    """
    known = _method(values, default).model_fields
    for old, new in RENAMED.items():
        here, key = _inside(values, old)
        if key not in here or (old.startswith("method.") and old.split(".")[1] in known):
            continue
        if not new.startswith("method.") or new.split(".")[1] in known:
            raise CoterieError(f"{old} is now {new}.")
    for (path, old), new in RENAMED_VALUES.items():
        here, key = _inside(values, path)
        if here.get(key) == old:
            raise CoterieError(f"{path} should be {new}, not {old}.")


def _inside(values: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str]:
    """Where a dotted path ends, empty if there is no such mapping, and the path's last key."""
    *sections, key = path.split(".")
    here: Any = values
    for section in sections:
        here = here.get(section) if isinstance(here, Mapping) else None
    return (here if isinstance(here, Mapping) else {}), key


def sentence(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> str:
    """The first thing that is wrong with `values`, which should have been a `model`."""
    # A misspelt key comes before the key that is then missing.
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    places = [_place(detail, values) for detail in details]
    # A value that may be of several kinds has an error for each; the deepest place is the nearest.
    place = max((p for p in places if p[: len(places[0])] == places[0]), key=len)
    found = [detail for detail, p in zip(details, places, strict=True) if p == place]
    first, where = found[0], _written(place)
    if first["type"] == "extra_forbidden":
        known = _keys(model, place[:-1], values)
        near = extractOne(str(place[-1]), known, score_cutoff=60)
        hint = f"Did you mean {_written((*place[:-1], near[0]))!r}?" if near else ""
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


def _keys(model: type[BaseModel], place: Place, values: Mapping[str, Any]) -> list[str]:
    """The keys that the mapping at a place may have."""
    keys = list(model.model_fields)
    for part in place:
        if part in model.model_fields:
            model = next(_models(model.model_fields[str(part)].annotation), model)
            keys = list(model.model_fields)
        if model is Method:
            model = _method(values)
            keys = ["name", *model.model_fields]
    return keys


def _method(values: Mapping[str, Any], default: str = "local") -> type[Method]:
    """The method that a run file names; `local` if there is none of that name."""
    named = values.get("method")
    name = named.get("name", default) if isinstance(named, Mapping) else named or default
    return available().get(str(name), available()["local"])


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
