"""Runs on this machine's GPU match runs on its CPU, up to rounding."""

import math
from typing import Any

import pytest
import torch
from every_method import METHODS, run_of
from test_runs import DATA, TRAINING, _fixed, make  # noqa: F401

import coterie
from coterie.config.run import RunConfig
from coterie.messages.names import LOSS
from coterie.runs import RunFolder

GPU = "cuda"
TOLERANCE = 2e-3
"""Maximum relative difference between losses. Rounding grows from step to step."""
RANDOM = {"dropout, pieces", "checkpointing"}
"""Runs with dropout, whose draws differ between devices."""


@pytest.fixture(autouse=True)
def _supported() -> None:
    """Replace the condition of the tests on the test device."""
    if not torch.cuda.is_available():
        pytest.skip("runs on a GPU only, with TEST_GPU=1")


def losses(run: RunConfig, device: str, out: Any) -> list[tuple[Any, ...]]:
    """Execute a run on a device, and return its training losses."""
    done = coterie.run(run.model_copy(update={"device": device}), out=out)
    lines = [line for line in RunFolder(done.path).metrics() if line["name"].startswith(LOSS)]
    return [(line["client"], line["round"], line["name"], line["value"]) for line in lines]


def compare(run: RunConfig, folder: Any, exact: bool = True) -> None:
    """Check that the losses of a run on the GPU are those of the CPU."""
    expected, actual = losses(run, "cpu", folder / "cpu"), losses(run, GPU, folder / "gpu")
    assert [line[:-1] for line in actual] == [line[:-1] for line in expected]
    for (*place, loss), (*_, reference) in zip(actual, expected, strict=True):
        close = math.isclose(loss, reference, rel_tol=TOLERANCE if exact else 0.2)
        assert close, (place, loss, reference)


@pytest.mark.parametrize("name", METHODS)
def test_a_method(name, values, teachers, tmp_path) -> None:
    changes = {"training": {"steps": 2, "batch": 2, "precision": "fp32"}}
    rounds = 4 if name == "auto" else 2
    compare(run_of(METHODS[name], values, teachers, rounds=rounds, **changes), tmp_path)


@pytest.mark.parametrize("name", [*DATA, *TRAINING])
def test_data_and_training(name, make, tmp_path) -> None:  # noqa: F811
    compare(make(name), tmp_path, exact=name not in RANDOM)
