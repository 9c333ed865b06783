"""What a model sees of a split in training: random samples, or all of them in turn."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.data.split import AnyBatch, Split


def sample_batch(tokens: Split, batch: int, window: int, generator: torch.Generator) -> AnyBatch:
    """Samples of a split, uniformly random and drawn with replacement.

    Of a stream, windows at any offset: ids (batch, window + 1), whose first `window` tokens are
    inputs and whose last `window` are what they predict; it must hold window + 1 tokens, as
    `tokenise` has made sure. Of prompts with answers, whole samples; of preferences, pairs.
    """
    samples = tokens.samples(window, 1)
    return samples.batch(torch.randint(len(samples), (batch,), generator=generator))


def epoch_batch(
    tokens: Split,
    batch: int,
    window: int,
    number: int,
    chance: Callable[[int], torch.Generator],
) -> AnyBatch:
    """The `number`-th batch (0 is the first) of a split that is gone through again and again.

    Every epoch holds each sample once, in an order drawn from `chance(epoch)`; a batch may hold the
    end of one epoch and the beginning of the next. A stream's samples are its windows one after
    another, from its first token; fewer than `window` tokens at its end are in none.
    """
    samples = tokens.samples(window, window)  # overlapping by one token
    return samples.batch(_in_epochs(len(samples), batch, number, chance))


def _in_epochs(
    count: int, batch: int, number: int, chance: Callable[[int], torch.Generator]
) -> Tensor:
    """The `number`-th `batch` of the orders of `count` samples, one epoch's after another's."""
    first = number * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([torch.randperm(count, generator=chance(epoch)) for epoch in epochs])
    return order[first % count :][:batch]
