"""The experts that a run's routers choose from: their names, and the layers that are shown."""

from coterie.analysis.experiments import ReportedRun
from coterie.errors import CoterieError
from coterie.messages.names import ASSIGNMENT, ROUTING
from coterie.methods.adapter import AdapterMethod
from coterie.methods.registry import method_from


def has_routers(run: ReportedRun) -> bool:
    """Whether a run recorded its routers' weights, of experts that stay with their clients."""
    return bool(run.names(ROUTING)) and not run.names(ASSIGNMENT)


def expert_names(run: ReportedRun, client: str, count: int) -> list[str]:
    """What to call a client's experts: by their role, numbered where there are several."""
    try:
        method = method_from(dict(run.config["method"]))
        roles = method.layout(client).roles if isinstance(method, AdapterMethod) else ()
    except CoterieError:  # a method that is not installed here
        roles = ()
    if len(roles) != count:
        return [f"expert {n + 1}" for n in range(count)]
    several = {role for role in roles if roles.count(role) > 1}
    return [
        f"{role} {roles[: n + 1].count(role)}" if role in several else role
        for n, role in enumerate(roles)
    ]


def chosen_layers(layer: str | None, count: int) -> list[int]:
    """Which of so many layers are shown, from 0; raises CoterieError if there is no such layer."""
    if not count:
        return []  # a client with one expert has no router
    named = {"first": 0, "middle": (count - 1) // 2, "last": count - 1}
    if layer is None:
        return sorted(set(named.values()))
    if layer in named:
        return [named[layer]]
    if not (layer.isdecimal() and 1 <= int(layer) <= count):
        raise CoterieError(f"--layer takes first, middle, last, or a number from 1 to {count}.")
    return [int(layer) - 1]
