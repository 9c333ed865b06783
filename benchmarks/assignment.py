"""How long the assignment of experts to clients takes, and what solving modules side by side saves.

Relevances of random embeddings; every expert chooses 2 clients, every client gets 1 to 8 experts.
Times are the shortest of some repeats. Side by side, there are as many modules as q and v have in
32 layers, in as many threads as torch may use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import options_of, show, take_turns, write

from coterie.methods.fedamole.assignment import Bounds, assign, assign_all, relevance

BOUNDS = Bounds(clients_per_expert=2, least=1, most=8)
RANK, MODULES = 8, 64
TARGETS = {(30, 10): 0.020, (1000, 1000): 15.0}
"""Largest seconds for one module, by experts and clients."""


@dataclass(frozen=True)
class Timing:
    """Seconds for one size."""

    experts: int
    clients: int
    one: float
    """One module."""
    modules: int
    """So many modules: 0 if they were not tried."""
    after: float
    """One module after another."""
    beside: float
    """Side by side."""


def make(experts: int, clients: int, modules: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    return {
        f"module-{i:02d}": relevance(
            3 * chance.normal(size=(experts, RANK)), chance.normal(size=(clients, RANK)), RANK
        )
        for i in range(modules)
    }


def shortest(work: Callable[[], object], repeats: int) -> float:
    return min(take_turns({"": work}, repeats)[""])


def measure(experts: int, clients: int, repeats: int) -> Timing:
    modules = MODULES if experts * clients <= 10_000 else 0
    scores = make(experts, clients, max(modules, 1))
    one = shortest(lambda: assign(scores["module-00"], BOUNDS), repeats)
    after = beside = 0.0
    if modules:
        after = shortest(lambda: [assign(s, BOUNDS) for s in scores.values()], repeats)
        beside = shortest(lambda: assign_all(scores, BOUNDS), repeats)
    return Timing(experts, clients, one, modules, after, beside)


def cells(row: Timing) -> list[str]:
    target = TARGETS.get((row.experts, row.clients))
    many = (f"{row.modules}", f"{1000 * row.after:,.0f}", f"{1000 * row.beside:,.0f}")
    return [
        str(row.experts),
        str(row.clients),
        f"{1000 * row.one:,.1f}",
        f"{1000 * target:,.0f}" if target else "",
        *(many if row.modules else ("", "", "")),
    ]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--sizes", default="30x10,100x100,300x300,1000x1000")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")]
    timings = [measure(experts, clients, options.repeats) for experts, clients in sizes]
    show(
        f"Assignment of experts, {options.threads} threads",
        ("experts", "clients", "one ms", "target ms", "modules", "after ms", "beside ms"),
        [cells(row) for row in timings],
        "after, beside: all modules one after another, and side by side",
    )
    write(options, rows=timings, targets={f"{e}x{c}": most for (e, c), most in TARGETS.items()})


if __name__ == "__main__":
    main()
