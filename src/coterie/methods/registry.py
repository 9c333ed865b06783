"""The registry of methods: built-in methods, registered methods and methods of plugins.

A method's module is imported when the method is first requested; listing names imports nothing.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from coterie.registry import Registry

if TYPE_CHECKING:
    from coterie.methods.contract import Method

POOLED = "centralized"
"""The name of a pooled run: a single client has the text of all clients and trains as in `local`.

The name can be used like a method's name, but no method class has this name.
"""

_CLASSES = {
    "pretrained:Pretrained": "pretrained",
    "averaging:Local": "local",
    "averaging:LocalFull": "local-full",
    "averaging:FedAvg": "fedavg fedavg-ft",
    "averaging:FedProx": "fedprox",
    "averaging:FFALora": "ffa-lora",
    "hetlora:HetLora": "hetlora",
    "ranks:FlexLora": "flexlora",
    "pcl.strategies:PCLUniform": "pcl-uniform",
    "pcl.strategies:PCLTheoretical": "pcl-theoretical",
    "pcl.strategies:PCLWeights": "pcl-1",
    "pcl.strategies:PCLValidation": "pcl-2",
    "pcl.strategies:PCLPredictions": "pcl-3",
    "comigs:Mixture": "local-moe fedavg-moe pfedmoe local-moe-tr fedavg-moe-tr comigs-tr "
    "comigs-1g1s comigs-2g comigs-2s",
    "averaging:FedIT": "fedit fedit-ft",
    "auto.method:Auto": "auto",
    "grouped:Grouped": "grouped",
    "fedalt:FedALT": "fedalt",
    "factors:FedSA": "fedsa fed-alora",
    "factors:RoLora": "rolora",
    "ditto:Ditto": "ditto",
    "feddpa:FedDPA": "feddpa",
    "cobo:CoBo": "cobo",
    "fedfomo:FedFomo": "fedfomo",
    "clove:IFCA": "ifca",
    "clove:CLoVE": "clove",
    "fedlease:FedLease": "fedlease",
    "prompts:FedPrompt": "fedprompt fedprompt-ft",
    "prompts:FedPTuning": "fedptuning fedptuning-ft",
    "fdlora:FDLora": "fdlora",
    "fedamole.method:FedAMoLE": "fedamole",
    "fedmkt.method:FedMKT": "fedmkt fedmkt-fedavg llm2slm",
}
"""For each file and class (`FILE:CLASS`), the names of the built-in methods that it implements.

A name that differs from the class's `name` is the name of a preset in the file's table `PRESETS`.
"""
OWN = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
"""A mapping from the name of each built-in method to its file and class (`FILE:CLASS`).

Tables of methods in reports and in the documentation list the methods in this order.
"""

_presets: "dict[str, type[Method]]" = {}


def _builtin(name: str) -> "type[Method]":
    """Return the class of a built-in method. The class of a preset is derived on first use."""
    file, _, kind = OWN[name].partition(":")
    module = import_module(f"coterie.methods.{file}")
    method = getattr(module, kind)
    if vars(method).get("name") == name:
        return method
    if name not in _presets:  # setdefault: concurrent threads get the same class
        _presets.setdefault(name, preset(method, name, module.PRESETS[name]))
    return _presets[name]


def preset(kind: "type[Method]", name: str, changes: Mapping[str, Any]) -> "type[Method]":
    """Derive a class that differs from `kind` only in class variables and in default settings.

    Args:
        kind: The class that implements the method.
        name: The method's name in run files.
        changes: A mapping. A key is the name of a class variable or of a setting. The value is the
            variable's new value or the setting's new default.

    Returns:
        The derived class.
    """
    fields: dict[str, Any] = {}
    for key, value in {"name": name, **changes}.items():
        default = value.default if isinstance(value, FieldInfo) else value
        annotation = ClassVar[Any] if key in kind.__class_vars__ else type(default)
        fields[key] = (annotation, value)
    return create_model(name, __base__=kind, __module__=kind.__module__, **fields)


def fine_tuned(name: str) -> dict[str, dict[str, str]]:
    """Return the entry of the preset NAME-ft in the table `PRESETS`.

    The preset reports the scores of the models after local training. In all other respects, it is
    equal to the method NAME.
    """
    summary = f"like {name}, but models are scored after local training, before averaging"
    return {f"{name}-ft": {"summary": summary, "reports": "trained"}}


METHODS: "Registry[type[Method]]" = Registry(
    noun="method",
    builtin={name: partial(_builtin, name) for name in OWN},
    group="coterie.methods",
    base="coterie.methods.contract:Method",
    requires={"summary": ": one line on what it shares"},
    reserved=(POOLED,),
    advice=" `coterie methods` lists all methods.",
)
kind_of, names, check_name = METHODS.get, METHODS.names, METHODS.check


def available() -> "dict[str, type[Method]]":
    """Return a mapping from the name of every available method to the method's class.

    The order is that of the tables of methods in reports and in the documentation: first built-in
    methods, then methods of installed packages, then methods that were registered at run time.
    """
    return {name: kind_of(name) for name in names()}


def method_from(value: object) -> "Method":
    """Create a method from the value of `method` in a run file.

    Args:
        value: A method's name, or a mapping that contains `name` and settings. A method is also
            accepted and is returned unchanged.

    Returns:
        The method.

    Raises:
        CoterieError: The name is unknown.
        pydantic.ValidationError: A setting is unknown or invalid.
    """
    from coterie.methods.contract import Method

    if isinstance(value, Method):
        return value
    settings = dict(value) if isinstance(value, Mapping) else {"name": value}
    return kind_of(str(settings.pop("name", None))).model_validate(settings)


def carried(method: "Method", kind: "type[Method]") -> dict[str, Any]:
    """Return the settings of a method that also apply to a method of another class.

    A comparison copies these settings, so that the compared methods have, for example, the same
    LoRA rank.

    A part is a section of settings, such as `lora`. A part that equals its default is not copied.
    Any other part is copied with all its fields if both methods use the same settings class for the
    part. If the settings classes differ, only the fields of their nearest common base class are
    copied. A part that is null is copied only if the other method allows null.

    Args:
        method: The method with the settings.
        kind: The class of the other method.

    Returns:
        A mapping from the names of parts of `kind` to the settings to copy.
    """
    defaults, settings = kind.parts(), {}
    for name, default in type(method).parts().items():
        part = getattr(method, name)
        if name not in defaults or part == default:
            continue
        if part is not None:
            settings[name] = part.model_dump(include=_common_fields(part, defaults[name]))
        elif type(None) in get_args(kind.model_fields[name].annotation):
            settings[name] = None
    return settings


def _common_fields(a: BaseModel, b: BaseModel) -> set[str]:
    """Find the nearest common base class of two settings objects, and return its fields' names."""
    base = next(k for k in type(a).__mro__ if isinstance(b, k) and issubclass(k, BaseModel))
    return set(base.model_fields)
