"""One side of mutual teaching: what it knows of the public samples, and learning from others.

Clients and the server do the same: they offer what they predict, and take over the predictions of
those who do better than they do themselves.
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
from coterie.training.schedule import learning_rate_beside
from coterie.training.update import Piece, Updater

log = logging.getLogger(__name__)
NOBODY = -1
LEAST = -60_000.0
"""The smallest log-probability that travels, in half precision."""
TINY = 1e-30
"""Divides where nothing is learnt: neither the label nor a teacher counts."""
MOST_NAMED = 20
"""Samples that a warning names."""


class Distiller:
    """A model with an adapter, the public samples, and what it is about to learn of them."""

    def __init__(
        self, settings: FedMKTSettings, context: ClientContext, adapter: Trainable
    ) -> None:
        samples = None if context.public is None else context.public.beginnings
        assert samples is not None, "FedMKT.check makes sure of it"
        self.settings, self.context, self.adapter = settings, context, adapter
        self.samples = samples
        self.positions = Positions.of(self.samples, context.base.tokenizer)
        inside = torch.arange(len(self.samples.ids))
        owner = torch.searchsorted(self.samples.starts, inside, right=True) - 1
        self.targets = self.samples.ids[inside >= self.samples.answers[owner]].long()
        """(p,) the next token at each position."""
        head: Any = context.base.model.get_output_embeddings()
        self.vocabulary_size: int = head.weight.shape[0]
        """Tokens that the model can predict; its tokenizer may have more, or fewer."""

    def model(self) -> PreTrainedModel:
        """The base with the adapter attached."""
        return self.adapter.attach(self.context.base.model)

    def knowledge(self) -> Knowledge:
        """What this side predicts now; of a sample that stands twice, once.

        Samples whose predictions are not finite are left out, and named in the log.
        """
        base, at_once = self.context.base, self.context.training.at_once
        found = predictions(base, self.model(), self.samples, self.settings.logits, at_once)
        nats = self._per_sample(found.nats)
        sizes = torch.tensor([len(item.answer.encode()) for item in self.samples.items])
        finite = nats.isfinite() & ~self._per_sample(found.logprobs.sum(-1)).isnan()
        if not finite.all():
            log.warning(
                "%s has no finite predictions for %d public samples, which are excluded; "
                "samples that fit its window: %s",
                self.context.name,
                int((~finite).sum()),
                ", ".join(str(n + 1) for n in (~finite).nonzero()[:MOST_NAMED, 0].tolist()),
            )
        return Knowledge(
            samples=self.positions.samples,
            losses=nats / sizes,
            starts=self.positions.starts,
            ends=self.positions.ends,
            tokens=found.tokens.int(),
            logprobs=found.logprobs.clamp(min=LEAST).half(),
            lognorm=found.lognorm,
        ).only(finite & first_of_each(self.positions.samples))

    def begin(self, own: Knowledge) -> None:
        """Nobody has offered anything yet: learn labels, or this side's `own` predictions.

        Raises Diverged if there are none.
        """
        if not len(own.samples):
            raise Diverged(
                f"{self.context.name!r} has no finite predictions; a lower "
                "training.learning_rate may help."
            )
        known = self.positions.known(own)
        # Of a sample of which this side predicts nonsense, anybody knows more.
        self.own = own.losses[known.clamp(min=0)].masked_fill(known < 0, torch.inf)
        """(n,) this side's losses, in nats per byte."""
        self.best, self.teachers = self.own.clone(), torch.full_like(known, NOBODY)
        """(n,) the lowest loss so far, and the number of the teacher whose it is, or NOBODY."""
        self.learns = SoftTargets.of(self.targets, self.settings.logits)
        if self.settings.own in ("self", "mean"):
            self.learns = self._taken(own, torch.arange(len(self.targets)))
        if self.settings.own == "mean":
            self.mine = self.learns[torch.arange(len(self.targets))]  # a copy: offers change learns

    def offer(self, teacher: int, theirs: Knowledge, ids: Tensor | None = None) -> None:
        """Take over what a teacher knows better than the best so far (DualMinCE: the lowest loss,
        if it is lower than one's own).

        ids: the map of its vocabulary into this side's, unless it speaks in that already.
        """
        known = self.positions.known(theirs)
        if (known < 0).all():
            log.warning(
                "%s received predictions on %d samples, none of which it has: is the public "
                "set the same?",
                self.context.name,
                len(theirs.samples),
            )
            return
        losses = torch.where(known < 0, torch.inf, theirs.losses[known.clamp(min=0)])
        better = losses < self.best
        rows = self.positions.of_samples(better)
        self.learns[rows] = self._taken(theirs, rows, ids)
        self.best[better], self.teachers[better] = losses[better], teacher

    def _taken(self, theirs: Knowledge, rows: Tensor, ids: Tensor | None = None) -> SoftTargets:
        """What to learn at some positions from somebody's predictions; labels where they say
        nothing: where no position of theirs has read the same."""
        offsets = self.settings.align == "offsets"
        align = self.positions.by_offsets if offsets else self.positions.by_warping
        places = align(theirs)[rows]
        at, room = places.clamp(min=0), self.settings.logits - theirs.tokens.shape[1]
        tokens = F.pad(theirs.tokens[at], (0, room), value=-1)  # cut, if they are more than asked
        logprobs = F.pad(theirs.logprobs[at].float(), (0, room), value=-torch.inf)
        moved = translated(
            tokens,
            logprobs,
            theirs.lognorm[at],
            ids,
            self.settings.temperature,
            self.vocabulary_size,
        )
        moved.probs[places < 0] = 0
        return moved.or_else(SoftTargets.of(self.targets[rows], self.settings.logits))

    def distil(self, round: int) -> float:
        """Pass over the public samples, with a fresh optimiser; the mean loss, in nats per token.

        lambda * cross-entropy to the labels + (1 - lambda) * that to what was taken over, each a
        mean over a batch (the paper's objectives 2 and 3). Samples of which this side predicts
        nothing finite are left out.
        """
        context, training = self.context, self.context.training
        model, learns = self.model(), self._with_own()
        updater = Updater(context, self.adapter, of_roles("dense"))
        samples, losses = self.own.isfinite().nonzero()[:, 0], []
        batches: list[Tensor] = []
        for turn in range(self.settings.epochs):
            chance = generator(context.seed, "public", context.name, round, turn)
            order = torch.randperm(len(samples), generator=chance)
            batches += samples[order].split(training.batch)
        rate = learning_rate_beside(training, context.rounds, round, len(batches))
        for number, batch in enumerate(batches):
            shares = self._shares(batch)
            pieces = [
                Piece(
                    partial(self._loss, model, part, learns, shares, ("public", round, number, i)),
                    len(self.positions.of_samples(part)),
                )
                for i, part in enumerate(batch.split(training.at_once))
            ]
            losses.append(updater.update(pieces, rate(number), where="on the public samples"))
        return fmean(losses)

    def _shares(self, batch: Tensor) -> Tensor:
        """How much the distillation of each sample counts in a batch, (n,): 1, or with `own: none`
        what makes its mean one over the batch's taught positions, and 0 without a teacher."""
        if self.settings.own != "none":
            return torch.ones(len(self.samples))
        taught = self.teachers >= 0
        positions = self.positions.starts.diff()[batch]
        among = positions[taught[batch]].sum().clamp(min=1)
        return taught * (positions.sum() / among)

    def _loss(
        self,
        model: PreTrainedModel,
        chosen: Tensor,
        learns: SoftTargets,
        shares: Tensor,
        purpose: Purpose,
    ) -> Tensor:
        """Of some samples, by their numbers; shares as `_shares` gives them."""
        settings, device = self.settings, self.context.base.device
        rows = self.positions.of_samples(chosen)
        batch, learns = self.samples.batch(chosen).to(device), learns[rows]
        labels, task = self.targets[rows][:, None].to(device), settings.task_weight
        one = torch.ones(labels.shape, device=device)
        tokens, probs = learns.tokens.to(device), learns.probs.to(device)
        sizes = self.positions.starts.diff()[chosen]
        share = (1 - task) * shares[chosen].repeat_interleave(sizes).to(device)
        with training_pass(self.context, *purpose):
            if settings.temperature == 1:  # then both are one cross-entropy
                both = task + share
                tokens = torch.cat([labels, tokens], 1)
                probs = torch.cat([task * one, share[:, None] * probs], 1)
                probs = probs / both.clamp(min=TINY)[:, None]
                return soft_target_loss(model, batch, tokens, probs, weights=both)
            label_loss = soft_target_loss(model, batch, labels, one)
            return task * label_loss + soft_target_loss(
                model, batch, tokens, probs, settings.temperature, share
            )

    def _with_own(self) -> SoftTargets:
        """What was taken over; or its mean with this side's own, weighed by exp(-loss)."""
        if self.settings.own != "mean":
            return self.learns
        weight = (self.best - self.own).sigmoid().nan_to_num()
        return mixed(self.mine, self.learns, weight.repeat_interleave(self.positions.starts.diff()))

    def quality(self) -> dict[str, float]:
        """Of the samples that were taken over: how many; the share of their positions at which a
        teacher had read the same; the mean probability that its tokens there kept on the way."""
        rows = self.positions.of_samples(self.teachers >= 0)
        mass = self.learns.mass[rows]
        found = mass > 0
        return {
            "samples": int((self.teachers >= 0).sum()),
            "positions": found.float().mean().item() if len(rows) else 0.0,
            "mass": mass[found].mean().item() if found.any() else 0.0,
        }

    def _per_sample(self, values: Tensor) -> Tensor:
        """Sums over positions, (p,), for each sample: (n,)."""
        starts = self.positions.starts
        owners = torch.arange(len(self.samples)).repeat_interleave(starts.diff())
        return torch.zeros(len(self.samples)).index_add(0, owners, values)


def keys_of(*splits: Split) -> Tensor:
    """The keys of all samples of some splits: (any,) int64."""
    samples = [found for split in splits if (found := split.beginnings) is not None]
    found = [sample_keys(found.instructions) for found in samples]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *found])
