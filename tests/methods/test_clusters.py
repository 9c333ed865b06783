"""Distances between clients' adapters are computed with a few adapters in memory."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from coterie.exchanges.lazy import in_file
from coterie.messages import Tensors
from coterie.methods.clusters import FEW, cosine_distances, nearest
from coterie.methods.value import PerClient
from coterie.runs.store import Store


def adapters(count: int, tensors: int) -> dict[str, Tensors]:
    torch.manual_seed(count)
    shapes = [(8, 33), (17, 8), (5,)]
    return {
        f"c{number:02d}": {f"t{n:02d}": torch.randn(shapes[n % 3]) for n in range(tensors)}
        for number in torch.randperm(count).tolist()
    }


def in_files(some: dict[str, Tensors], store: Store) -> PerClient[Tensors]:
    files: dict[str, Any] = {n: in_file(store, {"g": tensors}, "g") for n, tensors in some.items()}
    return PerClient(files)


def in_memory(rows: Sequence[Tensors], columns: Sequence[Tensors]) -> np.ndarray:
    similarities = []
    for name in rows[0]:
        x = F.normalize(torch.stack([t[name].flatten() for t in rows]).double(), dim=1)
        y = F.normalize(torch.stack([t[name].flatten() for t in columns]).double(), dim=1)
        similarities.append(x @ y.t())
    return (1 - torch.stack(similarities).mean(0)).numpy()


@pytest.mark.parametrize(("count", "tensors"), [(2, 1), (3, 50), (20, 3), (50, 31)])
def test_distances_equal_those_of_adapters_in_memory(count, tensors, tmp_path) -> None:
    some = adapters(count, tensors)
    files = in_files(some, Store(tmp_path))
    rows, columns = [*some.values()], [*some.values()][:3]
    assert (cosine_distances(files.values(), files.values()) == in_memory(rows, rows)).all()
    assert (cosine_distances(files.values(), columns) == in_memory(rows, columns)).all()


def test_the_nearest_clients_equal_those_of_adapters_in_memory(tmp_path) -> None:
    some = adapters(20, 12)
    files = in_files(some, Store(tmp_path))
    start, names = adapters(1, 12)["c00"], sorted(some)
    changes = [{n: t - start[n] for n, t in some[name].items()} for name in names]
    expected = {}
    for name, row in zip(names, in_memory(changes, changes), strict=True):
        others = [names[number] for number in np.argsort(row, kind="stable")]
        expected[name] = sorted([other for other in others if other != name][:16])
    assert nearest(files, start, 16) == expected
    assert nearest(files, start, 19) == {name: sorted({*names} - {name}) for name in names}


def test_few_adapters_are_in_memory(tmp_path) -> None:
    some = adapters(50, 100)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def read(tensors: Tensors) -> Tensors:
        nonlocal most
        alive[:] = [reference for reference in alive if reference() is not None]
        most = max(most, len(alive))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        alive.extend(map(weakref.ref, copies.values()))
        return copies

    rows = PerClient(some).mapped(read).values()
    cosine_distances(rows, rows)
    assert 0 < most <= (FEW + 1) * 100
