"""The negative log-likelihood of answers, given their prompts."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.data.measured import finite
from coterie.losses.tokens import token_losses


@torch.no_grad()
def answer_losses(base: Base, model: PreTrainedModel, samples: Examples, batch: int) -> Tensor:
    """Return the negative log-likelihood of each sample's answers, in nats.

    A sample's value is the sum over all tokens of the sample's answers, including the tokens that
    end answers. Every token is predicted from all tokens before it. Samples of similar lengths
    share a batch.

    Args:
        base: The base of the model.
        model: The model.
        samples: Prompts with answers, or conversations.
        batch: The number of samples per forward pass.

    Returns:
        The values, as a float64 tensor shaped (samples,). Values that are not finite are replaced
        with a large value; see `finite`.
    """
    nats = torch.zeros(len(samples), dtype=torch.float64)
    with autocast(base.precision, base.device.type):
        for chosen in samples.starts.diff().argsort(stable=True).split(batch):
            losses = token_losses(model, *samples.batch(chosen).to(base.device))
            nats[chosen] = losses.cpu().sum(1, dtype=torch.float64)
    return finite(nats, samples.lengths)
