"""Samples that are set apart from training: what a method measures on them is no fit to them."""

from dataclasses import replace

import torch

from coterie.data.batch import Batch
from coterie.data.kinds.preferences import AnyBatch
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import Split
from coterie.errors import CoterieError
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
    whole = len(train.ids) // size if isinstance(train, Tokens) else len(train)
    count = min(whole if most is None else most, max(1, round(share * whole)))
    if count >= whole:
        raise CoterieError(
            f"The method sets apart {count} of the {whole} training samples of {context.name!r}, "
            "and none is left to train on; give it more text."
        )
    order = torch.randperm(whole, generator=generator(context.seed, purpose, context.name))
    rest, samples = _divided(train, size, order[:count], order[count:])
    return replace(context, data=replace(context.data, train=rest)), samples


def _divided(
    train: Split, size: int, taken: torch.Tensor, left: torch.Tensor
) -> tuple[Split, AnyBatch]:
    """The rest of a split, in its order, and the samples taken, by their numbers."""
    if not isinstance(train, Tokens):
        return train.only(left.sort().values.tolist()), train.batch(taken)
    inside = torch.zeros(len(train.ids), dtype=torch.bool)
    inside.unfold(0, size, size)[taken] = True
    rest = train.ids[~inside]
    bytes = train.bytes * len(rest) // len(train.ids)  # about
    return Tokens(rest, bytes), Batch(train.ids.unfold(0, size, size)[taken].long())
