"""General samples: samples that contain nothing private, with what a base predicts for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from coterie.adapters import detached
from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.losses.tokens import (
    Batch,
    divergences,
    hidden_states,
    log_probabilities,
    predicts_from_states,
)
from coterie.training.spec import ReplaySpec

AT_ONCE = 16
"""The number of samples per forward pass without gradients."""


@dataclass(frozen=True)
class GeneralSamples:
    """Samples that contain nothing private, with what a base predicts for them."""

    ids: tuple[Tensor, ...]
    """The token ids of each sample, shaped (time + 1,), int64."""
    counted: tuple[Tensor, ...]
    """For each sample, a mask shaped (time,) of the tokens in ids[1:] that count.

    The tokens of the base's answers count, but not those of the requests; in texts, all count.
    """
    states: tuple[Tensor, ...] = ()
    """The base's last hidden states for the tokens of each sample that count, on the CPU.

    They are shaped (counted, dim). The tuple is empty if the base's predictions do not follow from
    its hidden states; see `predicts_from_states`. They are then computed whenever they are needed.
    """

    @classmethod
    def of(
        cls,
        base: Base,
        model: PreTrainedModel,
        ids: Sequence[Tensor],
        counted: Sequence[Tensor],
    ) -> "GeneralSamples":
        """Compute the hidden states of samples.

        Args:
            base: The base.
            model: The base's model, without an adapter.
            ids: The token ids of each sample, shaped (time + 1,), int64.
            counted: For each sample, a mask shaped (time,) of the tokens in ids[1:] that count.
        """
        samples = cls(tuple(ids), tuple(counted))
        if not predicts_from_states(model):
            return samples
        states: list[Tensor] = []
        with torch.no_grad(), autocast(base.precision, base.device.type):
            for numbers in _pieces(len(ids)):
                batch = samples.batch(numbers)
                parts = hidden_states(model, batch.to(base.device)).cpu()
                states += parts.split([samples.terms([n]) for n in numbers])
        return cls(samples.ids, samples.counted, tuple(states))

    def terms(self, numbers: Sequence[int]) -> int:
        """Return the number of tokens of chosen samples that count."""
        return sum(int(self.counted[number].sum()) for number in numbers)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return chosen samples as a batch, right-padded."""
        rows = [self.ids[number] for number in numbers]
        ids = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(1, ids.shape[1]) < lengths[:, None]
        masks = [self.counted[number] for number in numbers]
        return Batch(ids, pad_sequence(masks, batch_first=True), real)

    def divergences(self, base: Base, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """Return KL(base || model) for each token of chosen samples that counts.

        The result is in nats, has a gradient, and is shaped (tokens,).
        """
        batch = self.batch(numbers).to(base.device)
        if predicts_from_states(model):
            earlier = torch.cat([self.states[number] for number in numbers])
        else:
            with detached(base.model) as bare:
                earlier = log_probabilities(bare, batch)
        return divergences(model, batch, earlier)

    @torch.no_grad()
    def drift(
        self, base: Base, model: PreTrainedModel, answered: Sequence[int] | None = None
    ) -> float:
        """Return the mean of KL(base || model) over all tokens that count, in nats.

        Args:
            base: The base.
            model: The model.
            answered: The numbers of the samples that the model answers; the base answers all
                others, for which the divergence is 0. By default, the model answers all samples.
        """
        chosen = range(len(self.ids)) if answered is None else answered
        total = 0.0
        with autocast(base.precision, base.device.type):
            for piece in _pieces(len(chosen)):
                numbers = [chosen[number] for number in piece]
                total += self.divergences(base, model, numbers).cpu().double().sum().item()
        return total / self.terms(range(len(self.ids)))

    def prompts(self) -> list[Tensor]:
        """Return the token ids of each request without its answer, and those of each text."""
        firsts = [int(counted.int().argmax()) for counted in self.counted]
        return [ids[: 1 + n] if n else ids for ids, n in zip(self.ids, firsts, strict=True)]


def _pieces(count: int) -> list[range]:
    """Return consecutive ranges of at most `AT_ONCE` numbers of samples."""
    return [range(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE)]


@dataclass(frozen=True)
class Replay:
    """A client's general samples, and the settings with which its training uses them."""

    spec: ReplaySpec
    samples: GeneralSamples
