"""Batches of requests to one model, which requests join and leave between two tokens.

Each request's prompt is read alone, in chunks. Its keys and values then join the cache of the
batch, padded on the left. The tokens of a request therefore depend on the other requests only
through rounding.

transformers' continuous batching (`generate_batch`, 5.23) was tried first, with a mixture on
SmolLM2-135M and a CPU. It gives the same tokens as `generate`, but at 0.26 of the speed for two
requests, and 16 requests reach only 2.5 times the speed of one request with `generate`. A manager
also runs one model in a thread of its own, while adapters of one base can only be attached in turn.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from coterie.adapters import role_weights

CHUNK = 256
"""The maximum number of prompt tokens that are read between two tokens of the running requests."""


@dataclass(eq=False)
class Row:
    """A sequence: the prompt and the answer so far, with the keys and values of the tokens read."""

    ids: list[int]
    cache: DynamicCache = field(default_factory=DynamicCache)
    read: int = 0
    """The number of tokens that the model has read."""


@dataclass(frozen=True)
class Scored:
    """The model's scores for the next token of each row.

    Attributes:
        logits: The scores, shaped (rows, vocabulary), in float32 on the CPU.
        roles: The routing weight of each role of experts at the last token, shaped (rows,); empty
            unless they were requested.
    """

    logits: Tensor
    roles: dict[str, Tensor]


class Forward:
    """The forward passes of a model with an attached adapter.

    Args:
        model: The model, which is a PEFT model if the adapter is a soft prompt.
        cached: Whether keys and values of a batch can be joined; see `can_join`.
    """

    def __init__(self, model: PreTrainedModel, cached: bool) -> None:
        self.model, self.cached = model, cached
        soft_prompt = getattr(model, "active_peft_config", None)
        self.virtual = 0 if soft_prompt is None else soft_prompt.num_virtual_tokens
        self.base: Any = model.base_model if self.virtual else model
        self.accepted = set(inspect.signature(self.base.forward).parameters)

    def read(self, row: Row, most: int, roles: bool) -> Scored | None:
        """Read the next tokens of a row's prompt.

        Args:
            row: The row, modified in place.
            most: The maximum number of tokens to read.
            roles: Whether to return the weights of the roles of experts.

        Returns:
            The scores after the prompt; None if a part of the prompt is still unread.
        """
        if not self.cached:
            return self.reread(row, roles)
        first, row.read = row.read, min(row.read + most, len(row.ids))
        ids = torch.tensor([row.ids[first : row.read]], device=self.base.device)
        inputs: dict[str, Tensor] = {"input_ids": ids}
        if self.virtual and first == 0:
            model: Any = self.model
            prompt = model.get_prompt(batch_size=1)
            embedded = self.base.get_input_embeddings()(ids)
            inputs = {"inputs_embeds": torch.cat([prompt.to(embedded.dtype), embedded], dim=1)}
        start, end = first and first + self.virtual, row.read + self.virtual
        positions = torch.arange(start, end, device=ids.device)[None]
        scored = self._scored(self._run(row.cache, None, positions, **inputs), roles)
        return scored if row.read == len(row.ids) else None

    def reread(self, row: Row, roles: bool) -> Scored:
        """Read all tokens of a row again, without a cache.

        Args:
            row: The row, modified in place.
            roles: Whether to return the weights of the roles of experts.
        """
        row.read = len(row.ids)
        ids = torch.tensor([row.ids], device=self.model.device)
        return self._scored(self.model(input_ids=ids, use_cache=False), roles)

    def step(self, cache: DynamicCache, rows: Sequence[Row], mask: Tensor, roles: bool) -> Scored:
        """Read the last token of each row of a batch.

        Args:
            cache: The keys and values of the tokens read so far, extended in place.
            rows: The rows.
            mask: The mask of the tokens with the new ones, shaped (rows, time), 0 for padding.
            roles: Whether to return the weights of the roles of experts.
        """
        ids = torch.tensor([row.ids[-1:] for row in rows], device=self.base.device)
        positions = mask.sum(1, keepdim=True) - 1
        padding = mask if len(rows) > 1 else None  # without a mask, a single row takes less time
        with self._kernels(len(rows)):
            return self._scored(self._run(cache, padding, positions, input_ids=ids), roles)

    def _run(
        self, cache: DynamicCache, mask: Tensor | None, positions: Tensor, **inputs: Tensor
    ) -> Any:
        optional = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in optional.items() if name in self.accepted}
        return self.base(
            attention_mask=mask, past_key_values=cache, use_cache=True, **inputs, **options
        )

    def _scored(self, output: Any, roles: bool) -> Scored:
        weights = role_weights(self.model) if roles else {}
        rows = len(output.logits)
        last = {role: w.view(rows, -1)[:, -1].float().cpu() for role, w in weights.items()}
        return Scored(output.logits[:, -1].float().cpu(), last)

    def _kernels(self, rows: int) -> AbstractContextManager[Any]:
        """Choose PyTorch's own kernels for one row in bfloat16 on a CPU.

        oneDNN's kernels take 20 % more time for a single row, and half of the time for four.
        """
        on_cpu = self.base.device.type == "cpu" and self.base.dtype == torch.bfloat16
        return torch.backends.mkldnn.flags(enabled=False) if on_cpu and rows == 1 else nullcontext()


class Batch:
    """The rows of one model whose next tokens are computed together."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def join(self, row: Row) -> None:
        """Add a row whose prompt has been read."""
        length = row.cache.get_seq_length()
        mask = torch.ones(1, length, dtype=torch.long)
        if not self.rows:
            self._cache, self._mask = row.cache, mask
        else:
            longest = max(length, self._mask.shape[1])
            for ours, new in zip(self._cache.layers, row.cache.layers, strict=True):
                for name in ("keys", "values"):
                    tensors = (getattr(ours, name), getattr(new, name))
                    padded = [F.pad(t, (0, 0, longest - t.shape[-2], 0)) for t in tensors]
                    setattr(ours, name, torch.cat(padded))
            masks = (self._mask, mask)
            self._mask = torch.cat([F.pad(m, (longest - m.shape[1], 0)) for m in masks])
        row.cache = DynamicCache()
        self.rows.append(row)

    def keep(self, stays: Callable[[Row], bool]) -> None:
        """Remove the rows that do not stay, and the padding that only they needed."""
        indices = [number for number, row in enumerate(self.rows) if stays(row)]
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in indices]
        if not self.rows:
            self._cache, self._mask = DynamicCache(), self._mask[:0, :0]
            return
        mask = self._mask[indices]
        first = int(mask.any(0).long().argmax())
        self._mask = mask[:, first:]
        layers: Any = self._cache.layers
        for layer in layers:
            layer.keys = layer.keys[indices, :, first:]
            layer.values = layer.values[indices, :, first:]

    def step(self, forward: Forward, roles: bool) -> Scored:
        """Read the last token of each row, and return the scores for the next tokens."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        return forward.step(self._cache, self.rows, self._mask.to(forward.base.device), roles)


@torch.inference_mode()
def can_join(model: PreTrainedModel) -> bool:
    """Return whether rows can join and leave a batch of a base, as a trial with the base shows.

    The logits are compared with those of forward passes without a cache.

    Models with recurrent layers, for example, keep other states than keys and values.

    Args:
        model: The base without an adapter.
    """
    rows = [Row([number % 50 for number in range(first, 4 * first)]) for first in (2, 3)]
    try:
        forward, batch = Forward(model, True), Batch()
        actual: list[Tensor] = []
        expected: list[Tensor] = []
        for row in rows:
            while forward.read(row, 4, False) is None:
                pass
            if not row.cache.layers or any(type(y) is not DynamicLayer for y in row.cache.layers):
                return False
            batch.join(row)
            for member in batch.rows:
                member.ids.append(1)
            actual.append(batch.step(forward, False).logits)
            expected += [forward.reread(member, False).logits for member in batch.rows]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    error = float((torch.cat(actual) - torch.cat(expected)).norm() / torch.cat(expected).norm())
    return error < (1e-3 if model.dtype == torch.float32 else 0.1)
