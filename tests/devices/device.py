"""A device for tests that computes on the CPU and refuses what a GPU refuses.

A tensor on this device wraps a CPU tensor, on which operations are computed. Results are therefore
bit-identical to results on the CPU. As on a GPU, an operation fails if its tensors are on different
devices, or if it uses a random generator of another device. Reading a value on the host would
synchronise a GPU; such reads are counted by the line of Coterie that caused them.

The device uses PyTorch's experimental interface for devices that are written in Python.
"""

import traceback
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

NAME = "testgpu"
"""The type of the device. The run files of tests name the devices cuda:0 and cuda:1, or mps."""
COUNT = 2
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
READS = (
    *("_local_scalar_dense.", "nonzero.", "masked_select.", "equal.", "is_nonzero.", "bincount."),
    *("unique", "_unique", "repeat_interleave.Tensor"),
)
"""Operations that read values on the host, or whose result's size depends on values."""
COMPOSITE = {"silu_backward": aten.silu_backward.default}
"""Operations that PyTorch decomposes on devices that do not implement them."""
IN_BF16 = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""Operations that autocast computes in bf16 on a CPU, and that Coterie's models use."""


@dataclass
class Counts:
    """Transfers between the host and the device."""

    reads: Counter[str] = field(default_factory=Counter)
    """The number of reads of values on the host, by the line that caused them."""
    writes: Counter[str] = field(default_factory=Counter)
    """The number of copies to the device for which the host waits, by line."""


@dataclass
class Rules:
    """Properties of the device that tests change."""

    available: bool = False
    float64: bool = True
    explicit: bool = True
    """Whether the caller named the device of the tensors that an operation creates."""
    counts: Counts | None = None
    """The counts in which transfers are recorded; None to record nothing."""


RULES = Rules()


class DeviceTensor(Tensor):
    """A tensor on the test device, whose values are in a tensor on the host."""

    host: Tensor
    number: int | None
    """The index of the device.

    It is None for a tensor that PyTorch created inside an operation, which may be used on every
    device.
    """

    @staticmethod
    def __new__(
        cls, host: Tensor, index: int | None = None, requires_grad: bool = False
    ) -> "DeviceTensor":
        if isinstance(host, DeviceTensor):  # Accelerate calls the class of a parameter like this
            return nn.Parameter(host, requires_grad)  # pyright: ignore
        if host.dtype == torch.float64 and not RULES.float64:
            raise TypeError(f"The device {NAME} does not support float64.")
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(NAME, 0),  # autograd knows one device of this type
        )
        tensor.host, tensor.number = host, index
        return tensor

    def __init__(
        self, host: Tensor, index: int | None = None, requires_grad: bool = False
    ) -> None: ...

    @property
    def device(self) -> torch.device:  # pyright: ignore
        return torch.device(NAME, self.number or 0)

    def to(self, *args: Any, **named: Any) -> Tensor:
        other = args[0] if args and isinstance(args[0], Tensor) else None
        copy = named.pop("copy", False)
        if other is not None:
            device, dtype, waits = other.device, other.dtype, False
        else:
            device, dtype, waits, _ = torch._C._nn._parse_to(*args, **named)  # pyright: ignore
        if device is None or device.type != NAME or (device.index or 0) == self.number:
            named = {"non_blocking": waits, "copy": copy}
            places: Any = () if device is None or device.type == NAME else (device,)
            return super().to(*places, dtype or self.dtype, **named)  # pyright: ignore
        moved = _Move.apply(self, device.index or 0)
        assert isinstance(moved, Tensor)
        if isinstance(self, nn.Parameter) and not torch.is_grad_enabled():
            moved._is_param = True  # for Accelerate, which moves parameters while it loads a base
        return moved if dtype is None else moved.to(dtype)

    def __repr__(self) -> str:  # pyright: ignore
        return f"{self.device}: {self.host!r}"

    @property
    def data(self) -> Tensor:  # pyright: ignore
        return self.detach()

    @data.setter
    def data(self, value: "DeviceTensor") -> None:  # pyright: ignore
        Tensor.data.__set__(self, value)  # pyright: ignore
        self.host, self.number = value.host, value.number

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        _count_read()
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


class _Move(torch.autograd.Function):
    """A copy from one test device to another one."""

    @staticmethod
    def forward(ctx: Any, tensor: DeviceTensor, index: int) -> Tensor:
        ctx.number = tensor.number
        return DeviceTensor(tensor.host.clone(), index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return DeviceTensor(grads[0].host.clone(), ctx.number), None


class Explicit(TorchFunctionMode):
    """Records whether Coterie or Transformers named the device of a new tensor.

    Tensors that PyTorch creates inside an operation belong to the operation's device. The mode also
    replaces `torch.tensor`, which cannot create tensors on a device written in Python.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, before = kwargs or {}, RULES.explicit
        given = any(isinstance(argument, torch.device | str) for argument in args[1:])
        RULES.explicit = given or kwargs.get("device") is not None
        try:
            if func is torch.tensor and RULES.explicit:
                device = kwargs.pop("device")
                return torch.tensor(*args, **kwargs).to(device)
            return func(*args, **kwargs)
        finally:
            RULES.explicit = before


_CPUGenerator = torch.Generator


class Generator(torch.Generator):
    """A generator whose device may be the test device."""

    devices: ClassVar[dict[int, int]] = {}
    """The index of the test device of each generator, by the generator's address."""
    index: int | None

    def __new__(cls, device: Any = "cpu") -> "Generator":
        device = torch.device(device)
        generator = super().__new__(cls, "cpu" if device.type == NAME else device)  # pyright: ignore
        generator.index = (device.index or 0) if device.type == NAME else None
        if generator.index is not None:
            cls.devices[generator._cdata] = generator.index
            weakref.finalize(generator, cls.devices.pop, generator._cdata)
        return generator

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:  # pyright: ignore
        return super().device if self.index is None else torch.device(NAME, self.index)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU tensors, after the checks that a GPU makes."""
    leaves, spec = tree_flatten((args, kwargs))
    wrapped = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    _check_devices(func, leaves, wrapped)
    _count(func, args, kwargs, target)
    by_id = {id(tensor.host): tensor for tensor in wrapped}
    plain_args, plain_kwargs = tree_unflatten([_on_host(leaf) for leaf in leaves], spec)
    result = func(*plain_args, **plain_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if target is not None and target.type != NAME:
        return result
    index = next((t.number for t in wrapped if t.number is not None), None)
    if target is not None and RULES.explicit:
        index = target.index or 0

    def wrap(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            return tensor
        return by_id[id(tensor)] if id(tensor) in by_id else DeviceTensor(tensor, index)

    return tree_map_only(Tensor, wrap, result)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.host
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == NAME else leaf


def _check_devices(func: Any, leaves: list[Any], wrapped: list[DeviceTensor]) -> None:
    """Raise RuntimeError unless all tensors and generators are on one device.

    As on a GPU, tensors without dimensions, and indices, may be on the CPU.
    """
    if func in COPIES:
        return
    devices = {tensor.number for tensor in wrapped if tensor.number is not None}
    for leaf in leaves:
        if isinstance(leaf, _CPUGenerator):
            index = Generator.devices.get(leaf._cdata)  # pyright: ignore
            if index is None or devices - {index}:
                raise RuntimeError(f"Expected a {NAME!r} device type for generator ({func})")
        elif _is_on_host(leaf) and leaf.dim():
            is_index = "index" in func.__name__ and not leaf.dtype.is_floating_point
            devices |= set() if is_index else {-1}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {sorted(devices)}, where "
            f"-1 is the CPU ({func})"
        )


def _count(func: Any, args: Any, kwargs: dict[str, Any], target: torch.device | None) -> None:
    """Count an operation if the host waits for it."""
    if RULES.counts is None:
        return
    to_host = target is not None and target.type != NAME
    if func is aten.copy_.default:
        to_host, source = not isinstance(args[0], DeviceTensor), args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        source, waits = args[0] if args else None, not kwargs.get("non_blocking", False)
    mask = "index" in func.__name__ and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
        for i in tree_flatten(args[1:])[0]
    )
    if mask or func.__name__.startswith(READS) or (func in COPIES and to_host and waits):
        _count_read()
    elif func in COPIES and source is not None and _is_on_host(source) and source.dim():
        RULES.counts.writes[_line()] += waits or not getattr(source, "pinned", False)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DeviceTensor)


def _count_read() -> None:
    if RULES.counts is not None:
        RULES.counts.reads[_line()] += 1


def _line() -> str:
    """Return the innermost line of Coterie on the stack, with its function."""
    for frame in reversed(traceback.extract_stack()):
        if "/coterie/" in frame.filename:
            return f"{frame.filename.partition('/coterie/')[2]}:{frame.lineno} {frame.name}"
    return "elsewhere"
