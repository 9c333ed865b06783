"""The benchmark of FedAMoLE's table 4: its bytes on the paper's shape, by hand."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PAIR = 8 * (2048 + 2048) + 8 * (2048 + 512)
"""Values of LoRA pairs of rank 8 on a query and a value layer of Llama-3.2-1B."""


@pytest.fixture
def round_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("round_cost", FOLDER / "round_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "round_cost", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["FedIT-FT", "FDLoRA", "FedAMoLE, 15 experts", "FedAMoLE, 30 experts"]
)
def test_uploads_are_the_papers_but_for_its_packing(round_cost, row) -> None:
    """16 layers in bf16. FedAMoLE: E k_c / C domain experts and a shared one, two routers, and
    the mean embeddings of the experts and the tokens."""
    method, (_, up, *_) = round_cost.LLAMA[row]
    values = PAIR
    if "experts" in method:
        held = method["experts"] * 2 / 10
        values = (held + 1) * PAIR + 2 * 8 * 2048 + 2 * 8 * (held + 1)
    expected = 16 * values * 2 / 2**20
    found = round_cost.by_shape({"name": "fedamole", **method})
    assert found == pytest.approx(expected)
    assert found == pytest.approx(up, rel=0.015)
    assert found < up


def test_work_inside_other_work_counts_once(round_cost, monkeypatch) -> None:
    ticks = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(round_cost, "now", lambda: next(ticks))

    class Worker:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None: ...

    worker, clock = Worker(), round_cost.Clock()
    clock.time(worker, "outer", "rest")
    clock.time(worker, "inner", "train")
    worker.outer()
    assert clock.seconds == {"train": 3.0, "rest": 3.0}
