"""The test device, and small runs on it."""

from collections.abc import Iterator
from typing import Any

import placed
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

if placed.SUPPORTED:
    placed.register()


@pytest.fixture(autouse=True)
def _supported() -> None:
    if not placed.SUPPORTED:
        pytest.skip("PyTorch is before 2.10 or uses a GPU, and cannot have a test device")


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """Compute attention with plain matrix products, as the test device does.

    On a CPU, PyTorch otherwise uses a fused kernel, whose rounding differs.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(params=placed.PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A value of the key `device` that refers to one or two test devices."""
    with placed.using(monkeypatch, float64=request.param != "mps"):
        yield placed.PLACES[request.param]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The value of the key `device` that refers to one test device."""
    with placed.using(monkeypatch):
        yield "cuda"
