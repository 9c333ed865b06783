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
    """Draw some of a client's training samples at random, and exclude them from training.

    A text that does not consist of records is first split into samples of `window` + 1 tokens. The
    samples do not overlap.

    Args:
        context: The client's context.
        purpose: A word for the use of the samples; the seed of the draw depends on this word.
        share: The fraction of the training samples to draw. At least one sample is drawn if the
            client has a text.
        limit: The maximum number of samples to draw; None for no maximum.

    Returns:
        A pair of a context and the drawn samples. The context's training data exclude the drawn
        samples. Calls with equal arguments draw equal samples, so the samples stay the same in all
        rounds. If the client has no text, no samples are drawn. A client has no text, for
        example, if its trained model was loaded without the training data.

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
