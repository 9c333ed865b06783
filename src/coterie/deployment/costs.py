"""What a run costs a client's machine, and the bounds that no agreement lifts.

Somebody who agrees to a run reads its costs, but need not know what a machine can handle. Each
bound is far above any useful value.
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

MOST: dict[str, int] = {
    "threads": max(64, os.cpu_count() or 1),
    "rounds": 100_000,
    "training.steps": 1_000_000,
    "training.batch": 65_536,
    "training.micro_batch": 65_536,
    "data.window": 2**20,
    "evaluation.batch": 65_536,
}
"""The highest value of a setting, by its key."""
TOKENS_AT_ONCE = 2**24
"""Tokens in one pass of a training step or of an evaluation."""
STEPS = 10**8
"""Training steps of a whole run."""
MAX_DISK = 32 * 2**30
"""Bytes of all run folders of a client in one --out folder."""
MOST_OF_OTHERS = 10**6
"""The highest number in the method's settings and in the rest of training and evaluation."""
FREE = ("seed", "deployment.", "base.", "data.limits")
"""How keys begin of what costs a client nothing, or says how much of its own text is read."""
WIDTHS = ("rank", "virtual_tokens", "encoder_hidden_size", "experts", "max_experts")
"""Settings of methods that memory grows with."""
ALWAYS = 64
"""A width that is not compared with the base's."""
REMEDY = "ask the server's operator for a run that this machine can handle"


def machine_memory() -> int:
    """Return the bytes of this machine's memory, or of its largest GPU's where that is more."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(own, *(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), 0)


def too_costly(config: RunConfig) -> str | None:
    """Return which setting of a run no machine like this one can handle; None if there is none."""
    for key, value in _numbers(config.visible_to("")):
        most = MOST.get(key, MOST_OF_OTHERS)
        if value > most and not key.startswith(FREE):
            return f"sets {key} to {value:,}, where at most {most:,} is accepted; {REMEDY}"
    training = config.training
    if (total := training.steps * config.exchanges) > STEPS:
        return f"takes {total:,} training steps, where at most {STEPS:,} are accepted; {REMEDY}"
    at_once = max(training.micro_batch or training.batch, config.evaluation.batch)
    at_once *= config.data.window
    if at_once > TOKENS_AT_ONCE:
        return (
            f"reads {at_once:,} tokens at once (batch times data.window), where at most "
            f"{TOKENS_AT_ONCE:,} are accepted; {REMEDY}"
        )
    try:
        skeleton = load_skeleton(config.base, config.root)
    except CoterieError:  # of the base, whose error comes when the run is joined
        return None
    if why := _too_wide(config, skeleton):
        return why
    # The least that a pass takes: one layer's hidden states of a batch, in 16 bits.
    least, has = 2 * at_once * _embedding(skeleton).shape[1], machine_memory()
    if least > has:
        return (
            f"takes at least {least / 1e9:,.1f} GB of memory for the hidden states of a batch "
            f"(batch, evaluation.batch, data.window), where this machine has {has / 1e9:,.1f} GB; "
            f"{REMEDY}"
        )
    return None


def _too_wide(config: RunConfig, skeleton: PreTrainedModel) -> str | None:
    """Return which rank or width of an adapter exceeds the widest layer of the base."""
    ranks = {
        key: value
        for key, value in _numbers(config.method.described())
        if key.rpartition(".")[2] in WIDTHS or "ranks" in key
    }
    if not ranks or max(ranks.values()) <= ALWAYS:
        return None
    vocabulary = _embedding(skeleton).shape[0]
    inner = (p for p in skeleton.parameters() if p.ndim > 1)
    widest = max((n for p in inner for n in p.shape if n != vocabulary), default=ALWAYS)
    for key, value in ranks.items():
        if value > widest:
            return (
                f"sets method.{key} to {value:,}, more than the widest layer of {config.base} has "
                f"({widest:,}); {REMEDY}"
            )
    return None


def _embedding(skeleton: PreTrainedModel) -> Tensor:
    """Return the weight of a model's token embedding, shaped (vocabulary, width)."""
    weight = skeleton.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _numbers(values: Mapping[str, Any] | list[Any], above: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested settings, by their dotted keys."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in pairs:
        if isinstance(value, Mapping | list):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{key}", value
