"""Preferences: a prompt with a chosen and a rejected answer.

Models learn preferences by direct preference optimisation (DPO, arXiv 2305.18290), which needs no
reward model: the reward of an answer is beta times the logarithm of its likelihood ratio between
the policy (the model in training) and a reference model.
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
REMEDY = (
    'The record\'s fields must be named "prompt", "chosen" and "rejected"; the run file cannot '
    "change these names."
)


def preferences(records: Sequence[Record], spec: PreferenceSpec) -> list[Ranking]:
    """Read the prompt, the chosen answer and the rejected answer of every record.

    Raises:
        CoterieError: A record lacks a field; the text or the messages in a field are empty or
            invalid; the two answers of a record are equal; or the prompts of the two answers
            differ.
    """
    return [_preference(replace(record, remedy=REMEDY), spec) for record in records]


def _preference(record: Record, spec: PreferenceSpec) -> Ranking:
    values = [record[field] for field in ANSWERS]
    # A list of several turns contains the prompt as well as the answer.
    with_prompt = [isinstance(value, list) and len(value) > 1 for value in values]
    prompt = record.fields.get("prompt")
    if any(with_prompt) or isinstance(prompt, list) or isinstance(values[0], list):
        samples = _conversations(record, prompt, all(with_prompt))
    else:
        text, answers = _text(record, "prompt"), [_text(record, field) for field in ANSWERS]
        if spec.template == "chat":
            turns = [Turn("user", text)]
            samples = [_conversation(record, turns, answer) for answer in answers]
        else:
            samples = [Instruction(text, a.strip(), where=record.where) for a in answers]
    if samples[0] == samples[1]:
        raise CoterieError(
            f"{record.where}: chosen and rejected are the same answer; correct or remove the "
            "record."
        )
    return Ranking(tuple(samples))


def _conversations(record: Record, prompt: Any, with_prompt: bool) -> list[Conversation]:
    """Return the chosen and the rejected conversation of a record that contains messages.

    Args:
        record: The record.
        prompt: The value of the record's field `prompt`, or None if the field is missing.
        with_prompt: Whether `chosen` and `rejected` are conversations that begin with the prompt.
    """
    if not with_prompt:
        if isinstance(prompt, str):
            turns = [Turn("user", _text(record, "prompt"))]
        else:
            turns = turns_of(record, "prompt")
        return [_conversation(record, turns, _answer(record, field)) for field in ANSWERS]
    chosen, rejected = (turns_of(record, field) for field in ANSWERS)
    opening = chosen[:-1]
    if isinstance(prompt, list):
        agrees = turns_of(record, "prompt") == opening
    else:  # in some data sets, `prompt` repeats the content of a turn
        agrees = prompt is None or prompt in (turn.content for turn in opening)
    if opening != rejected[:-1] or not agrees:
        raise CoterieError(
            f'{record.where}: the fields "chosen", "rejected" and (if present) "prompt" contain '
            "different prompts; correct the record so that chosen and rejected differ only in the "
            "last turn, and prompt agrees with the turns before it."
        )
    return [_conversation(record, opening, _only(record, t[-1:])) for t in (chosen, rejected)]


def _conversation(record: Record, turns: Sequence[Turn], answer: str) -> Conversation:
    if not turns or turns[-1].role != "user":
        raise CoterieError(
            f"{record.where}: the prompt does not end with a turn of the user; correct it or "
            "remove the record."
        )
    return Conversation((*turns, Turn("assistant", answer.strip())), record.where)


def _answer(record: Record, field: str) -> str:
    """Return the answer in a field that contains text or a single assistant turn."""
    if isinstance(record[field], list):
        return _only(record, turns_of(record, field))
    return _text(record, field)


def _only(record: Record, turns: Sequence[Turn]) -> str:
    """Return the content of the only turn, which must be an assistant turn."""
    if len(turns) != 1 or turns[0].role != "assistant":
        raise CoterieError(
            f"{record.where}: each answer must be exactly one assistant turn at the end of the "
            "conversation; correct or remove the record."
        )
    return turns[0].content


def _text(record: Record, field: str) -> str:
    """Return the text of a field; refuse blank text."""
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        expected = "text or a list of messages; fix or remove the record"
        raise record.unfit(field, value, expected)
    return record.text([field])


@dataclass(frozen=True)
class PairBatch(GroupBatch):
    """A batch of pairs of answers, for a preference loss.

    In each pair, the sample with the chosen answer is directly before the sample with the rejected
    answer.
    """

    reference: Reference
    """The reference model's log-likelihoods of the answers, and the settings of the loss."""

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Rewards]:
        return dpo_loss(model, self)

    def only(self, rows: Tensor) -> Self:
        return replace(super().only(rows), reference=self.reference.only(rows))


def dpo_loss(model: PreTrainedModel, batch: PairBatch) -> tuple[Tensor, Rewards]:
    """Compute the DPO loss (arXiv 2305.18290, eq. 7), averaged over the pairs of a batch.

    The log-likelihood of an answer is the sum of the log-probabilities of the answer's tokens,
    including the token that ends the answer.

    Returns:
        The loss, a scalar with a gradient; and the rewards of the answers, without gradients, on
        the CPU. If the model is on a GPU, the rewards are valid only after the loss has been read.
    """
    pair_rewards = rewards(-sample_losses(model, batch.rows).view(-1, 2), batch.reference)
    loss = preference_losses(pair_rewards.values, batch.reference.label_smoothing).mean()
    values = pair_rewards.values.detach().to("cpu", non_blocking=True)
    return loss, pair_rewards._replace(values=values)


@dataclass(frozen=True)
class Pairs(Groups):
    """A split of pairs of answers.

    In each pair, the sample with the chosen answer is directly before the sample with the rejected
    answer.
    """

    reference: Reference | None = None
    """The reference model's log-likelihoods, or None if no engine has computed them yet."""

    @property
    def needs_reference(self) -> bool:
        return self.reference is None

    def referenced(self, make: "Callable[[Pairs], Reference]") -> "Pairs":
        return replace(self, reference=make(self)) if self.reference is None else self

    def digested(self) -> Iterator[bytes]:
        # Unlike groups of any size, pairs are identified by their tokens alone.
        yield from self.rows.digested()

    def only(self, chosen: Sequence[int]) -> Self:
        numbers = torch.as_tensor(chosen)
        reference = None if self.reference is None else self.reference.only(numbers)
        return replace(super().only(chosen), reference=reference)

    def batch(self, chosen: Tensor) -> PairBatch:
        assert self.reference is not None, "the split has no reference log-likelihoods"
        return PairBatch(*self.rows_in(chosen), self.reference.only(chosen))

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        assert self.reference is not None, "the split has no reference log-likelihoods"
        logprobs = -scorer.losses(self.rows, 2 * scorer.batch).view(-1, 2)
        pair_rewards = rewards(logprobs, self.reference)
        losses = preference_losses(pair_rewards.values, self.reference.label_smoothing)
        counts = {
            "pairs": len(losses),
            "dpo_loss": losses.mean().item(),
            "reward_margin": pair_rewards.margins.mean().item(),
        }
        preferred = pair_rewards.preferred.tolist()
        # If all margins are 0 up to rounding, the loss is log 2 exactly.
        loss = math.log(2) if {*preferred} == {0.5} else counts["dpo_loss"]
        nats, tokens = -logprobs[:, 0], self.best.lengths
        return Measured(nats, tokens, preferred=preferred, loss=loss), counts


class Preferences(PreferenceSpec):
    """Prompts with a chosen and a rejected answer."""

    def has_chats(self, items: Sequence[Ranking]) -> bool:
        return self.chats or any(isinstance(item.answers[0], Conversation) for item in items)

    def used(self) -> set[str]:
        return {"prompt", *ANSWERS}

    def items(self, records: Sequence[Record]) -> list[Ranking]:
        return preferences(records, self)

    def encode(self, items: Sequence[Ranking], how: Encoding) -> Pairs:
        return Pairs(*grouped(items, how, "pair"))
