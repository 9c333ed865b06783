"""Runs whose clients keep models of different rounds, and the slow way to tell which is best."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.data.examples import Examples
from coterie.data.split import Split
from coterie.runs import RunFolder

HIGH: dict[str, Any] = {"steps": 2, "batch": 2, "precision": "fp32"}
HIGH |= {"learning_rate": 30.0, "learning_rate_decay": 1.0}
"""Training with which rounds are good and bad in turn."""


def naive_loss(base: Base, model, text: Split, window: int) -> float:
    """Return the mean loss of all predicted tokens, computed one window or sample at a time."""
    losses = []
    if isinstance(text, Examples):
        for n in range(len(text)):
            start, answer, end = text.starts[n], text.answers[n], text.starts[n + 1]
            losses.append(_losses(model, text.ids[start:end].long()[None])[answer - start - 1 :])
        return torch.cat(losses).mean().item()
    stream = torch.cat([torch.tensor([base.context_token]), text.ids]).long()
    for start in range(0, len(text.ids), window):
        losses.append(_losses(model, stream[None, start : start + window + 1]))
    return torch.cat(losses).mean().item()


def naive_order(base: Base, model, text: Split, window: int) -> tuple[float, float]:
    """Return what models are ranked by, lower is better.

    The first value is minus the share of samples whose answer is likelier per token than all other
    choices, 0 for a text; the second one is the loss.
    """
    loss = naive_loss(base, model, text, window)
    if not isinstance(text, Examples):
        return 0.0, loss
    right, asked = 0, 0
    for n, item in enumerate(text.instructions):
        start, end, answer = int(text.starts[n]), int(text.starts[n + 1]), int(text.answers[n])
        prompt = text.ids[start:answer].long()
        own = _losses(model, text.ids[start:end].long()[None])[answer - start - 1 :].mean()
        others = []
        for choice in item.choices:
            words = replace(item, answer=choice).parts[1]
            ids = base.tokenizer.encode(words, add_special_tokens=False)
            whole = torch.cat([prompt, torch.tensor(ids), text.ids[end - 1 : end].long()])
            if choice != item.answer:
                others.append(_losses(model, whole[None])[len(prompt) - 1 :].mean())
        right, asked = right + all(own < other for other in others), asked + bool(others)
    return -(right / asked if asked else 0.0), loss


@torch.no_grad()
def _losses(model, ids: torch.Tensor) -> torch.Tensor:
    targets = ids[0, 1:]
    logits = model(input_ids=ids[:, :-1]).logits[0, -len(targets) :]  # behind a soft prompt
    return cross_entropy(logits.double(), targets, reduction="none")


ROUNDS = 4


def trained(config, **changes) -> RunConfig:
    """Return a run whose clients keep models of different rounds."""
    return config(method="comigs-1g1s", training=HIGH, rounds=ROUNDS, **changes)


def files(run: RunFolder) -> dict[str, bytes]:
    """Return the files of the newest checkpoint."""
    newest = run.checkpoint(run.turns())
    return {path.name: path.read_bytes() for path in newest.iterdir()}
