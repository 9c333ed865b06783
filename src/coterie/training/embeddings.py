"""Mean embeddings of a client's samples, with which FedAMoLE's experts choose clients.

In FedAMoLE (arXiv 2411.19128), an embedding set is a set of samples. On every layer, two kinds of
embeddings of the input x of a token are averaged over the tokens of the set: each expert's
embedding A_j x, and the router's token embedding W_t x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.adapters import AmoleAdapter
from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.split import AnyBatch
from coterie.losses.tokens import hidden_states
from coterie.messages.host import copied_to_host


@torch.no_grad()
def mean_embeddings(
    base: Base,
    adapter: AmoleAdapter,
    samples: AnyBatch,
    batch: int,
    private: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compute each expert's mean embedding and the mean token embedding on each layer.

    The means are over all tokens except padding. For the input x of a token, the embedding of
    expert j is A_j x, and the router's token embedding is W_t x (FedAMoLE, arXiv 2411.19128).

    Args:
        base: The base.
        adapter: The adapter to attach to the base.
        samples: The samples over whose tokens the embeddings are averaged. If the samples are
            preference pairs, only the chosen answers are read.
        batch: The number of samples in a forward pass.
        private: Function that computes a mean with noise. Its argument is a tensor of shape
            (samples, values), in which each row contains a sample's mean embeddings on all layers.
            Its result is a tensor of shape (values,). By default, the exact mean over all tokens is
            computed.

    Returns:
        A mapping from layers to float32 tensors of shape (n + 1, r), for n experts and embeddings
        of size r. The first n rows are the experts' mean embeddings. The last row is the mean token
        embedding.
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
    """Compute the mean token embedding W_t x of each sample (equation 17 of the FedAMoLE paper).

    Args:
        base: The base.
        adapter: The adapter to attach to the base.
        samples: The samples. A separate mean is computed for each sample.
        batch: The number of samples in a forward pass.

    Returns:
        A mapping from layers to float32 tensors of shape (samples, r), for embeddings of size r.
        The rows are in no particular order.
    """
    sums, counts = _sums(base, adapter, samples, batch)
    return {path: tensor[:, -1] / counts[:, None] for path, tensor in sums.items()}


@torch.no_grad()
def _sums(
    base: Base, adapter: AmoleAdapter, samples: AnyBatch, batch: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Sum expert and token embeddings over each sample's tokens on each layer; count the tokens.

    The shapes are documented in the class `Recording`.
    """
    model = adapter.attach(base.model)
    with adapter.recording() as recording, autocast(base.precision, base.device.type):
        for part in samples.read.to(base.device).split(batch):
            hidden_states(model, part)
    *sums, counts = copied_to_host([*recording.sums.values(), recording.counts])
    return dict(zip(recording.sums, sums, strict=True)), counts
