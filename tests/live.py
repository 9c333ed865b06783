"""The bytes of live tensors, which the tests compare with the formulas of `coterie.analysis`."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensors that are created while the mode is active.

    `now` is the number of bytes of the created tensors that are still live. `peak` is the largest
    value of `now` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the bytes of the storages that the operation allocates."""
        outputs = func(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(outputs):
            key = storage._cdata
            if key not in inputs and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._release, key).atexit = False
        return outputs

    def _release(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
