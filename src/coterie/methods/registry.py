"""Methods by name: those of the package, those that others register, and those of plugins.

A method is imported when it is asked for by its name: names alone cost nothing.
"""

import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from coterie.errors import CoterieError
from coterie.registry import Registry

if TYPE_CHECKING:
    from coterie.methods.contract import Method

POOLED = "centralized"
"""Not a method: a federation of one client that holds everybody's text and trains like `local`."""

_CLASSES = {
    "pretrained:Pretrained": "pretrained",
    "averaging:Local": "local",
    "averaging:LocalFull": "local-full",
    "averaging:FedAvg": "fedavg fedavg-ft",
    "averaging:FedProx": "fedprox",
    "averaging:FFALora": "ffa-lora",
    "hetlora:HetLora": "hetlora",
    "ranks:FlexLora": "flexlora",
    "pcl:PCLUniform": "pcl-uniform",
    "pcl:PCLTheoretical": "pcl-theoretical",
    "pcl:PCLWeights": "pcl-1",
    "pcl:PCLValidation": "pcl-2",
    "pcl:PCLPredictions": "pcl-3",
    "comigs:Mixture": "local-moe fedavg-moe pfedmoe local-moe-tr fedavg-moe-tr comigs-tr "
    "comigs-1g1s comigs-2g comigs-2s",
    "averaging:FedIT": "fedit fedit-ft",
    "prompts:FedPrompt": "fedprompt fedprompt-ft",
    "prompts:FedPTuning": "fedptuning fedptuning-ft",
    "fdlora:FDLora": "fdlora",
    "fedamole.method:FedAMoLE": "fedamole",
    "fedmkt.method:FedMKT": "fedmkt fedmkt-fedavg llm2slm",
}
"""The files and classes of the package's own methods, and the names that each class has.

A name that is not the class's own is that of a preset, in the file's table `PRESETS`.
"""
OWN = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
"""The package's own, in the order in which tables show them: by name, the file and the class."""

K = TypeVar("K", bound=type)
_presets: "dict[str, type[Method]]" = {}


def register(kind: K) -> K:
    """Give a method's class its name in run files, for as long as this process runs.

    It may stand above the class as a decorator. Raises CoterieError if the class is no method with
    a name and a summary, or if the name is taken.
    """
    from coterie.methods.contract import Method

    method: Any = kind
    name = getattr(kind, "name", None)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise CoterieError(f"{kind!r} is not a method; it must be a subclass of coterie.Method.")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise CoterieError(
            f"The method {kind.__name__} needs a `name` of lower-case letters, digits, dots "
            "and dashes."
        )
    if not hasattr(kind, "summary"):
        raise CoterieError(f"The method {name!r} needs a `summary`: one line on what it shares.")
    METHODS.add(name, method)
    return kind


def _builtin(name: str) -> "type[Method]":
    """Import a method of the package, or derive it from the class of which it is a preset."""
    file, _, kind = OWN[name].partition(":")
    module = import_module(f"coterie.methods.{file}")
    method = getattr(module, kind)
    if vars(method).get("name") == name:
        return method
    if name not in _presets:  # threads that are here at once get the same class
        _presets.setdefault(name, preset(method, name, module.PRESETS[name]))
    return _presets[name]


def preset(kind: "type[Method]", name: str, changes: Mapping[str, Any]) -> "type[Method]":
    """Derive a method that has its own name, summary, settings or class variables, and no code.

    Args:
        kind: The class that does the work.
        name: The method's name in run files.
        changes: Values of class variables, and defaults of settings, by name.
    """
    fields: dict[str, Any] = {}
    for key, value in {"name": name, **changes}.items():
        default = value.default if isinstance(value, FieldInfo) else value
        of = ClassVar[Any] if key in kind.__class_vars__ else type(default)
        fields[key] = (of, value)
    return create_model(name, __base__=kind, __module__=kind.__module__, **fields)


METHODS: "Registry[type[Method]]" = Registry(
    noun="method",
    builtin={name: partial(_builtin, name) for name in OWN},
    group="coterie.methods",
    accept=register,
    reserved=(POOLED,),
    advice="`coterie methods` lists all methods; --plugin FILE.py, or coterie.register, adds your "
    "own.",
)
kind_of, names, check_name = METHODS.get, METHODS.names, METHODS.check


def available() -> "dict[str, type[Method]]":
    """Every method's class, by name, in the order of `names`."""
    return {name: kind_of(name) for name in names()}


def method_from(value: object) -> "Method":
    """A method from what a run file says: a name, or a mapping with `name` and hyper-parameters.

    Raises CoterieError for an unknown name; pydantic's ValidationError for wrong hyper-parameters.
    """
    from coterie.methods.contract import Method

    if isinstance(value, Method):
        return value
    settings = dict(value) if isinstance(value, Mapping) else {"name": value}
    return kind_of(str(settings.pop("name", None))).model_validate(settings)


def carried(method: "Method", kind: "type[Method]") -> dict[str, Any]:
    """What another kind of method takes over of a method's settings when the two are compared.

    Each part that was changed, as a whole; where the kinds' parts differ, what they have in common.
    That a part is left out counts only for a kind that can do without it.
    """
    theirs, found = kind.parts(), {}
    for name, default in type(method).parts().items():
        mine = getattr(method, name)
        if name not in theirs or mine == default:
            continue
        if mine is not None:
            found[name] = mine.model_dump(include=_common(mine, theirs[name]))
        elif type(None) in get_args(kind.model_fields[name].annotation):
            found[name] = None
    return found


def _common(one: BaseModel, other: BaseModel) -> set[str]:
    """The fields of the nearest class that two models descend from."""
    shared = next(k for k in type(one).__mro__ if isinstance(other, k) and issubclass(k, BaseModel))
    return set(shared.model_fields)
