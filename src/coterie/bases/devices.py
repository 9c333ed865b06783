"""Devices of a base: the CPU, one GPU, or several GPUs."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.memory import main_memory

Device = str | tuple[str, ...]
"""The key `device` of a run file: auto, cpu, cuda, cuda:N, mps, or a tuple of several cuda:N."""
Placement = dict[str, torch.device]
"""A mapping from the paths of a base's modules to devices. The path "" is the whole base."""


def devices_of(device: Device) -> list[torch.device]:
    """Return the devices that are specified by the key `device` of a run file.

    Raises:
        CoterieError: This machine lacks one of the devices.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [_device(name) for name in ([device] if isinstance(device, str) else device)]


def device_type(device: Device) -> str:
    """Return the type of a run's device, such as `cuda`, even if this machine lacks the device."""
    if device == "auto":
        return devices_of(device)[0].type
    return (device if isinstance(device, str) else device[0]).partition(":")[0]


def memory_of(kind: str) -> int:
    """Return the memory in bytes of this machine's first device of a type, such as `cuda`."""
    return torch.cuda.mem_get_info(0)[1] if kind == "cuda" else main_memory()


def names_of(device: Device) -> str:
    """Format the names of a run's devices for the run folder.

    If the key `device` is auto, the result is the name of the device that auto selects.
    """
    return ", ".join(map(str, devices_of(device)))


def available(device: Device) -> Device:
    """Return the `device` of a run file unchanged, or `auto` if this machine lacks the device."""
    try:
        devices_of(device)
    except CoterieError:
        return "auto"
    return device


def _device(name: str) -> torch.device:
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        gpus = {0: "no CUDA GPU", 1: "only 1 CUDA GPU"}.get(count, f"only {count} CUDA GPUs")
        raise CoterieError(
            f"The device {name!r} is not available: PyTorch finds {gpus} on this machine; set "
            "`device` to another device, or to auto."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise CoterieError(
            "The device 'mps' (a Mac's GPU) is not available on this machine; set `device` to auto."
        )
    return device


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. A copy from the CPU to a GPU is asynchronous."""
    if tensor.device.type == "cpu" and device.type not in ("cpu", "mps"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_memory(subject: str, size: int, devices: Sequence[torch.device], remedies: str) -> None:
    """Refuse weights that are larger than the memory of their GPUs.

    On a CPU, the weights may be larger than the memory, because files are mapped into memory.

    Args:
        subject: The name of the weights, with which the error message begins.
        size: The size of the weights in bytes.
        devices: The devices between which the weights are divided.
        remedies: The settings that the error message suggests.

    Raises:
        CoterieError: The weights are larger than the total memory of the devices.
    """
    if devices[0].type == "cpu":
        return
    total, remark = main_memory(), ""  # a Mac's GPU uses the main memory
    if devices[0].type == "cuda":
        free, total = map(sum, zip(*map(torch.cuda.mem_get_info, devices), strict=True))
        remark = f", of which {free / 1e9:,.1f} GB are free"
    if size > total:
        raise CoterieError(
            f"{subject} needs at least {size / 1e9:,.1f} GB for its weights, but the memory of "
            f"{', '.join(map(str, devices))} has {total / 1e9:,.1f} GB{remark}; set {remedies}."
        )


def placement(skeleton: nn.Module, devices: Sequence[torch.device]) -> Placement:
    """Assign a base's modules to devices.

    The first modules of the base are assigned to the first device, the next modules to the second
    device, and so on. Each device gets roughly the same number of bytes. An output head that is
    tied to the embedding is placed on the embedding's device.

    Args:
        skeleton: The base; its tensors may be on the meta device.
        devices: At least one device.
    """
    unsplit = getattr(skeleton, "_no_split_modules", None) or ()
    sizes = {id(p): p.nbytes for p in skeleton.parameters()}
    total, placed = sum(sizes.values()), 0
    places: Placement = {}
    device_of: dict[int, torch.device] = {}
    for path, module in _modules(skeleton, unsplit):
        keys = [id(parameter) for parameter in module.parameters()]
        tied = next((device_of[key] for key in keys if key in device_of), None)
        number = min(len(devices) * placed // total, len(devices) - 1)
        places[path] = tied or devices[number]
        placed += sum(sizes[key] for key in keys if key not in device_of)
        device_of |= dict.fromkeys(keys, places[path])
    return places


def _modules(
    module: nn.Module, unsplit: Collection[str], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that must stay on one device as a whole, with the module's path.

    A module must stay on one device if its class is in `unsplit`, if it has no children, or if it
    has parameters that do not belong to a child.
    """
    children = list(module.named_children())
    if type(module).__name__ in unsplit or not children or list(module.parameters(recurse=False)):
        yield path, module
        return
    for name, child in children:
        yield from _modules(child, unsplit, f"{path}.{name}" if path else name)
