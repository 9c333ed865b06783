"""Balanced Dirichlet division, against what FedAMoLE's paper describes."""

from collections import Counter
from typing import Any

import numpy
import pytest
from divisions import divide, items
from questions import write

from coterie.data.division.divide import MINIMUM, Pools, _by_dirichlet
from coterie.data.spec import DataSpec, InstructionSpec

CLIENTS = 4
SIZES = {"a": 300, "b": 90, "c": 210, "d": 60, "e": 140}


def pools() -> Pools:
    numbers = iter(range(sum(SIZES.values())))
    return {label: [next(numbers) for _ in range(size)] for label, size in SIZES.items()}


def table(parts: list[list[int]]) -> numpy.ndarray:
    """Records of each client (rows) and label (columns)."""
    label_of = {number: label for label, pool in pools().items() for number in pool}
    counts = [Counter(label_of[number] for number in part) for part in parts]
    return numpy.array([[count[label] for label in SIZES] for count in counts])


def naive(alpha: float, draw: numpy.random.Generator) -> numpy.ndarray:
    """As described: shares of clients that are full become zero, the others sum to one again."""
    total = sum(SIZES.values())
    while True:
        held = numpy.zeros((CLIENTS, len(SIZES)))
        for column, size in enumerate(SIZES.values()):
            shares = draw.dirichlet([alpha] * CLIENTS)
            shares[held.sum(1) >= total / CLIENTS] = 0
            shares /= shares.sum()
            held[:, column] = numpy.diff((shares.cumsum() * size).round(), prepend=0)
        if held.sum(1).min() >= MINIMUM:
            return held


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_the_division_is_distributed_as_described(alpha: float) -> None:
    draw = numpy.random.default_rng(0)
    wanted = numpy.array([naive(alpha, draw) for _ in range(1500)])
    found = numpy.array(
        [table(_by_dirichlet(pools(), CLIENTS, alpha, True, seed)) for seed in range(1500)]
    )

    def figures(tables: numpy.ndarray) -> numpy.ndarray:
        """Sizes of the clients, largest first; how many share a label; unevenness of each label."""
        sizes = numpy.sort(tables.sum(2))[:, ::-1]
        sharing = (tables > 0).sum(1)
        return numpy.concatenate([sizes, sharing, tables.max(1)], axis=1)

    a, b = figures(wanted), figures(found)
    error = numpy.sqrt((a.var(0) + b.var(0)) / 1500) + 1e-9
    assert (abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()


def full_clients_get_more(counts: numpy.ndarray) -> bool:
    before = counts.cumsum(1) - counts  # what each holds when a label is dealt
    return bool(((before >= counts.sum() / CLIENTS) & (counts > 0)).any())


@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_a_client_with_its_even_part_gets_no_more(alpha: float) -> None:
    seen = []
    for seed in range(40):
        parts = _by_dirichlet(pools(), CLIENTS, alpha, True, seed)
        dealt = sorted(number for part in parts for number in part)
        assert dealt == list(range(sum(SIZES.values())))  # all, and none twice
        assert min(map(len, parts)) >= MINIMUM
        assert not full_clients_get_more(table(parts))
        seen.append(full_clients_get_more(table(_by_dirichlet(pools(), CLIENTS, 1.0, False, seed))))
    assert any(seen)


def test_the_scarcest_of_chance_does_not_stop_it() -> None:
    """With so small an alpha the shares of all but one client are often zero exactly."""
    records: Pools = {str(n): list(range(25 * n, 25 * n + 25)) for n in range(8)}
    for seed in range(20):
        assert min(map(len, _by_dirichlet(records, CLIENTS, 1e-6, True, seed))) >= 25


def test_the_run_file_s_key_balances(tmp_path) -> None:
    asked = [{"instruction": f"{k} {i}", "output": k} for k, n in SIZES.items() for i in range(n)]
    write(tmp_path / "records.jsonl", *asked)
    data = DataSpec(instructions=InstructionSpec(template="{{ instruction }}"))

    def divided(**more: Any) -> list[list[int]]:
        options = {"label": "output", "by": "dirichlet", "clients": CLIENTS, "alpha": 1.0, **more}
        parts = divide(tmp_path, data, 3, **options).values()
        counts = [Counter(item.answer for item in items(texts)) for texts in parts]
        return [[count[label] for label in SIZES] for count in counts]

    balanced = divided(balanced=True)
    assert numpy.sum(balanced) == sum(SIZES.values())
    assert not full_clients_get_more(numpy.array(balanced))
    assert divided() == divided(balanced=False) != balanced
