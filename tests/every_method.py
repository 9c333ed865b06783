"""All methods with settings that exercise them in a run of seconds, and marks for their tests.

A test without a mark runs in `make test`, a test marked `slow` in `make slow`, and a test marked
`thorough` in `make thorough`; CI runs a tenth of the thorough tests.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

from coterie.config.run import RunConfig, parse
from coterie.methods.fedmkt.method import FedMKT
from coterie.methods.registry import available

MIXED = {"diarist": {"prose": 1.0}, "poet": {"verse": 1.0}}
MIXED |= {"whaler": {"prose": 0.75, "verse": 0.25}}
AT_ONCE: dict[str, Any] = {
    **{"experts": 6, "warmup": 1, "every": 1, "validation_batches": 1, "public_batches": 1},
    **{"mixtures": MIXED, "groups": {"diarist": "prose", "poet": "verse", "whaler": "prose"}},
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
    "auto, gradients": {"name": "auto", "trials": "gradients"},
    "fedavg, exact": {"name": "fedavg", "exact": True},
    "comigs, exact": {"name": "comigs-1g1s", "exact": True, **UNEVEN},
    "flexlora, ranks": {"name": "flexlora", **RANKS},
    "hetlora, ranks": {"name": "hetlora", **RANKS, "gamma": 0.6, "penalty_weight": 1.0},
}

FEW = {
    "fedavg",  # averages all that is trained
    "comigs-1g1s",  # shared and private parameters, trained in turns
    "grouped",  # clients receive different means
    "pcl-2",  # clients receive one another's uploads
    "fedamole",  # the server decides what each client holds
    "fedmkt",  # exchanges predictions between different bases
}
"""One method of each family, for `make test`."""

BEHAVIOURS = FEW | {
    "pretrained",  # trains nothing
    "local-full",  # sends nothing; trains all weights of the base
    "ffa-lora",  # frozen parameters beside the trained ones
    "flexlora, ranks",  # per-client ranks; the server receives each upload
    "hetlora, ranks",  # ranks that shrink
    "comigs, exact",  # uneven experts; residuals beside the mean
    "pcl-3",  # uploads that hold predictions
    "feddpa",  # two adapters, whose outputs are added
    "fedalt",  # downloads replace other parameters than those that were sent
    "fedptuning",  # an encoded prompt
    "fdlora",  # two adapters; more exchanges than rounds
    "fedmkt-fedavg",  # two kinds of exchanges
}
"""One method for each behaviour, for `make test` and `make slow`.

The other methods share these methods' classes. They differ only in the shared experts, the reported
model, or a formula with its own test.
"""


def each_method(fast: Container[str] = frozenset(FEW)) -> list[Any]:
    """Return all methods as pytest parameters.

    Args:
        fast: Names of the methods to test in `make test`. Other methods in BEHAVIOURS are marked
            slow, and the rest thorough.
    """
    kinds = {name: marks(name, fast, BEHAVIOURS) for name in METHODS}
    return [pytest.param(METHODS[name], id=name, marks=kinds[name]) for name in METHODS]


def some(fast: Container[Any], values: Iterable[Any], slow: Any = None) -> list[Any]:
    """Return values as pytest parameters. Values outside `fast` are marked slow or thorough.

    Args:
        fast: Values to test in `make test`.
        values: All values.
        slow: Values to test in `make slow`; default: all values outside `fast`.
    """
    values = list(values)
    return [pytest.param(v, marks=marks(v, fast, values if slow is None else slow)) for v in values]


def marks(value: Any, fast: Container[Any], slow: Container[Any]) -> Sequence[pytest.MarkDecorator]:
    """Return the marks of a parameter: none if it is in `fast`, else slow or thorough."""
    if value in fast:
        return ()
    return (pytest.mark.slow if value in slow else pytest.mark.thorough,)


def run_of(method: dict[str, Any], values: Any, teachers: Any, **changes: Any) -> RunConfig:
    """Return a run of a method, with all that it needs; see the fixtures of conftest.py."""
    if issubclass(available()[method["name"]], FedMKT):
        return teachers(method=method, **changes)
    whole = values(**{"method": method, "rounds": 2} | changes)
    return parse({**whole, "data": {**whole["data"], "public": "poet.txt"}})
