"""Selective distillation on the public samples: the code that clients and the server share.

The student, which is a client or the server, predicts the public samples. For every sample,
the student selects the predictions of the teacher with the lowest loss, if the teacher's loss is
lower than the student's. Then the student learns from the selected predictions.
"""

import logging
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters import Trainable, of_roles
from coterie.alignment.knowledge import Knowledge, Positions, first_of_each, sample_keys
from coterie.alignment.transfer import SoftTargets, mixed, translated
from coterie.data.split import Split
from coterie.errors import Diverged
from coterie.losses.tokens import soft_target_loss
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.seeding import generator
from coterie.training.context import ClientContext
from coterie.training.passes import Purpose, training_pass
from coterie.training.predictions import predictions
from coterie.training.replay import replayed
from coterie.training.schedule import learning_rate_beside
from coterie.training.update import Piece, Updater

log = logging.getLogger(__name__)
NO_TEACHER = -1
"""The value of `Distiller.teachers` for a sample on which no teacher has a lower loss."""
LEAST_LOGPROB = -60_000.0
"""The smallest log-probability that is sent; messages store log-probabilities as float16."""
TINY = 1e-30
"""The smallest divisor, used where neither the label nor a teacher has any weight."""
MOST_LISTED = 20
"""The largest number of samples that a warning lists."""


class Distiller:
    """A student model, the public samples, and the targets that the student learns to predict.

    The student is the model of one client or of the server. There are n samples, whose answers have
    p token positions in total. The label of a token position is the answer's own token. The target
    of a token position consists of k tokens and their probabilities.
    """

    def __init__(
        self, settings: FedMKTSettings, context: ClientContext, adapter: Trainable
    ) -> None:
        samples = None if context.public is None else context.public.beginnings
        assert samples is not None, "FedMKT.check accepts only prompts with answers"
        self.settings, self.context, self.adapter = settings, context, adapter
        self.samples = samples
        self.positions = Positions.of(self.samples, context.base.tokenizer)
        places = torch.arange(len(self.samples.ids))
        sample = torch.searchsorted(self.samples.starts, places, right=True) - 1
        self.labels = self.samples.ids[places >= self.samples.answers[sample]].long()
        """The correct next token at each position, shaped (p,), int64."""
        head: Any = context.base.model.get_output_embeddings()
        self.vocabulary_size: int = head.weight.shape[0]
        """The number of tokens that the model can predict; the tokenizer may have more or fewer."""

    def model(self) -> PreTrainedModel:
        """Return the base with the adapter attached."""
        return self.adapter.attach(self.context.base.model)

    def knowledge(self) -> Knowledge:
        """Compute the student's current predictions.

        Samples whose predictions are not finite are excluded and listed in the log.

        Returns:
            The predictions. Duplicate samples are included once.
        """
        base, at_once = self.context.base, self.context.training.at_once
        predicted = predictions(base, self.model(), self.samples, self.settings.logits, at_once)
        nats = self._per_sample(predicted.nats)
        sizes = torch.tensor([len(item.answer.encode()) for item in self.samples.items])
        finite = nats.isfinite() & ~self._per_sample(predicted.logprobs.sum(-1)).isnan()
        if not finite.all():
            log.warning(
                "%s has no finite predictions for %d public samples and excludes these samples. "
                "The first excluded samples have the numbers %s (numbers start at 1 and skip the "
                "samples that exceed the window)",
                self.context.name,
                int((~finite).sum()),
                ", ".join(str(n + 1) for n in (~finite).nonzero()[:MOST_LISTED, 0].tolist()),
            )
        return Knowledge(
            samples=self.positions.samples,
            losses=nats / sizes,
            starts=self.positions.starts,
            ends=self.positions.ends,
            tokens=predicted.tokens.int(),
            logprobs=predicted.logprobs.clamp(min=LEAST_LOGPROB).half(),
            lognorm=predicted.lognorm,
        ).only(finite & first_of_each(self.positions.samples))

    def begin(self, own: Knowledge) -> None:
        """Reset the targets to the labels or to the student's predictions, as the settings specify.

        The labels are the tokens of the samples' answers.

        Args:
            own: The student's predictions.

        Raises:
            Diverged: `own` has no samples, because no prediction of the student is finite.
        """
        if not len(own.samples):
            raise Diverged(
                f"{self.context.name!r} has no finite predictions for any public sample; lower "
                "training.learning_rate."
            )
        rows = self.positions.known(own)
        # A sample without finite predictions has an infinite loss, so any teacher is accepted.
        self.own_losses = own.losses[rows.clamp(min=0)].masked_fill(rows < 0, torch.inf)
        """The student's loss on each sample, shaped (n,), in nats per byte."""
        self.best_losses = self.own_losses.clone()
        """For each sample, the lowest loss so far of the student and the teachers, shaped (n,)."""
        self.teachers = torch.full_like(rows, NO_TEACHER)
        """For each sample, the number of the teacher with the lowest loss, or NO_TEACHER."""
        self.targets = SoftTargets.of(self.labels, self.settings.logits)
        """The targets at each position."""
        if self.settings.own in ("self", "mean"):
            self.targets = self._targets_from(own, torch.arange(len(self.labels)))
        if self.settings.own == "mean":
            # Indexing copies the targets, because `offer` changes `targets` in place.
            self.own_targets = self.targets[torch.arange(len(self.labels))]

    def offer(self, teacher: int, knowledge: Knowledge, ids: Tensor | None = None) -> None:
        """Use a teacher's predictions as targets where the teacher's loss is the lowest so far.

        This implements DualMinCE: after all offers, the targets of a sample come from the teacher
        with the lowest loss, if the teacher's loss is lower than the student's.

        Args:
            teacher: The teacher's number.
            knowledge: The teacher's predictions.
            ids: The map from the teacher's vocabulary to the student's vocabulary. None if the
                tokens in `knowledge` are already from the student's vocabulary.
        """
        rows = self.positions.known(knowledge)
        if (rows < 0).all():
            log.warning(
                "%s received predictions on %d samples, none of which is in its public set; use "
                "the same public set on all machines",
                self.context.name,
                len(knowledge.samples),
            )
            return
        losses = torch.where(rows < 0, torch.inf, knowledge.losses[rows.clamp(min=0)])
        better = losses < self.best_losses
        positions = self.positions.of_samples(better)
        self.targets[positions] = self._targets_from(knowledge, positions, ids)
        self.best_losses[better], self.teachers[better] = losses[better], teacher

    def _targets_from(
        self, knowledge: Knowledge, positions: Tensor, ids: Tensor | None = None
    ) -> SoftTargets:
        """Compute the targets at the selected token positions from predictions.

        The setting `align` determines which position of `knowledge`, if any, is aligned with a
        selected position. The tokens that are predicted at the aligned position are translated into
        the student's vocabulary, and become the target at the selected position. If there is no
        aligned position, or if none of its predicted tokens has a translation, the target is the
        label, which is the answer's own token.

        Args:
            knowledge: The predictions of a teacher or of the student.
            positions: The numbers of the selected token positions.
            ids: The map from the vocabulary of `knowledge` to the student's vocabulary. None if the
                tokens in `knowledge` are already from the student's vocabulary.
        """
        offsets = self.settings.align == "offsets"
        align = self.positions.by_offsets if offsets else self.positions.by_warping
        aligned = align(knowledge)[positions]
        rows, missing = aligned.clamp(min=0), self.settings.logits - knowledge.tokens.shape[1]
        tokens = F.pad(knowledge.tokens[rows], (0, missing), value=-1)  # truncates if negative
        logprobs = F.pad(knowledge.logprobs[rows].float(), (0, missing), value=-torch.inf)
        targets = translated(
            tokens,
            logprobs,
            knowledge.lognorm[rows],
            ids,
            self.settings.temperature,
            self.vocabulary_size,
        )
        targets.probs[aligned < 0] = 0
        return targets.or_else(SoftTargets.of(self.labels[positions], self.settings.logits))

    def distil(self, round: int) -> float:
        """Train the adapter on the public samples with a new optimiser.

        The loss is lambda * cross-entropy to the labels + (1 - lambda) * cross-entropy to the
        targets, where lambda is the setting `task_weight`, the labels are the tokens of the
        answers, and both cross-entropies are means over a batch (the paper's objectives 2 and 3).
        Samples on which the student's predictions are not finite are excluded.

        Args:
            round: The number of the round.

        Returns:
            The mean loss, in nats per token.
        """
        context, training = self.context, self.context.training
        model, targets = self.model(), self._mixed_targets()
        updater = Updater(context, self.adapter, of_roles("dense"))
        samples, losses = self.own_losses.isfinite().nonzero()[:, 0], []
        batches: list[Tensor] = []
        for epoch in range(self.settings.epochs):
            chance = generator(context.seed, "public", context.name, round, epoch)
            order = torch.randperm(len(samples), generator=chance)
            batches += samples[order].split(training.batch)
        rate = learning_rate_beside(training, context.rounds, round, len(batches))
        for number, batch in enumerate(batches):
            weights = self._sample_weights(batch)
            pieces = [
                Piece(
                    partial(
                        self._loss, model, part, targets, weights, ("public", round, number, i)
                    ),
                    len(self.positions.of_samples(part)),
                )
                for i, part in enumerate(batch.split(training.at_once))
            ]
            step, update = round * training.steps, round * len(batches) + number
            beside = replayed(context, model, step, "public", update, [])
            loss = updater.update(
                pieces, rate(number), where="on the public samples", beside=beside
            )
            losses.append(loss)
        return fmean(losses)

    def _sample_weights(self, batch: Tensor) -> Tensor:
        """Return the weights, shaped (n,), of the samples' distillation losses in one update.

        A sample has a teacher if a teacher's loss on the sample is lower than the student's. If the
        setting `own` is "none", samples without a teacher have the weight 0, and all samples with a
        teacher have one common weight. With this weight, the update's distillation loss is a mean
        that counts only the token positions of samples with a teacher. For any other value of
        `own`, all weights are 1.

        Args:
            batch: The numbers of the samples in the update.
        """
        if self.settings.own != "none":
            return torch.ones(len(self.samples))
        taught = self.teachers >= 0
        positions = self.positions.starts.diff()[batch]
        taught_positions = positions[taught[batch]].sum().clamp(min=1)
        return taught * (positions.sum() / taught_positions)

    def _loss(
        self,
        model: PreTrainedModel,
        chosen: Tensor,
        targets: SoftTargets,
        weights: Tensor,
        purpose: Purpose,
    ) -> Tensor:
        """Compute the loss of the chosen samples, given the weights from `_sample_weights`."""
        settings, device = self.settings, self.context.base.device
        positions = self.positions.of_samples(chosen)
        batch, targets = self.samples.batch(chosen).to(device), targets[positions]
        labels, task = self.labels[positions][:, None].to(device), settings.task_weight
        ones = torch.ones(labels.shape, device=device)
        tokens, probs = targets.tokens.to(device), targets.probs.to(device)
        sizes = self.positions.starts.diff()[chosen]
        distillation = (1 - task) * weights[chosen].repeat_interleave(sizes).to(device)
        with training_pass(self.context, *purpose):
            if settings.temperature == 1:  # then both losses are one cross-entropy
                total = task + distillation
                tokens = torch.cat([labels, tokens], 1)
                probs = torch.cat([task * ones, distillation[:, None] * probs], 1)
                probs = probs / total.clamp(min=TINY)[:, None]
                return soft_target_loss(model, batch, tokens, probs, weights=total)
            label_loss = soft_target_loss(model, batch, labels, ones)
            return task * label_loss + soft_target_loss(
                model, batch, tokens, probs, settings.temperature, distillation
            )

    def _mixed_targets(self) -> SoftTargets:
        """Return the targets from which the student learns.

        If the setting `own` is "mean", the result is the weighted mean of the student's own
        predictions and the attribute `targets`. Each sample has its own two weights, proportional
        to exp(-loss). For the student's own predictions, `loss` is the student's loss on the
        sample. For `targets`, `loss` is the lowest of the losses that the student and the teachers
        have on the sample. For any other value of `own`, the result is the attribute `targets`.
        """
        if self.settings.own != "mean":
            return self.targets
        weight = (self.best_losses - self.own_losses).sigmoid().nan_to_num()
        weight = weight.repeat_interleave(self.positions.starts.diff())
        return mixed(self.own_targets, self.targets, weight)

    def quality(self) -> dict[str, float]:
        """Return how much of the teachers' predictions became targets.

        Returns:
            A mapping with three keys. `samples` is the number of samples whose targets come from a
            teacher. `positions` is the fraction of these samples' token positions whose target
            comes from the teacher and not from the label. `mass` is the teacher's probability mass
            that remained after the translation into the student's vocabulary, averaged over the
            token positions whose target comes from the teacher.
        """
        positions = self.positions.of_samples(self.teachers >= 0)
        mass = self.targets.mass[positions]
        aligned = mass > 0
        return {
            "samples": int((self.teachers >= 0).sum()),
            "positions": aligned.float().mean().item() if len(positions) else 0.0,
            "mass": mass[aligned].mean().item() if aligned.any() else 0.0,
        }

    def _per_sample(self, values: Tensor) -> Tensor:
        """Sum values shaped (p,) over each sample's positions, and return sums shaped (n,)."""
        starts = self.positions.starts
        samples = torch.arange(len(self.samples)).repeat_interleave(starts.diff())
        return torch.zeros(len(self.samples)).index_add(0, samples, values)


def keys_of(*splits: Split) -> Tensor:
    """Return the keys (hashes) of all samples in the splits, shaped (samples,), int64."""
    samples = [split.beginnings for split in splits]
    keys = [sample_keys(part.instructions) for part in samples if part is not None]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *keys])
