"""Copies of tensors from a device to the host (the CPU), in as few transfers as possible.

Each transfer has a fixed cost, and waits until the GPU has finished all pending work. Tensors are
therefore copied together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

AT_ONCE = 2**28
"""The maximum size of a transfer in bytes, unless a single tensor is larger.

Tensors are concatenated before they are copied, which needs as much memory on the device.
"""


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached tensors on the CPU, under the same names.

    Tensors that are already on the CPU are not copied. All other tensors are copied in one transfer
    for each device and dtype, or in several if one would exceed `AT_ONCE` bytes.
    """
    return dict(zip(tensors, copied_to_host(list(tensors.values())), strict=True))


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return detached tensors on the CPU, in the same order; see `on_host`."""
    results = [tensor.detach() for tensor in tensors]
    for numbers in _transfers(results):
        joined = torch.cat([results[n].flatten() for n in numbers]).cpu()
        parts = joined.split([results[n].numel() for n in numbers])
        for n, part in zip(numbers, parts, strict=True):
            results[n] = part.view(results[n].shape)
    return results


def _transfers(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield, for each transfer, the numbers of the tensors that it copies."""
    waiting: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            continue
        kind = tensor.device, tensor.dtype
        numbers = waiting.get(kind, [])
        if numbers and sum(tensors[n].nbytes for n in numbers) + tensor.nbytes > AT_ONCE:
            yield waiting.pop(kind)
        waiting.setdefault(kind, []).append(number)
    yield from waiting.values()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors of any dtype contain only finite numbers.

    Each device is synchronised once.
    """
    finite: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():  # torch cannot compute with some shapes of empty tensors
            # torch.isfinite supports only some 8-bit floats; float32 represents all of them.
            narrow = tensor.is_floating_point() and tensor.itemsize == 1
            wide = tensor.detach().float() if narrow else tensor.detach()
            finite.setdefault(tensor.device, []).append(torch.isfinite(wide).all())
    return all(bool(torch.stack(results).all()) for results in finite.values())
