"""Preferences: a prompt, the answer that was chosen, and one that was rejected.

They are learnt by direct preference optimisation (DPO, arXiv 2305.18290), which needs no model of
rewards: a policy's reward for an answer is beta times how much likelier the answer is than under a
reference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.examples import Encoding, Scorer
from coterie.data.files import Record
from coterie.data.groups import GroupBatch, Groups, grouped
from coterie.data.items import Conversation, Instruction, Ranking, Turn
from coterie.data.kinds.conversations import turns_of
from coterie.data.measured import Measured
from coterie.data.spec import PreferenceSpec
from coterie.errors import CoterieError
from coterie.losses.preferences import Reference, Rewards, preference_losses, rewards
from coterie.losses.tokens import sample_losses

ANSWERS = ("chosen", "rejected")
REMEDY = "Name the record's fields prompt, chosen and rejected: the run file cannot rename them."


def preferences(records: Sequence[Record], spec: PreferenceSpec) -> list[Ranking]:
    """The preference of every record, in their order.

    Raises CoterieError, naming the record, if it lacks a field, if a text or a list of messages is
    empty or wrong, if its answers are equal, or if their prompts differ.
    """
    return [_preference(replace(record, remedy=REMEDY), spec) for record in records]


def _preference(record: Record, spec: PreferenceSpec) -> Ranking:
    given = [record[field] for field in ANSWERS]
    # Conversations from their beginning, and not answers alone.
    whole = [isinstance(answer, list) and len(answer) > 1 for answer in given]
    prompt = record.fields.get("prompt")
    if any(whole) or isinstance(prompt, list) or isinstance(given[0], list):
        found = _conversations(record, prompt, all(whole))
    else:
        text, answers = _text(record, "prompt"), [_text(record, field) for field in ANSWERS]
        if spec.template == "chat":
            turns = [Turn("user", text)]
            found = [_conversation(record, turns, answer) for answer in answers]
        else:
            found = [Instruction(text, a.strip(), where=record.where) for a in answers]
    if found[0] == found[1]:
        raise CoterieError(
            f"{record.where}: chosen and rejected are the same answer; correct or remove the "
            "record."
        )
    return Ranking(tuple(found))


def _conversations(record: Record, prompt: Any, whole: bool) -> list[Conversation]:
    """Both conversations of a record with messages; `whole`: its answers begin with the prompt."""
    if not whole:
        said = isinstance(prompt, str)
        turns = [Turn("user", _text(record, "prompt"))] if said else turns_of(record, "prompt")
        return [_conversation(record, turns, _answer(record, field)) for field in ANSWERS]
    chosen, rejected = (turns_of(record, field) for field in ANSWERS)
    before = chosen[:-1]
    if isinstance(prompt, list):
        alike = turns_of(record, "prompt") == before
    else:  # some data sets repeat what the user asks
        alike = prompt is None or prompt in (turn.content for turn in before)
    if before != rejected[:-1] or not alike:
        raise CoterieError(
            f"{record.where}: chosen and rejected answer different prompts; they must begin with "
            "the same turns, and differ in the last one alone."
        )
    return [_conversation(record, before, _said(record, t[-1:])) for t in (chosen, rejected)]


def _conversation(record: Record, turns: Sequence[Turn], answer: str) -> Conversation:
    if not turns or turns[-1].role != "user":
        raise CoterieError(
            f"{record.where}: the prompt does not end with a turn of the user's; correct it or "
            "remove the record."
        )
    return Conversation((*turns, Turn("assistant", answer.strip())), record.where)


def _answer(record: Record, field: str) -> str:
    """An answer, as a text or as a list of the assistant's turn."""
    if isinstance(record[field], list):
        return _said(record, turns_of(record, field))
    return _text(record, field)


def _said(record: Record, turns: Sequence[Turn]) -> str:
    if len(turns) != 1 or turns[0].role != "assistant":
        raise CoterieError(
            f"{record.where}: an answer must be one turn of the assistant's, the last of its "
            "conversation."
        )
    return turns[0].content


def _text(record: Record, field: str) -> str:
    """A field's text, which is not blank."""
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        wanted = "a text or a list of messages; fix or remove the record"
        raise record.unfit(field, value, wanted)
    return record.text([field])


@dataclass(frozen=True)
class PairBatch(GroupBatch):
    """What a preference loss is taken of: the chosen answer of a pair, then the rejected one."""

    reference: Reference

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Rewards]:
        """Return DPO's loss, a scalar with a gradient, and the rewards; see `dpo_loss`."""
        return dpo_loss(model, self)

    def only(self, rows: Tensor) -> Self:
        """Return some of the pairs, by their numbers."""
        return replace(super().only(rows), reference=self.reference.only(rows))


def dpo_loss(model: PreTrainedModel, batch: PairBatch) -> tuple[Tensor, Rewards]:
    """Return the mean over pairs of eq. 7, a scalar with a gradient, and the rewards without.

    An answer's log-likelihood is the sum over its tokens, what ends it included.
    """
    found = rewards(-sample_losses(model, batch.rows).view(-1, 2), batch.reference)
    loss = preference_losses(found.values, batch.reference.label_smoothing).mean()
    return loss, found._replace(values=found.values.detach())


@dataclass(frozen=True)
class Pairs(Groups):
    """Preferences as samples: the chosen answer of a pair, then the rejected one.

    reference: once it is known.
    """

    reference: Reference | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-likelihoods are still to be computed."""
        return self.reference is None

    def referenced(self, make: "Callable[[Pairs], Reference]") -> "Pairs":
        """Return the pairs with their reference."""
        return replace(self, reference=make(self)) if self.reference is None else self

    def digested(self) -> Iterator[bytes]:
        """Yield what identifies the split; every item is a pair."""
        yield from self.rows.digested()

    def only(self, chosen: Sequence[int]) -> Self:
        """Return these pairs, in this order."""
        numbers = torch.as_tensor(chosen)
        reference = None if self.reference is None else self.reference.only(numbers)
        return replace(super().only(chosen), reference=reference)

    def batch(self, chosen: Tensor) -> PairBatch:
        """Return these pairs, padded at their ends to the longest of them."""
        assert self.reference is not None, "engines compute it before anything is learnt"
        return PairBatch(*self.rows_in(chosen), self.reference.only(chosen))

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the pairs, and figures for reports."""
        assert self.reference is not None, "engines compute it before anything is scored"
        logprobs = -scorer.losses(self.rows, 2 * scorer.batch).view(-1, 2)
        found = rewards(logprobs, self.reference)
        losses = preference_losses(found.values, self.reference.label_smoothing)
        counts = {
            "pairs": len(losses),
            "dpo_loss": losses.mean().item(),
            "reward_margin": found.margins.mean().item(),
        }
        preferred = found.preferred.tolist()
        # Where all margins are 0, whatever they are rounded to, the loss is known.
        loss = math.log(2) if {*preferred} == {0.5} else counts["dpo_loss"]
        nats, tokens = -logprobs[:, 0], self.best.lengths
        return Measured(nats, tokens, preferred=preferred, loss=loss), counts


class Preferences(PreferenceSpec):
    """A prompt with a chosen and a rejected answer."""

    def has_chats(self, items: Sequence[Ranking]) -> bool:
        """Return whether an item has messages, or all are rendered as a user's turn."""
        return self.chats or any(isinstance(item.answers[0], Conversation) for item in items)

    def used(self) -> set[str]:
        """Return the fields of a record."""
        return {"prompt", *ANSWERS}

    def items(self, records: Sequence[Record]) -> list[Ranking]:
        """Return the preference of every record."""
        return preferences(records, self)

    def encode(self, items: Sequence[Ranking], how: Encoding) -> Pairs:
        """Return the pairs as tokens, without their reference."""
        return Pairs(*grouped(items, how, "pair"))
