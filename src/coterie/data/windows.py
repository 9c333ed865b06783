"""Training batches of a split: random samples, or all samples in epochs."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.data.split import AnyBatch, Split


def sample_batch(tokens: Split, batch: int, window: int, generator: torch.Generator) -> AnyBatch:
    """Draw a batch of samples from a split uniformly at random, with replacement.

    The samples of a stream are windows at any offset: ids (batch, window + 1), whose first `window`
    tokens are inputs and whose last `window` tokens are targets. The samples of other kinds are
    whole prompts with answers, conversations or pairs.

    Args:
        tokens: The split; a stream has at least window + 1 tokens, as `tokenise` ensures.
        batch: The number of samples.
        window: The number of tokens that a window predicts.
        generator: The random generator.
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
    """Return the batch with a given number, counted over successive epochs of a split.

    Every epoch contains each sample once, in random order. A batch can contain the end of one epoch
    and the beginning of the next. The samples of a stream are consecutive windows from its first
    token; up to window - 1 tokens at its end are in no window.

    Args:
        tokens: The split.
        batch: The number of samples per batch.
        window: The number of tokens that a window predicts.
        number: The number of the batch, counted from 0 at the start of the first epoch.
        chance: A function that maps the number of an epoch to the random generator of its order.
    """
    samples = tokens.samples(window, window)  # overlapping by one token
    return samples.batch(_in_epochs(len(samples), batch, number, chance))


def _in_epochs(
    count: int, batch: int, number: int, chance: Callable[[int], torch.Generator]
) -> Tensor:
    """Concatenate the random orders of all epochs, and return the indices in batch `number`."""
    first = number * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([torch.randperm(count, generator=chance(epoch)) for epoch in epochs])
    return order[first % count :][:batch]
