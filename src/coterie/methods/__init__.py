"""Methods by name: those of the package and those that other packages register.

A package adds its own with an entry point in the group `coterie.methods`.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_args

from pydantic import BaseModel
from rapidfuzz.process import extractOne

from coterie.errors import CoterieError
from coterie.methods.averaging import FedAvg, FedAvgFT, FedProx, FFALora, Local
from coterie.methods.comigs import (
    CoMiGS,
    CoMiGS2G,
    CoMiGS2S,
    CoMiGSTr,
    FedAvgMoE,
    FedAvgMoETr,
    LocalMoE,
    LocalMoETr,
    PFedMoE,
)
from coterie.methods.contract import (
    ClientContext,
    ClientId,
    ClientSide,
    Method,
    ServerContext,
    ServerSide,
    Setting,
)
from coterie.methods.fdlora import FDLora
from coterie.methods.fedamole import FedAMoLE
from coterie.methods.fedit import FedIT, FedITFT
from coterie.methods.fedmkt import LLM2SLM, FedMKT, FedMKTFedAvg
from coterie.methods.pcl import (
    PCLPredictions,
    PCLTheoretical,
    PCLUniform,
    PCLValidation,
    PCLWeights,
)
from coterie.methods.pretrained import Pretrained
from coterie.methods.prompts import FedPrompt, FedPromptFT, FedPTuning, FedPTuningFT
from coterie.methods.ranks import FlexLora, HetLora

__all__ = [
    "ClientContext",
    "ClientId",
    "ClientSide",
    "Method",
    "ServerContext",
    "ServerSide",
    "Setting",
    "available",
    "carried",
    "method_from",
]

POOLED = "centralized"
"""Not a method: a federation of one client that holds everybody's text and trains like `local`."""

OWN: tuple[type[Method], ...] = (
    Pretrained,
    Local,
    FedAvg,
    FedAvgFT,
    FedProx,
    FFALora,
    HetLora,
    FlexLora,
    PCLUniform,
    PCLTheoretical,
    PCLWeights,
    PCLValidation,
    PCLPredictions,
    LocalMoE,
    FedAvgMoE,
    PFedMoE,
    LocalMoETr,
    FedAvgMoETr,
    CoMiGSTr,
    CoMiGS,
    CoMiGS2G,
    CoMiGS2S,
    FedIT,
    FedITFT,
    FedPrompt,
    FedPromptFT,
    FedPTuning,
    FedPTuningFT,
    FDLora,
    FedAMoLE,
    FedMKT,
    FedMKTFedAvg,
    LLM2SLM,
)


@cache
def available() -> dict[str, type[Method]]:
    """Every method that a run file can name, in the order in which tables show them."""
    others = [entry.load() for entry in entry_points(group="coterie.methods")]
    return {method.name: method for method in (*OWN, *others)}


def method_from(value: object) -> Method:
    """A method from what a run file says: a name, or a mapping with `name` and hyper-parameters.

    Raises CoterieError for an unknown name; pydantic's ValidationError for wrong hyper-parameters.
    """
    if isinstance(value, Method):
        return value
    settings = dict(value) if isinstance(value, dict) else {"name": value}
    name = str(settings.pop("name", None))
    methods = available()
    if name not in methods:
        near = extractOne(name, [*methods, POOLED], score_cutoff=60)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CoterieError(
            f"There is no method {name!r}.{hint} `coterie methods` lists all of them."
        )
    return methods[name](**settings)


def carried(method: Method, kind: type[Method]) -> dict[str, Any]:
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
