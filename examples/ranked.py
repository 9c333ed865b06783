"""Ranked lists of answers: `{"prompt": ..., "answers": [best, ..., worst]}`.

A model learns them by the likelihood of the ranking under the model of Plackett and Luce, as in DPO
(arXiv 2305.18290, appendix A.3, eq. 18), with the reward of SimPO (arXiv 2405.14734, eq. 4), which
needs no reference: beta times the mean log-probability of an answer's tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from pydantic import PositiveFloat
from torch import Tensor
from transformers import PreTrainedModel

from coterie import DataKind
from coterie.data.examples import Encoding, Scorer
from coterie.data.files import Record
from coterie.data.groups import GroupBatch, Groups, by_item, grouped
from coterie.data.items import Instruction, Ranking
from coterie.data.measured import Measured, Needs
from coterie.losses.tokens import sample_losses


class Rankings(DataKind):
    """Prompts with two answers or more, the best first."""

    name: ClassVar[str] = "rankings"
    summary: ClassVar[str] = "a prompt with its answers, the best first"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "pairs"})
    compares: ClassVar[bool] = True
    rows: ClassVar[int] = 4

    beta: PositiveFloat = 2.0
    """reward of an answer per nat of its tokens' mean log-probability"""

    def used(self) -> set[str]:
        return {"prompt", "answers"}

    def items(self, records: Iterable[Record]) -> list[Ranking]:
        return [_ranking(record) for record in records]

    def encode(self, items: Sequence[Ranking], how: Encoding) -> "RankedSplit":
        return RankedSplit(*grouped(items, how, "ranking"), beta=self.beta)


def _ranking(record: Record) -> Ranking:
    prompt, given = record.text(["prompt"]), record["answers"]
    listed = cast("list[object]", given) if isinstance(given, list) else []
    texts = [text.strip() for text in listed if isinstance(text, str)]
    if len(texts) < 2 or not all(texts) or len(texts) < len(listed):
        wanted = "a list of at least two texts, the best first; fix or remove the record"
        raise record.unfit("answers", given, wanted)
    return Ranking(tuple(Instruction(prompt, text, where=record.where) for text in texts))


@dataclass(frozen=True)
class RankedBatch(GroupBatch):
    """The ranked answers of a training step."""

    beta: float

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, None]:
        assert self.rows.counted is not None
        scores = -self.beta * sample_losses(model, self.rows) / self.rows.counted.sum(1)
        return plackett_luce(by_item(scores, self.sizes)).mean(), None


@dataclass(frozen=True)
class RankedSplit(Groups):
    """Ranked answers as tokens."""

    beta: float = 2.0

    def batch(self, chosen: Tensor) -> RankedBatch:
        return RankedBatch(*self.rows_in(chosen), self.beta)

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        nats = scorer.losses(self.rows, 4 * scorer.batch)
        scores = by_item(-self.beta * nats / self.rows.lengths, self.sizes)
        loss, ordered = plackett_luce(scores).mean().item(), [_ordered(own) for own in scores]
        best = torch.stack([own[0] for own in by_item(nats, self.sizes)])
        measured = Measured(best, self.best.lengths, preferred=ordered, loss=loss)
        return measured, {"rankings": len(self), "ranking_loss": loss}


def plackett_luce(rankings: Sequence[Tensor]) -> Tensor:
    """Return -log of eq. 18 for rankings of scores, which are the best answer's first: (n,)."""
    return torch.stack(
        [torch.stack([s[k:].logsumexp(0) - s[k] for k in range(len(s))]).sum() for s in rankings]
    )


def _ordered(scores: Tensor) -> float:
    """Return the share of pairs of answers in the right order; equal scores are half right."""
    better, worse = torch.triu_indices(len(scores), len(scores), 1)
    return ((1 + (scores[better] - scores[worse]).sign()) / 2).mean().item()
