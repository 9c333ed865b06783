"""Samples that are set apart from training: what a method measures on them is no fit to them."""

from dataclasses import replace

import torch

from coterie.data.split import AnyBatch
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch
from coterie.seeding import generator
from coterie.training.context import ClientContext


def set_apart(
    context: ClientContext, purpose: str, share: float, most: int | None = None
) -> tuple[ClientContext, AnyBatch]:
    """A client's context without a random share of its training samples, and these samples.

    They are at least one and at most `most`, the same in every round. Of a stream, samples are
    pieces of window + 1 tokens that do not overlap. Without any text, as where a model is only
    loaded, there are none. Raises CoterieError if none is left to train on.
    """
    train, size = context.data.train, context.window + 1
    if not len(train.ids):
        return context, Batch(torch.zeros(0, size, dtype=torch.int64))
    all_samples = train.samples(context.window, size)
    whole = len(all_samples)
    count = min(whole if most is None else most, max(1, round(share * whole)))
    if count >= whole:
        raise CoterieError(
            f"The method sets apart {count} of the {whole} training samples of {context.name!r}, "
            "and none is left to train on; give it more text."
        )
    order = torch.randperm(whole, generator=generator(context.seed, purpose, context.name))
    rest = train.without(order[:count], context.window)
    data = replace(context.data, train=rest)
    return replace(context, data=data), all_samples.batch(order[:count])
