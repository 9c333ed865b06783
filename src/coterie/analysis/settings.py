"""Every key that a run file or a method may have: its default and its meaning, as tables."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coterie.analysis.tables import Table
from coterie.bases import BaseSpec
from coterie.config.descriptions import descriptions
from coterie.config.sections import MethodSpec, RunFile
from coterie.data.spec import KindSpec
from coterie.errors import CoterieError
from coterie.methods.registry import POOLED, available, method_from
from coterie.methods.settings import PerClient, Settings
from coterie.training.spec import OptimiserSpec

COLUMNS = ("key", "default", "meaning")
NAMED = (MethodSpec, OptimiserSpec, KindSpec)
"""What a run file gives by a name, or by a mapping of `name` and settings: one key of a table."""


def methods_table() -> Table:
    """Every method that a run file can name."""
    rows = [(m.name, m.paper, m.summary) for m in available().values()]
    rows.append((POOLED, "", "one client with all clients' text: an upper bound, not private"))
    return Table("Methods", ("name", "paper", "summary"), rows)


def method_table(name: str) -> Table:
    """The settings of one method; raises CoterieError if there is none of that name."""
    if name == POOLED:
        raise CoterieError(f"{POOLED} uses the settings of local; see `coterie methods local`.")
    kind = type(method_from(name))
    papers = f" ({kind.paper})" if kind.paper else ""
    rows = list(keys(kind)) or [("none", "", "this method has no settings")]
    rows.sort(key=lambda row: row[0].split(".")[0] != "mlp")  # what is attached comes first
    return Table(f"{name}{papers}: {kind.summary}", COLUMNS, rows)


def keys(
    model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of every field, those of inner models by their path.

    defaults: what stands for the fields' own defaults, where it is part of a larger model.
    """
    described = descriptions(model)
    for name, field in model.model_fields.items():
        inner, path = _inner(field.annotation), f"{prefix}{name}"
        if inner is None:
            yield path, _default(field, name, defaults), _meaning(described[name], field)
            continue
        given = field.default if defaults is None else getattr(defaults, name)
        if text := _section(inner, field, described[name]):
            yield path, "", text
        entry = "[]" if get_origin(field.annotation) is tuple else ""
        yield from keys(inner, f"{path}{entry}.", given if isinstance(given, BaseModel) else None)


def _section(inner: type[BaseModel], field: FieldInfo, text: str) -> str:
    """What a section is for, if it says so; every part of a method's settings does."""
    if not issubclass(inner, Settings):
        return text.rstrip(".")
    documented = (inner.__doc__ or "").split("\n\n")[0].strip()
    text = (text or documented[:1].lower() + documented[1:]).rstrip(".")
    return f"{text}; null: none" if type(None) in get_args(field.annotation) else text


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The model behind a section of a run file, or behind each entry of a list.

    How a base is given is told once, of the run's own.
    """
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in NAMED:
            return None if kind is BaseSpec and kind is not annotation else kind
    return None


def _default(field: FieldInfo, name: str, defaults: BaseModel | None) -> str:
    """As a run file would give it; empty where there is none."""
    if defaults is None and field.is_required():
        return "required"
    own = field.get_default(call_default_factory=True)
    value = own if defaults is None else getattr(defaults, name)
    if value in (None, ""):
        return ""
    value = value.model_dump(mode="json") if isinstance(value, OptimiserSpec) else value
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def _meaning(description: str, field: FieldInfo) -> str:
    """Return a field's description, and then the values that it may have."""
    text = description.rstrip(".")
    text += "; or {CLIENT: N, others: N}" if field.annotation == PerClient else ""
    kinds = (field.annotation, *get_args(field.annotation))  # itself, or each of a union
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f"{text} ({', '.join(map(str, choices))})" if choices else text


def run_file_keys() -> str:
    """The keys of a run file as Markdown, for docs/use/run-file.md."""
    rows = [
        (f"`{key}`", f"`{default}`" if default else "", meaning)
        for key, default, meaning in keys(RunFile)
    ]
    return Table("Every key", COLUMNS, rows).markdown()
