"""Mean embeddings of a client's samples, with which FedAMoLE's experts choose clients.

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
    batch: int,
    private: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compute the mean embeddings on each layer, over all tokens that are not padding.

    Args:
        base: The base.
        adapter: The adapter to attach to the base.
        samples: The embedding set. A preference pair counts with its chosen answer.
        batch: The number of samples in a forward pass.
        private: A mean with noise: a function of the samples' means on all layers, shaped
            (samples, values), to a tensor shaped (values,).

    Returns:
        By layer, a float32 tensor shaped (n + 1, r): the mean embeddings of the layer's n experts,
        and then of the tokens.
    """
    sums, counts = _sums(base, adapter, samples, batch)
    if private is None:
        return {path: (tensor.sum(0) / counts.sum()).float() for path, tensor in sums.items()}
    rows = torch.cat([(t / counts[:, None, None]).flatten(1) for t in sums.values()], dim=1)
    means = private(rows).split([tensor[0].numel() for tensor in sums.values()])
    return {p: mean.view(sums[p].shape[1:]) for p, mean in zip(sums, means, strict=True)}


def token_embeddings(
    base: Base, adapter: AmoleAdapter, samples: AnyBatch, batch: int
) -> dict[str, Tensor]:
    """Compute the mean token embedding W_t x of each sample (equation 17).

    Args:
        base: The base.
        adapter: The adapter to attach to the base.
        samples: The samples; each is an embedding set by itself.
        batch: The number of samples in a forward pass.

    Returns:
        By layer, a float32 tensor shaped (samples, r), whose rows are in no particular order.
    """
    sums, counts = _sums(base, adapter, samples, batch)
    return {path: tensor[:, -1] / counts[:, None] for path, tensor in sums.items()}


@torch.no_grad()
def _sums(
    base: Base, adapter: AmoleAdapter, samples: AnyBatch, batch: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Sum embeddings over each sample's tokens by layer, and count the tokens; see `Recording`."""
    model = adapter.attach(base.model)
    with adapter.recording() as recording, autocast(base.precision, base.device.type):
        for part in samples.read.to(base.device).split(batch):
            hidden_states(model, part)
    sums = {path: tensor.cpu() for path, tensor in recording.sums.items()}
    return sums, recording.counts.cpu()
