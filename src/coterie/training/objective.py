"""The loss that a batch is learnt by: of text, of samples, or of pairs of answers."""

from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.kinds.preferences import AnyBatch, PairBatch
from coterie.losses import language_model_loss
from coterie.training.dpo import Rewards, dpo_loss


def batch_loss(model: PreTrainedModel, batch: AnyBatch) -> tuple[Tensor, Rewards | None]:
    """Return the loss of a batch, a scalar with a gradient; and the rewards of pairs.

    The loss of text and of samples is in nats per token, the loss of pairs is DPO's.
    """
    if isinstance(batch, PairBatch):
        return dpo_loss(model, batch)
    return language_model_loss(model, *batch), None
