"""Samples that are excluded from training, so that a method can measure models on unseen data."""

from dataclasses import replace

import torch

from coterie.data.split import AnyBatch
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch
from coterie.seeding import generator
from coterie.training.context import ClientContext


def set_apart(
    context: ClientContext, purpose: str, share: float, limit: int | None = None
) -> tuple[ClientContext, AnyBatch]:
    """Draw a random share of a client's training samples, and exclude them from training.

    A text that does not consist of records is split into samples of `window` + 1 tokens, which do
    not overlap.

    Args:
        context: The client's context.
        purpose: A word for the use of the samples; the seed of the draw depends on this word.
        share: The share of the training samples to draw; at least one sample is drawn.
        limit: The maximum number of samples to draw; None for no maximum.

    Returns:
        A context whose training data exclude the drawn samples, and these samples. Every round
        draws the same samples. No samples are drawn if the client has no text, as when a model is
        only loaded.

    Raises:
        CoterieError: No sample would be left to train on.
    """
    train, size = context.data.train, context.window + 1
    if not len(train.ids):
        return context, Batch(torch.zeros(0, size, dtype=torch.int64))
    all_samples = train.samples(context.window, size)
    total = len(all_samples)
    count = min(total if limit is None else limit, max(1, round(share * total)))
    if count >= total:
        raise CoterieError(
            f"The method sets apart {count} of the {total} training samples of {context.name!r}, "
            "so that no sample is left to train on; give this client more text."
        )
    order = torch.randperm(total, generator=generator(context.seed, purpose, context.name))
    rest = train.without(order[:count], context.window)
    data = replace(context.data, train=rest)
    return replace(context, data=data), all_samples.batch(order[:count])
