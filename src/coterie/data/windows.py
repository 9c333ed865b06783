"""What a model sees of a split: random windows to train on, and every token once to test on."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from coterie.data.batch import Batch
from coterie.data.kinds.preferences import AnyBatch
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import Split


def sample_batch(tokens: Split, batch: int, window: int, generator: torch.Generator) -> AnyBatch:
    """Samples of a split, uniformly random and drawn with replacement.

    Of a stream, windows at any offset: ids (batch, window + 1), whose first `window` tokens are
    inputs and whose last `window` are what they predict; it must hold window + 1 tokens, as
    `tokenise` has made sure. Of prompts with answers, whole samples; of preferences, pairs.
    """
    if not isinstance(tokens, Tokens):
        return tokens.batch(torch.randint(len(tokens), (batch,), generator=generator))
    windows = tokens.ids.unfold(0, window + 1, 1)  # (N - window, window + 1), a view
    starts = torch.randint(len(windows), (batch,), generator=generator)
    return Batch(windows[starts].long())


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
    if not isinstance(tokens, Tokens):
        return tokens.batch(_in_epochs(len(tokens), batch, number, chance))
    windows = tokens.ids.unfold(0, window + 1, window)  # overlapping by one token
    return Batch(windows[_in_epochs(len(windows), batch, number, chance)].long())


def _in_epochs(
    count: int, batch: int, number: int, chance: Callable[[int], torch.Generator]
) -> Tensor:
    """The `number`-th `batch` of the orders of `count` samples, one epoch's after another's."""
    first = number * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([torch.randperm(count, generator=chance(epoch)) for epoch in epochs])
    return order[first % count :][:batch]


def tokens_per_sample(tokens: Split, window: int) -> float:
    """Tokens that a training sample reads, on average."""
    return window if isinstance(tokens, Tokens) else len(tokens.ids) / len(tokens)


def evaluation_windows(
    tokens: Tokens, window: int, context: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows that predict every token of a split exactly once, in order.

    Yields ids (b, window + 1) int64 with b <= batch, and mask (b, window) bool, which is True where
    ids[:, 1:] is a token of the split rather than padding. The token id `context` (beginning or end
    of text) comes before the first token, and is the padding after the last; every later window's
    first input is the last token of the window before. The split must not be empty.
    """
    count = len(tokens.ids)
    rows = -(-count // window)
    stream = torch.full((rows * window + 1,), context, dtype=torch.int64)
    stream[1 : count + 1] = tokens.ids
    ids = stream.unfold(0, window + 1, window)  # (rows, window + 1), overlapping by one token
    mask = (torch.arange(rows * window) < count).view(rows, window)
    yield from zip(ids.split(batch), mask.split(batch), strict=True)


def even_windows(tokens: Tokens, most: int, window: int, context: int) -> Batch:
    """At most so many windows of a stream, as of `evaluation_windows`, evenly spaced from its first
    to its last."""
    [(ids, mask)] = evaluation_windows(tokens, window, context, len(tokens.ids))
    chosen = even(len(ids), most)
    return Batch(ids[chosen], mask[chosen])


def even(count: int, most: int) -> Tensor:
    """At most so many of the numbers 0 .. count-1, evenly spaced."""
    taken = min(count, most)
    return torch.arange(taken) * count // taken
