"""What is wrong with a run file, in one sentence that names the key as the user would write it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rapidfuzz.process import extractOne

from coterie.errors import CoterieError
from coterie.methods import Method, available
from coterie.methods.adapter import AdapterMethod
from coterie.methods.settings import OwnSets, SharedSets

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
"""Keys of a run file that had another name once."""
RENAMED_VALUES = {
    ("evaluation.metric", "written"): "exact_match",
    ("shows", "written"): "exact_match",
}
"""The same of values, by their key; `shows` is one of a table file."""
RENAMED_SETTINGS: dict[str, tuple[str, ...]] = {
    "rank": ("mlp.rank", "attention.rank"),
    "generalists": ("mlp.generalists", "mlp.sets"),
    "specialists": ("mlp.specialists", "mlp.sets"),
    "attention_rank": ("attention.rank",),
    "targets": ("attention.targets",),
    "alpha": ("lora.alpha",),
    "scale": ("lora.scale",),
    "router": ("router.kind",),
    "top_k": ("router.top_k",),
    "router_every": ("router.every",),
    "router_steps": ("router.steps",),
    "router_learning_rate": ("router.learning_rate",),
    "load_balance": ("router.load_balance",),
    "load_balance_weight": ("router.load_balance_weight",),
    "score_scale": ("router.score_scale",),
    "renormalise": ("router.renormalise",),
    "aggregation": ("exact",),
    "top": ("trusted.top", "logits"),
    "threshold": ("trusted.threshold",),
    "least_experts": ("min_experts",),
    "most_experts": ("max_experts",),
    "embedding_share": ("embeddings.share",),
    "embedding_samples": ("embeddings.samples",),
    "privacy": ("embeddings.privacy",),
}
"""Settings of methods that had another name once; of several, a method has the first it knows."""


def refuse_renamed(values: Mapping[str, Any], default: str = "local") -> None:
    """Raise CoterieError, in one sentence, if a run or table file has a key's or value's old name.

    default: the method of a run file that names none.
    """
    for old, new in RENAMED.items():
        here, key = _inside(values, old)
        if key in here:
            raise CoterieError(f"{old} is now {new}.")
    for (path, old), new in RENAMED_VALUES.items():
        here, key = _inside(values, path)
        if here.get(key) == old:
            raise CoterieError(f"{path} should be {new}, not {old}.")
    for old in RENAMED_SETTINGS:
        settings, key = _inside(values, f"method.{old}")
        if key in settings and (told := _renamed(_method(values, default), old, settings[key])):
            raise CoterieError(told)


def _renamed(method: type[Method], old: str, value: Any) -> str | None:
    """What a setting of a method is called now; None if it is not an old one."""
    if _has(method, old) and (old != "router" or not isinstance(value, str)):
        return None
    new = next((new for new in RENAMED_SETTINGS[old] if _has(method, new)), None)
    part = (new or "").split(".")[0]
    if new is None or (new == "mlp.sets" and not _counts(method, old)):
        return None
    if old == "rank" and part == "attention" and issubclass(method, AdapterMethod):
        return (
            f"method.rank did nothing in {method.name}; the rank of its pairs is "
            "method.attention.rank."
        )
    match old, value:
        case "generalists" | "specialists" | "attention_rank", 0 if _optional(method, part):
            return f"method.{old}: 0 is now method.{part}: null."
        case "aggregation", "exact" | "mean":
            return f"method.{old}: {value} is now method.exact: {str(value == 'exact').lower()}."
        case "router", _:
            return f"method.{old}: {value} is now method.{new}: {value}."
    return f"method.{old} is now method.{new}."


def _counts(method: type[Method], old: str) -> bool:
    """Whether a method's sets are what it once counted so: shared ones, or personal ones."""
    kinds = {"generalists": SharedSets, "specialists": OwnSets}
    return isinstance(method.parts()["mlp"], kinds[old])


def _optional(method: type[Method], part: str) -> bool:
    return type(None) in get_args(method.model_fields[part].annotation)


def _has(method: type[Method], path: str) -> bool:
    """Whether a method has a setting, `mlp.rank`."""
    model: type[BaseModel] | None = method
    for key in path.split("."):
        if model is None or key not in model.model_fields:
            return False
        model = next(_models(model.model_fields[key].annotation), None)
    return True


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
        old = place[:1] == ("method",) and place[-1] in RENAMED_SETTINGS  # of other methods
        near = None if old else extractOne(str(place[-1]), known, score_cutoff=60)
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
