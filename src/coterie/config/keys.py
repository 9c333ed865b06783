"""The keys of run files and of methods' settings, with their defaults and meanings."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coterie.bases.spec import BaseSpec
from coterie.config.descriptions import descriptions
from coterie.config.sections import MethodSpec
from coterie.data.spec import KindSpec
from coterie.methods.settings import PerClient, Settings
from coterie.training.spec import OptimiserSpec

BY_CLIENT = "; or {CLIENT: N, others: N}"
"""The end of the meaning of a setting that may differ between clients."""
NAMED = (MethodSpec, OptimiserSpec, KindSpec)
"""Pydantic models that a run file specifies by a name, or by a mapping with the key `name`.

Tables show such a model as one key, without the keys of the mapping.
"""


def keys(
    model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> Iterator[tuple[str, str, str]]:
    """Yield the key, default and meaning of every field. Keys of nested fields are dotted paths.

    Args:
        model: The pydantic model whose fields are listed.
        prefix: The path of a nested model, ending in a dot; empty for the outermost model.
        defaults: An instance of the model. The instance's values are shown as the defaults. If
            None, the fields' own defaults are shown.
    """
    described = descriptions(model)
    for name, field in model.model_fields.items():
        inner, path = _inner(field.annotation), f"{prefix}{name}"
        if inner is None:
            yield path, _default(field, name, defaults), _meaning(described[name], field)
            continue
        value = field.default if defaults is None else getattr(defaults, name)
        if text := _section(inner, field, described[name]):
            yield path, "", text
        entry = "[]" if get_origin(field.annotation) is tuple else ""
        yield from keys(inner, f"{path}{entry}.", value if isinstance(value, BaseModel) else None)


def _section(inner: type[BaseModel], field: FieldInfo, text: str) -> str:
    """Return the description of a section, that is, of a field whose value is a nested model.

    In a method's settings, the docstring of the nested model replaces a missing description.

    Args:
        inner: The model of the section.
        field: The field.
        text: The description of the field; empty if the field has no description.
    """
    if not issubclass(inner, Settings):
        return text.rstrip(".")
    documented = (inner.__doc__ or "").split("\n\n")[0].strip()
    text = (text or documented[:1].lower() + documented[1:]).rstrip(".")
    return f"{text}; null: none" if type(None) in get_args(field.annotation) else text


def _inner(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model of a field, if tables list the model's keys below the field's key.

    The model of a field is the type of the field's value or, if the value is a list, the type of
    the list's entries.

    Args:
        annotation: The field's type annotation.

    Returns:
        The model. The result is None if the type is not a pydantic model. The result is also None
        if tables show the field as a single key, without the model's keys. Examples are fields
        whose models are in NAMED.
    """
    # The keys of a base are listed once, for the run's own `base`.
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in NAMED:
            return None if kind is BaseSpec and kind is not annotation else kind
    return None


def _default(field: FieldInfo, name: str, defaults: BaseModel | None) -> str:
    """Return a field's default as text.

    Returns:
        The default in YAML. If the field must be given, the result is "required". If the default is
        None, the result is an empty string.
    """
    if defaults is None and field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    value = default if defaults is None else getattr(defaults, name)
    if value in (None, ""):
        return ""
    value = value.model_dump(mode="json") if isinstance(value, OptimiserSpec) else value
    value = list(value) if isinstance(value, tuple) else value
    return inline(value)


def inline(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()


def _meaning(description: str, field: FieldInfo) -> str:
    """Return a field's description, followed by the allowed values if the type lists them."""
    text = description.rstrip(".")
    text += BY_CLIENT if field.annotation == PerClient else ""
    kinds = (field.annotation, *get_args(field.annotation))  # the type and any union's members
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f"{text} ({', '.join(map(str, choices))})" if choices else text
