"""The costs of a run on a client's machine, and limits that apply whatever the client agreed to.

Users who agree to a run see its settings but need not know what their machine can handle. Each
limit is far above any useful value.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import load_skeleton
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.memory import main_memory

LIMITS: dict[str, int] = {
    "threads": max(64, os.cpu_count() or 1),
    "rounds": 100_000,
    "training.steps": 1_000_000,
    "training.batch": 65_536,
    "training.micro_batch": 65_536,
    "data.window": 2**20,
    "evaluation.batch": 65_536,
}
"""The highest accepted value of each setting; the keys are dotted keys of the run file."""
MAX_TOKENS = 2**24
"""The highest accepted number of tokens in one forward pass of training or evaluation."""
MAX_STEPS = 10**8
"""The highest accepted number of training steps in a run."""
MAX_DISK = 32 * 2**30
"""The highest accepted size of a client's run folders in one --out folder, in bytes."""
MAX_OTHER = 10**6
"""The highest accepted value of a numeric setting that `LIMITS` does not list."""
UNLIMITED = ("seed", "deployment.", "base.", "data.limits")
"""Prefixes of the keys of settings without a limit.

These settings cost a client nothing, or limit how much of the client's own text is used.
"""
WIDTHS = ("rank", "virtual_tokens", "encoder_hidden_size", "experts", "max_experts")
"""Settings of methods that determine how large an adapter is, and how much memory it needs."""
MIN_WIDTH = 64
"""The width up to which adapters are always accepted, even if the base is narrower."""
REMEDY = "ask the server's operator for a run that this machine can handle"


def machine_memory() -> int:
    """Return the size of the main memory or the largest GPU's memory, whichever is larger.

    The size is in bytes.
    """
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return max(
        main_memory(), *(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), 0
    )


def too_costly(config: RunConfig) -> str | None:
    """Return a message about a setting that makes a run too large for this machine.

    The message is the predicate of a sentence whose subject is "the run". If there is no such
    setting, the result is None.
    """
    for key, value in _numbers(config.visible_to("")):
        limit = LIMITS.get(key, MAX_OTHER)
        if value > limit and not key.startswith(UNLIMITED):
            return f"sets {key} to {value:,}, but at most {limit:,} is accepted; {REMEDY}"
    training = config.training
    if (total := training.steps * config.exchanges) > MAX_STEPS:
        return f"takes {total:,} training steps, but at most {MAX_STEPS:,} are accepted; {REMEDY}"
    tokens = max(training.micro_batch or training.batch, config.evaluation.batch)
    tokens *= config.data.window
    if tokens > MAX_TOKENS:
        return (
            f"reads {tokens:,} tokens at once (batch times data.window), but at most "
            f"{MAX_TOKENS:,} are accepted; {REMEDY}"
        )
    try:
        skeleton = load_skeleton(config.base, config.root)
    except CoterieError:  # loading the base reports the error
        return None
    if reason := _too_wide(config, skeleton):
        return reason
    # A lower bound: the hidden states of one layer for a batch, in 16 bits.
    needed, available = 2 * tokens * _embedding(skeleton).shape[1], machine_memory()
    if needed > available:
        return (
            f"needs at least {needed / 1e9:,.1f} GB of memory for the hidden states of a batch, "
            f"but this machine has {available / 1e9:,.1f} GB (see training.batch, evaluation.batch "
            f"and data.window); {REMEDY}"
        )
    return None


def _too_wide(config: RunConfig, skeleton: PreTrainedModel) -> str | None:
    """Return a message if an adapter's rank or width exceeds the width of the base's widest layer.

    Otherwise, return None.
    """
    ranks = {
        key: value
        for key, value in _numbers(config.method.described())
        if key.rpartition(".")[2] in WIDTHS or "ranks" in key
    }
    if not ranks or max(ranks.values()) <= MIN_WIDTH:
        return None
    vocabulary = _embedding(skeleton).shape[0]
    matrices = (p for p in skeleton.parameters() if p.ndim > 1)
    widest = max((n for p in matrices for n in p.shape if n != vocabulary), default=MIN_WIDTH)
    for key, value in ranks.items():
        if value > widest:
            return (
                f"sets method.{key} to {value:,}, which is larger than the width of the widest "
                f"layer of {config.base} ({widest:,}); {REMEDY}"
            )
    return None


def _embedding(skeleton: PreTrainedModel) -> Tensor:
    """Return the weight of a model's token embedding, shaped (vocabulary, width)."""
    weight = skeleton.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _numbers(
    values: Mapping[str, Any] | list[Any], prefix: str = ""
) -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of every number in nested settings."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in pairs:
        if isinstance(value, Mapping | list):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
