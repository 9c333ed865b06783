"""Runs of every kind of adapter, to load models from, and what these should write."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import coterie
from coterie.bases import load_base

METHODS: dict[str, dict[str, Any]] = {
    "comigs-1g1s": {},
    "three experts": {
        "name": "comigs-1g1s",
        "exact": True,
        "mlp": {"specialists": {"poet": 2, "others": 1}},
    },
    "fedamole": {"experts": 6},
    "vanilla": {
        "name": "fedamole",
        "experts": 6,
        "assignment": "random",
        "router": {"kind": "vanilla"},
    },
    "local": {},
    "one set": {"name": "fedavg", "exact": True, "mlp": {"sets": 1}},
    "fedit": {},
    "fedprompt": {"virtual_tokens": 5},
    "fedptuning": {"virtual_tokens": 5},
}
MERGED = {"one set", "fedit"}
PROMPTS = {"fedprompt", "fedptuning"}
IDS = torch.tensor([[5, 9, 33, 71, 20, 6, 41], [7, 3, 8, 100, 60, 2, 17]])
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1}
GREEDY |= {"eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Finished:
    """A run whose poet has moved far from the base."""

    method: str
    base: str
    path: Path

    @property
    def merged(self) -> bool:
        return self.method in MERGED

    @property
    def prompt(self) -> bool:
        return self.method in PROMPTS

    def load(self) -> Any:
        """Load the poet's model anew."""
        return coterie.load(self.path, "poet")

    def plain(self) -> PreTrainedModel:
        """Load the base without Coterie."""
        return load_base(self.base, "fp32", 16).model

    @cached_property
    def words(self) -> Any:
        return coterie.tokenizer(self.path)

    @cached_property
    def logits(self) -> Tensor:
        """The logits of IDS without those of a soft prompt, of shape (2, 7, vocabulary)."""
        return logits(self.load())

    @cached_property
    def change(self) -> float:
        """The mean absolute change of a logit by the adapter."""
        return (self.logits - logits(self.plain())).abs().mean().item()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits[:, -ids.shape[1] :].float()


@torch.no_grad()
def greedy(model: Any, ids: Tensor, count: int) -> Tensor:
    """Append the likeliest tokens to `ids`, without a cache."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.no_grad()
def beam(model: Any, ids: list[int], width: int, count: int) -> list[int]:
    """Return the best sequence of a beam search without a cache."""
    kept = [(0.0, ids)]
    for _ in range(count):
        candidates = []
        for score, tokens in kept:
            best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(width)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates += [(score + value, [*tokens, token]) for value, token in pairs]
        kept = sorted(candidates, reverse=True)[:width]
    return kept[0][1]


def generated(model: Any, ids: Tensor, count: int, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {**GREEDY, "max_new_tokens": count, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **options)
