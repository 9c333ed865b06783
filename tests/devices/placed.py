"""The registration of the test device, and a context in which run files can use it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from device import COMPOSITE, COUNT, IN_BF16, NAME, RULES, Counts, Explicit, Generator, aten, run
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

import coterie.bases.devices
from coterie.losses.tokens import PIECE_COST

PLACES: dict[str, Any] = {"one device": "cuda", "two devices": ("cuda:0", "cuda:1"), "mps": "mps"}
"""Values of the key `device` of a run file; `mps` stands for a device without float64."""
SUPPORTED = (
    hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    and not torch.cuda.is_available()
)
"""Whether the test device can be registered: PyTorch is 2.10 or later, and does not use a GPU.

With the test device, PyTorch would pin no memory for a GPU.
"""


class _Module:
    """The module of the test device, which corresponds to `torch.cuda`."""

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def is_available(self) -> bool:
        return RULES.available

    def device_count(self) -> int:
        return COUNT

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None: ...

    def set_device(self, device: Any) -> None: ...

    def empty_cache(self) -> None: ...


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the device once per process, before the first backward pass.

    In the first backward pass, PyTorch starts a thread for each registered device.
    """
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run_op, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    operations = torch.library.Library("aten", "IMPL")
    for name, op in COMPOSITE.items():
        operations.impl(name, partial(_run_op, op), "PrivateUse1")
    for name in IN_BF16:
        operations.impl(name, _in_bf16(getattr(aten, name).default), "AutocastPrivateUse1")
    _libraries.extend((everything, operations))


def _run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    return run(op, args, kwargs)


def _in_bf16(op: Any) -> Callable[..., Any]:
    """Return an operation that casts floating-point tensors to autocast's dtype first."""

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(torch.get_autocast_dtype(NAME)) if eligible else tensor

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        with torch.autocast(NAME, enabled=False):
            return op(*args, **kwargs)

    return cast_and_run


@contextmanager
def using(patch: pytest.MonkeyPatch, *, float64: bool = True) -> Iterator[None]:
    """Use the test device for the names cuda, cuda:0, cuda:1 and mps in run files.

    Args:
        patch: The fixture `monkeypatch`.
        float64: Whether the device supports float64.
    """

    def device(name: str) -> torch.device:
        kind, _, index = name.partition(":")
        return torch.device(kind) if kind == "cpu" else torch.device(NAME, int(index or 0))

    def pinned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.pinned = True  # pyright: ignore
        return copy

    with patch.context() as inner:
        inner.setattr(coterie.bases.devices, "_device", device)
        inner.setattr(torch, "Generator", Generator)
        inner.setattr(Tensor, "pin_memory", pinned)
        # Padding may change the last bits of a product, so batches are split as on the CPU.
        inner.setitem(PIECE_COST, NAME, PIECE_COST["cpu"])
        inner.setattr(RULES, "available", True)
        inner.setattr(RULES, "float64", float64)
        with Explicit():
            yield


@contextmanager
def counting() -> Iterator[Counts]:
    """Count transfers between the host and the device."""
    RULES.counts = counts = Counts()
    try:
        yield counts
    finally:
        RULES.counts = None
