"""States on disk: what is written is what is read, also after gaps are closed or writes fail."""

import errno
import os
from typing import Any

import pytest
import torch

from coterie.errors import Unwritable
from coterie.messages import State
from coterie.runs import RunFolder
from coterie.runs.store import Store, Stored


def state(number: int, size: int = 500) -> State:
    return State({"g": {"t": torch.full((size,), float(number))}})


def numbers(kept: dict[int, Stored]) -> dict[int, float]:
    return {number: stored.load()["g"]["t"].unique().item() for number, stored in kept.items()}


def test_space_of_deleted_states_is_used_again(tmp_path) -> None:
    store = Store(tmp_path)
    kept = {number: store.put(state(number)) for number in range(4)}
    largest = 0
    for number in range(4, 60):
        kept[number] = store.put(state(number))
        del kept[min(kept)]
        largest = max(largest, os.fstat(store._file.fileno()).st_size)
    assert numbers(kept) == {number: float(number) for number in kept}
    assert largest <= 3 * 6 * len(state(0).encode())
    assert not [*tmp_path.iterdir()]  # a kill leaves nothing


def put_many(store: Store) -> None:
    for number in range(40):
        store.put(state(number, 10))


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_failed_write_changes_no_other_state(fails_at, tmp_path, monkeypatch) -> None:
    store, write = Store(tmp_path), os.pwrite
    kept = {number: store.put(state(number, 50 * (number + 1))) for number in range(12)}
    for number in (0, 1, 2, 3, 5, 6, 8, 9):
        del kept[number]
    calls = 0

    def full(descriptor: int, data: Any, start: int) -> int:
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2 + 1], start)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(Unwritable, match="No space left on device"):
            put_many(store)
    assert numbers(kept) == {number: float(number) for number in kept}
    kept[99] = store.put(state(99))
    assert numbers(kept) == {number: float(number) for number in kept}


def test_an_unchanged_state_is_linked_and_a_changed_one_is_written(tmp_path) -> None:
    folder, store = RunFolder(tmp_path / "run"), Store(tmp_path)
    x, y, z = (store.put(state(number)) for number in range(3))
    folder.save(1, [("p.0", x), ("p.1", y), ("q.0", y)])
    folder.save(1, [("p-b", x), ("p.0", y), ("q.0", y), ("r", z)])
    names = ("p-b", "p.0", "q.0", "r")
    first_numbers = {name: folder.load(name)["g"]["t"][0].item() for name in names}
    assert first_numbers == {"p-b": 0, "p.0": 1, "q.0": 1, "r": 2}
    before = (folder.checkpoint(1) / "r.safetensors").stat().st_ino
    folder.save(2, [("r", z), ("s", store.put(state(3)))])
    assert (folder.checkpoint(2) / "r.safetensors").stat().st_ino == before
    assert folder.load("s")["g"]["t"][0] == 3
    folder.drop(folder.checkpoints())
    folder.save(3, [("r", z)])  # no checkpoint contains it any more
    assert folder.load("r")["g"]["t"][0] == 2
