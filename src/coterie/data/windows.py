"""Training batches of a split: random samples, or all samples in epochs."""

from collections.abc import Callable

import torch

from coterie.data.split import AnyBatch, Split


def sample_batch(tokens: Split, batch: int, window: int, generator: torch.Generator) -> AnyBatch:
    """Draw a batch of samples from a split uniformly at random, with replacement.

    A split of plain text is one stream of tokens, and a sample is any window + 1 consecutive tokens
    of the stream. The token ids of the batch then have the shape (batch, window + 1). The first
    `window` tokens of each sample are inputs, and the last `window` tokens are targets. For other
    kinds of data, a sample is a whole conversation, a whole pair, or a whole prompt with its
    answer.

    Args:
        tokens: The split. Plain text must have at least window + 1 tokens; `tokenise` ensures this.
        batch: The number of samples.
        window: The number of tokens that are predicted in a sample of plain text.
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
    """Return the batch with a given number. The numbering continues from one epoch to the next.

    Every epoch contains each sample once, in random order. A batch can contain the end of one epoch
    and the beginning of the next epoch. A split of plain text is one stream of tokens, which is cut
    into samples of window + 1 tokens. The first sample starts with the stream's first token. Every
    other sample starts with the last token of the sample before it, so that no token is predicted
    twice in an epoch. Up to window - 1 tokens at the end of the stream belong to no sample.

    Args:
        tokens: The split.
        batch: The number of samples per batch.
        window: The number of tokens that are predicted in a sample of plain text.
        number: The number of the batch, counted from 0 at the start of the first epoch.
        chance: A function that maps the number of an epoch to the generator of the epoch's random
            order.
    """
    samples = tokens.samples(window, window)  # overlapping by one token
    # The sample orders of all epochs are joined into one sequence, which is cut into batches.
    count, first = len(samples), number * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([torch.randperm(count, generator=chance(epoch)) for epoch in epochs])
    return samples.batch(order[first % count :][:batch])
