"""Every method there is, with settings that make it do all it does in a run of seconds."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

from coterie.config import RunConfig, parse
from coterie.methods.fedmkt import FedMKT
from coterie.methods.registry import available

MIXED = {
    "diarist": {"prose": 1.0},
    "poet": {"verse": 1.0},
    "whaler": {"prose": 0.75, "verse": 0.25},
}
AT_ONCE = {
    "experts": 6,
    "warmup": 1,
    "every": 1,
    "validation_batches": 1,
    "public_batches": 1,
    "mixtures": MIXED,
}
"""Settings with which clients exchange after every round, for methods that have them."""
UNEVEN = {"mlp": {"specialists": {"poet": 3, "others": 1}}, "router": {"every": 1, "steps": 1}}
RANKS = {"mlp": {"rank": {"poet": 3, "whaler": 5, "others": 16}}}
METHODS: dict[str, dict[str, Any]] = {
    name: {"name": name} | {k: v for k, v in AT_ONCE.items() if k in method.model_fields}
    for name, method in available().items()
} | {
    "uneven": {"name": "comigs-1g1s", **UNEVEN},
    "single": {"name": "comigs-1g1s", "mlp": {"specialists": {"poet": 0, "others": 1}}},
    "fedavg, exact": {"name": "fedavg", "exact": True},
    "comigs, exact": {"name": "comigs-1g1s", "exact": True, **UNEVEN},
    "flexlora, ranks": {"name": "flexlora", **RANKS},
    "hetlora, ranks": {"name": "hetlora", **RANKS, "gamma": 0.6, "penalty_weight": 1.0},
}

FEW = {"fedavg", "comigs-1g1s", "pcl-2", "fedamole", "fedmkt"}
"""One of each way of learning together; the others are tested with CI's slow part."""


def each_method() -> list[Any]:
    """All of them as pytest's parameters, those slow that are not among the few."""
    return [
        pytest.param(method, id=name, marks=slow(name not in FEW))
        for name, method in METHODS.items()
    ]


def some(quick: Container[Any], others: Iterable[Any]) -> list[Any]:
    """Values as pytest's parameters, those slow that are not among the quick ones."""
    return [pytest.param(value, marks=slow(value not in quick)) for value in others]


def slow(when: bool = True) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a parameter that is left to CI's slow part."""
    return (pytest.mark.slow,) if when else ()


def run_of(
    method: dict[str, Any],
    values: Callable[..., dict[str, Any]],
    teachers: Callable[..., RunConfig],
    **changes: Any,
) -> RunConfig:
    """A run of a method, with all that it needs; see the fixtures of conftest.py."""
    if issubclass(available()[method["name"]], FedMKT):
        return teachers(method=method, **changes)
    whole = values(**{"method": method, "rounds": 2} | changes)
    return parse({**whole, "data": {**whole["data"], "public": "poet.txt"}})
