"""What a client tells of its samples so that experts can choose it: mean embeddings.

FedAMoLE (arXiv 2411.19128): on every layer, the mean over an embedding set's tokens of each
expert's embedding A_j x and of the router's token embedding W_t x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.adapters import AmoleAdapter
from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.batch import Batch
from coterie.data.examples import Examples
from coterie.data.tokens import Split, Tokens
from coterie.errors import CoterieError
from coterie.training.loss import hidden_states


def set_apart(
    train: Split, window: int, share: float, most: int, chance: torch.Generator, owner: str
) -> tuple[Split, Batch]:
    """A training text without the embedding set, and that set: nothing is trained on it.

    It is a random share of the samples, at least one and at most `most`. Of a stream, samples are
    pieces of window + 1 tokens that do not overlap. Raises CoterieError if none is left to
    train on.
    """
    size = window + 1
    whole = len(train) if isinstance(train, Examples) else len(train.ids) // size
    count = min(most, max(1, round(share * whole)))
    if count >= whole:
        raise CoterieError(
            f"The embedding set would take all training samples of {owner!r} ({whole}); add text, "
            "or lower method.embeddings.share."
        )
    order = torch.randperm(whole, generator=chance)
    if isinstance(train, Examples):
        return train.only(sorted(order[count:].tolist())), train.batch(order[:count])
    pieces = train.ids.unfold(0, size, size)[order[:count]]
    taken = torch.zeros(len(train.ids), dtype=torch.bool)
    taken.unfold(0, size, size)[order[:count]] = True
    rest = train.ids[~taken]
    return Tokens(rest, train.bytes * len(rest) // len(train.ids)), Batch(pieces.long())


@torch.no_grad()
def mean_embeddings(
    base: Base,
    adapter: AmoleAdapter,
    samples: Batch,
    at_once: int,
    private: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """By layer, the mean embeddings of its n experts and last of the tokens: (n + 1, r) float32.

    Means are over all real tokens. `private` takes a mean of its own over samples: of (samples,
    any), each sample's means on all layers in a row; to (any,).
    """
    model = adapter.attach(base.model)
    with adapter.recording() as seen, autocast(base.precision, base.device.type):
        for part in samples.to(base.device).split(at_once):
            hidden_states(model, part.ids, part.real)
    counts = seen.counts.cpu()
    sums = {path: tensor.cpu() for path, tensor in seen.sums.items()}
    if private is None:
        return {path: (tensor.sum(0) / counts.sum()).float() for path, tensor in sums.items()}
    rows = torch.cat([(t / counts[:, None, None]).flatten(1) for t in sums.values()], dim=1)
    parts = private(rows).split([tensor[0].numel() for tensor in sums.values()])
    return {p: part.view(sums[p].shape[1:]) for p, part in zip(sums, parts, strict=True)}
