"""Methods by name: those of the package, those that others register, and those of plugins.

A method is imported when it is asked for by its name: names alone cost nothing.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel

from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.methods.contract import Method

POOLED = "centralized"
"""Not a method: a federation of one client that holds everybody's text and trains like `local`."""

OWN = {
    "pretrained": "pretrained:Pretrained",
    "local": "averaging:Local",
    "local-full": "averaging:LocalFull",
    "fedavg": "averaging:FedAvg",
    "fedavg-ft": "averaging:FedAvgFT",
    "fedprox": "averaging:FedProx",
    "ffa-lora": "averaging:FFALora",
    "hetlora": "hetlora:HetLora",
    "flexlora": "ranks:FlexLora",
    "pcl-uniform": "pcl:PCLUniform",
    "pcl-theoretical": "pcl:PCLTheoretical",
    "pcl-1": "pcl:PCLWeights",
    "pcl-2": "pcl:PCLValidation",
    "pcl-3": "pcl:PCLPredictions",
    "local-moe": "comigs:LocalMoE",
    "fedavg-moe": "comigs:FedAvgMoE",
    "pfedmoe": "comigs:PFedMoE",
    "local-moe-tr": "comigs:LocalMoETr",
    "fedavg-moe-tr": "comigs:FedAvgMoETr",
    "comigs-tr": "comigs:CoMiGSTr",
    "comigs-1g1s": "comigs:CoMiGS",
    "comigs-2g": "comigs:CoMiGS2G",
    "comigs-2s": "comigs:CoMiGS2S",
    "fedit": "fedit:FedIT",
    "fedit-ft": "fedit:FedITFT",
    "fedprompt": "prompts:FedPrompt",
    "fedprompt-ft": "prompts:FedPromptFT",
    "fedptuning": "prompts:FedPTuning",
    "fedptuning-ft": "prompts:FedPTuningFT",
    "fdlora": "fdlora:FDLora",
    "fedamole": "fedamole:FedAMoLE",
    "fedmkt": "fedmkt:FedMKT",
    "fedmkt-fedavg": "fedmkt:FedMKTFedAvg",
    "llm2slm": "fedmkt:LLM2SLM",
}
"""The package's own, in the order in which tables show them: by name, the file and the class."""

GROUP = "coterie.methods"
"""The entry points with which an installed package adds methods."""

K = TypeVar("K", bound=type)
_registered: "dict[str, type[Method]]" = {}


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
    there = _registered.get(name)
    if name in OWN or name == POOLED or (there is not None and not _alike(there, kind)):
        raise CoterieError(f"A method named {name!r} already exists; choose another name.")
    _registered[name] = method
    return kind


def _alike(one: type, other: type) -> bool:
    """Whether it is the same class, perhaps after its file or its notebook's cell changed."""
    homes = [k.__module__ for k in (one, other)]
    homes = [getattr(sys.modules.get(home), "__file__", home) for home in homes]
    return one.__qualname__ == other.__qualname__ and homes[0] == homes[1]


@cache
def _entries() -> dict[str, EntryPoint]:
    """What installed packages add, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Every method that a run file can name, in the order in which tables show them."""
    return list(dict.fromkeys([*OWN, *_entries(), *_registered]))


def available() -> "dict[str, type[Method]]":
    """The same with their classes."""
    return {name: kind_of(name) for name in names()}


def is_installed(kind: "type[Method]") -> bool:
    """Whether any process on this machine finds a method by its name, without being told of it."""
    return (kind.name in OWN or kind.name in _entries()) and kind_of(kind.name) is kind


def check_name(name: str) -> None:
    """Raise CoterieError if there is no method of this name."""
    if name not in OWN and name not in names():  # its own first: to look further takes longer
        raise CoterieError(
            f"There is no method {name!r}.{_hint(name)} `coterie methods` lists all methods; "
            "--plugin FILE.py adds your own."
        )


def _hint(name: str) -> str:
    """What may have been meant by a name that is none."""
    from rapidfuzz.fuzz import ratio
    from rapidfuzz.process import extractOne

    known = [*names(), POOLED]
    begin = [one for one in known if name and one.startswith(name)]
    if len(begin) > 1:
        return f" Did you mean one of {', '.join(begin)}?"
    near = extractOne(name, known, scorer=ratio, score_cutoff=65)
    return f" Did you mean {near[0]!r}?" if near else ""


def kind_of(name: str) -> "type[Method]":
    """The class of a method; raises CoterieError for an unknown name."""
    check_name(name)
    if name in OWN:
        file, _, kind = OWN[name].partition(":")
        return getattr(import_module(f"coterie.methods.{file}"), kind)
    return _registered[name] if name in _registered else _loaded(_entries()[name])


def _loaded(entry: EntryPoint) -> "type[Method]":
    """The class behind an entry point."""
    try:
        return register(entry.load())
    except Exception as error:
        raise CoterieError(
            f"The method {entry.name!r} of an installed package ({entry.value}) cannot be "
            f"imported: {error}"
        ) from error


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
