"""The padding mask of a batch, for statistics over tokens: routing weights and mean embeddings.

Samples are padded at the end, and in causal attention no token attends to later tokens. Therefore,
only sums over tokens have to exclude padding. Models do not pass a mask to their linear layers, so
the mask is set in a context around the forward pass.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.bases.devices import moved
from coterie.scoped import scoped


class _Pass(NamedTuple):
    """The padding mask of a forward pass, and the pass's relation to the previous forward pass.

    One batch can be processed in several forward passes. If `goes_on` is true, this pass processes
    further samples of the same batch as the previous pass. If `repeats` is true, this pass
    recomputes an earlier pass, as gradient checkpointing does.
    """

    copies: dict[tuple[str, torch.device], Tensor]
    """Copies of the mask, and of the indices of its True elements, on the devices of the layers."""
    mask: Tensor | None = None
    goes_on: bool = False
    repeats: bool = False

    def copied(self, kind: str, device: torch.device) -> Tensor:
        """Return the mask, or the indices of the True elements of the flattened mask, on a device.

        Args:
            kind: "mask", or "numbers" for the indices.
            device: The device.
        """
        assert self.mask is not None
        if (kind, device) not in self.copies:
            tensor = self.mask if kind == "mask" else self.mask.flatten().nonzero()[:, 0]
            self.copies[kind, device] = moved(tensor, device)
        return self.copies[kind, device]


NO_PADDING = _Pass({})
_now: ContextVar[_Pass] = ContextVar("now", default=NO_PADDING)


def real_tokens(mask: Tensor | None, goes_on: bool = False) -> AbstractContextManager[None]:
    """Set the padding mask of forward passes inside the `with` block.

    Args:
        mask: (batch, time) bool, False for padding, on the CPU. None if there is no padding.
        goes_on: Whether the forward passes process further samples of the previous pass's batch.
            If true, a module that stores one row of values for each token of a batch appends its
            new rows to the rows from the batch's previous passes; see `collected`.
    """
    return scoped(_now, _now.get()._replace(mask=mask, goes_on=goes_on, copies={}))


def repeating_batch() -> AbstractContextManager[None]:
    """Return a context in which a forward pass is repeated with the current mask.

    Modules do not include the repeated pass in their statistics. Gradient checkpointing recomputes
    forward passes in this context.
    """
    return scoped(_now, _now.get()._replace(goes_on=False, repeats=True))


def real_mask(device: torch.device) -> Tensor | None:
    """Return the current padding mask on a given device.

    Returns:
        A bool tensor shaped (batch, time), False for padding. None if there is no padding.
    """
    now = _now.get()
    return None if now.mask is None else now.copied("mask", device)


def only_real(rows: Tensor) -> Tensor:
    """Select the rows of a (batch * time, ...) tensor that are not padding."""
    now = _now.get()
    return rows if now.mask is None else rows[now.copied("numbers", rows.device)]


def collected(before: Tensor | None, now: Tensor) -> Tensor:
    """Return the rows that a module stores for its current batch.

    Args:
        before: Rows stored so far; None if no rows are stored.
        now: Rows of the current forward pass. If the pass reads further samples of the batch, these
            rows are appended to `before`. If the pass recomputes the previous pass for gradient
            checkpointing, these rows are ignored, because `before` already contains them. In any
            other case, the pass begins a new batch, and these rows replace `before`.
    """
    if before is None:
        return now
    if _now.get().repeats:
        return before
    return torch.cat([before, now]) if _now.get().goes_on else now
