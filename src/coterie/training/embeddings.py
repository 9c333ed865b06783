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
from coterie.data.split import AnyBatch
from coterie.losses.tokens import hidden_states


@torch.no_grad()
def mean_embeddings(
    base: Base,
    adapter: AmoleAdapter,
    samples: AnyBatch,
    at_once: int,
    private: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """By layer, the mean embeddings of its n experts and last of the tokens: (n + 1, r) float32.

    Means are over all real tokens. `private` takes a mean of its own over samples: of (samples,
    any), each sample's means on all layers in a row; to (any,). Of a pair, the sample with the
    chosen answer counts.
    """
    sums, counts = _sums(base, adapter, samples, at_once)
    if private is None:
        return {path: (tensor.sum(0) / counts.sum()).float() for path, tensor in sums.items()}
    rows = torch.cat([(t / counts[:, None, None]).flatten(1) for t in sums.values()], dim=1)
    parts = private(rows).split([tensor[0].numel() for tensor in sums.values()])
    return {p: part.view(sums[p].shape[1:]) for p, part in zip(sums, parts, strict=True)}


def token_embeddings(
    base: Base, adapter: AmoleAdapter, samples: AnyBatch, at_once: int
) -> dict[str, Tensor]:
    """By layer, the mean token embedding W_t x of each sample: (samples, r) float32, in any order.

    Equation 17, for embedding sets of one sample each.
    """
    sums, counts = _sums(base, adapter, samples, at_once)
    return {path: tensor[:, -1] / counts[:, None] for path, tensor in sums.items()}


@torch.no_grad()
def _sums(
    base: Base, adapter: AmoleAdapter, samples: AnyBatch, at_once: int
) -> tuple[dict[str, Tensor], Tensor]:
    """By layer, sums over each sample's tokens, and how many these are; see `Recording`."""
    model = adapter.attach(base.model)
    with adapter.recording() as seen, autocast(base.precision, base.device.type):
        for part in samples.read.to(base.device).split(at_once):
            hidden_states(model, part)
    return {path: tensor.cpu() for path, tensor in seen.sums.items()}, seen.counts.cpu()
