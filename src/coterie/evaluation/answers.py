"""How likely answers are."""

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
    """Negative log-likelihood of each one's answers given what comes before them, with what ends
    them: (n,) float64.

    In nats, summed over the answer's tokens. `batch` samples of similar lengths at once.
    """
    nats = torch.zeros(len(samples), dtype=torch.float64)
    with autocast(base.precision, base.device.type):
        for chosen in samples.starts.diff().argsort(stable=True).split(batch):
            losses = token_losses(model, *samples.batch(chosen).to(base.device))
            nats[chosen] = losses.sum(1, dtype=torch.float64).cpu()
    return finite(nats, samples.lengths)
