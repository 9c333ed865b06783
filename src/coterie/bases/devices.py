"""Where a base is computed: on the CPU, on a GPU, or spread over several GPUs."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from coterie.errors import CoterieError

Device = str | tuple[str, ...]
"""As a run file says it: auto, cpu, cuda, cuda:N, mps, or several of cuda:N."""
Placement = dict[str, torch.device]
"""The device of each part of a base, by its path; "" is the whole."""


def devices_of(device: Device) -> list[torch.device]:
    """The devices that a run file's `device` names.

    Raises CoterieError for one that this machine has not.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [_found(name) for name in ([device] if isinstance(device, str) else device)]


def names_of(device: Device) -> str:
    """What a run folder records of the devices that are meant here."""
    return ", ".join(str(one) for one in devices_of(device))


def available(device: Device) -> Device:
    """The same device, or auto where this machine has none such."""
    try:
        devices_of(device)
    except CoterieError:
        return "auto"
    return device


def _found(name: str) -> torch.device:
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = {0: "no GPU that PyTorch can use", 1: "1 GPU"}.get(count, f"{count} GPUs")
        raise CoterieError(f"There is no {name} here ({there}); set `device` to another, or auto.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise CoterieError("There is no mps here (the GPU of a Mac); set `device` to auto.")
    return device


def placement(skeleton: nn.Module, devices: Sequence[torch.device]) -> Placement:
    """A base's parts on several devices: its layers in their order, about as much on each.

    skeleton: the base, perhaps of meta tensors. An output head that is tied to the embedding is
    where that is.
    """
    whole = getattr(skeleton, "_no_split_modules", None) or ()
    sizes = {id(p): p.nbytes for p in skeleton.parameters()}
    total, done = sum(sizes.values()), 0
    places: Placement = {}
    first: dict[int, torch.device] = {}
    for path, part in _parts(skeleton, whole):
        own = [id(parameter) for parameter in part.parameters()]
        tied = next((first[key] for key in own if key in first), None)
        number = min(len(devices) * done // total, len(devices) - 1)
        places[path] = tied or devices[number]
        done += sum(sizes[key] for key in own if key not in first)
        first |= dict.fromkeys(own, places[path])
    return places


def _parts(
    module: nn.Module, whole: Collection[str], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """What a base is made of, by path: modules of the classes `whole`, and what is around them."""
    children = list(module.named_children())
    if type(module).__name__ in whole or not children or list(module.parameters(recurse=False)):
        yield path, module
        return
    for name, child in children:
        yield from _parts(child, whole, f"{path}.{name}" if path else name)
