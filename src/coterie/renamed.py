"""Old names of keys and values in run and table files, and what they are called now."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from coterie.errors import CoterieError
from coterie.methods.registry import named_in

if TYPE_CHECKING:
    from coterie.methods.contract import Method

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
        if key in settings and (told := _renamed(named_in(values, default), old, settings[key])):
            raise CoterieError(told)


def _renamed(method: "type[Method]", old: str, value: Any) -> str | None:
    """What a setting of a method is called now; None if it is not an old one."""
    from coterie.methods.adapter import AdapterMethod

    if has(method, old) and (old != "router" or not isinstance(value, str)):
        return None
    new = next((new for new in RENAMED_SETTINGS[old] if has(method, new)), None)
    part = (new or "").split(".")[0]
    if new is None or (new == "mlp.sets" and not _counts(method, old)):
        return None
    if old == "rank" and part == "attention" and issubclass(method, AdapterMethod):
        return (
            f"method.rank had no effect in {method.name}; the rank of its LoRA pairs is "
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


def _counts(method: "type[Method]", old: str) -> bool:
    """Whether a method's sets are what it once counted so: shared ones, or personal ones."""
    from coterie.methods.settings import OwnSets, SharedSets

    kinds = {"generalists": SharedSets, "specialists": OwnSets}
    return isinstance(method.parts()["mlp"], kinds[old])


def _optional(method: "type[Method]", part: str) -> bool:
    return type(None) in get_args(method.model_fields[part].annotation)


def has(method: "type[Method]", path: str) -> bool:
    """Whether a method has a setting, `mlp.rank`."""
    model: type[BaseModel] | None = method
    for key in path.split("."):
        if model is None or key not in model.model_fields:
            return False
        model = next(models(model.model_fields[key].annotation), None)
    return True


def _inside(values: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str]:
    """Where a dotted path ends, empty if there is no such mapping, and the path's last key."""
    *sections, key = path.split(".")
    here: Any = values
    for section in sections:
        here = here.get(section) if isinstance(here, Mapping) else None
    return (here if isinstance(here, Mapping) else {}), key


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, such as that of a section or of a list's entries."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models(inner)
