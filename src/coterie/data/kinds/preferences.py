"""Preferences: a prompt, the answer that was chosen, and one that was rejected.

They are learnt by direct preference optimisation (DPO, arXiv 2305.18290), which needs no model of
rewards: a policy's reward for an answer is beta times how much likelier the answer is than under a
reference.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.chat import parts_of
from coterie.data.examples import Encoding, Examples, Sample, Scorer, even, left_of, samples_of
from coterie.data.files import Record
from coterie.data.items import Conversation, Instruction, Preference, Turn
from coterie.data.kinds.conversations import turns_of
from coterie.data.measured import Measured
from coterie.data.parts import PartEncoder
from coterie.data.spec import PreferenceSpec
from coterie.errors import CoterieError
from coterie.losses.preferences import Reference, Rewards, preference_losses, rewards
from coterie.losses.tokens import Batch, sample_losses

ANSWERS = ("chosen", "rejected")
REMEDY = "Name the record's fields prompt, chosen and rejected: the run file cannot rename them."


def preferences(records: Sequence[Record], spec: PreferenceSpec) -> list[Preference]:
    """The preference of every record, in their order.

    Raises CoterieError, naming the record, if it lacks a field, if a text or a list of messages is
    empty or wrong, if its answers are equal, or if their prompts differ.
    """
    return [_preference(replace(record, remedy=REMEDY), spec) for record in records]


def _preference(record: Record, spec: PreferenceSpec) -> Preference:
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
    chosen, rejected = found
    if chosen == rejected:
        raise CoterieError(
            f"{record.where}: chosen and rejected are the same answer; correct or remove the "
            "record."
        )
    return Preference(chosen, rejected)


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


class PairBatch(NamedTuple):
    """What a preference loss is taken of."""

    both: Batch
    """2 n samples: the chosen answer of pair i in row 2 i, the rejected one in row 2 i + 1."""
    reference: Reference

    @property
    def ids(self) -> Tensor:
        """A row for each pair: its chosen sample's tokens."""
        return self.both.ids[::2]

    @property
    def chosen(self) -> Batch:
        """The samples with the chosen answers."""
        return self.both.only(slice(None, None, 2))

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Rewards]:
        """Return DPO's loss, a scalar with a gradient, and the rewards; see `dpo_loss`."""
        return dpo_loss(model, self)

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Return the loss, without a gradient, of pairs read `at_once`."""
        parts = [(p.terms, dpo_loss(model, p.to(device))[0]) for p in self.split(at_once)]
        return sum(terms * loss.item() for terms, loss in parts) / self.terms

    @property
    def read(self) -> Batch:
        """The samples whose tokens a model learns to write: those with the chosen answers."""
        return self.chosen

    @property
    def terms(self) -> int:
        """Of how many terms the loss is the mean: pairs."""
        return len(self.reference.logprobs)

    def to(self, device: torch.device) -> Self:
        """The same with its samples on a device."""
        return self._replace(both=self.both.to(device))

    def by_length(self) -> Self:
        """The same pairs, the shortest first."""
        assert self.both.real is not None
        longest = self.both.real.sum(1).view(-1, 2).amax(1)
        return self.only(longest.argsort(stable=True))

    def only(self, rows: Tensor) -> Self:
        """Some of the pairs, by their numbers."""
        return type(self)(self.both.only(both_rows(rows)), self.reference.only(rows))

    def split(self, size: int) -> Iterator[Self]:
        """The same in batches of at most `size` pairs."""
        for start in range(0, self.terms, size):
            yield self.only(torch.arange(start, min(start + size, self.terms)))


def dpo_loss(model: PreTrainedModel, batch: PairBatch) -> tuple[Tensor, Rewards]:
    """Return the mean over pairs of eq. 7, a scalar with a gradient, and the rewards without.

    An answer's log-likelihood is the sum over its tokens, what ends it included.
    """
    found = rewards(-sample_losses(model, batch.both).view(-1, 2), batch.reference)
    loss = preference_losses(found.values, batch.reference.label_smoothing).mean()
    return loss, found._replace(values=found.values.detach())


def both_rows(pairs: Tensor) -> Tensor:
    """The rows of some pairs' samples among all: (2 n,)."""
    return torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()


@dataclass(frozen=True)
class Pairs:
    """Preferences as samples.

    both: 2 n samples, the chosen answer of pair i at 2 i and the rejected one at 2 i + 1; only
    the last answer of a conversation counts. too_long: how many pairs did not fit, of which one
    answer or both were too long. reference: once it is known.
    """

    both: Examples
    items: tuple[Preference, ...]
    too_long: int = 0
    reference: Reference | None = None

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.items)

    @property
    def ids(self) -> Tensor:
        """All tokens: (N,) int32."""
        return self.both.ids

    @property
    def chosen(self) -> Examples:
        """The samples with the chosen answers."""
        return self.both.only(range(0, len(self.both), 2))

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the chosen answers."""
        return self.chosen.bytes

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """No pair is a question with a right answer."""
        return ()

    @property
    def beginnings(self) -> Examples:
        """The samples that are read as texts: those with the chosen answers."""
        return self.chosen

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-likelihoods are still to be computed."""
        return self.reference is None

    def referenced(self, make: "Callable[[Pairs], Reference]") -> "Pairs":
        """Return the pairs with their reference."""
        return replace(self, reference=make(self)) if self.reference is None else self

    def samples(self, window: int, step: int) -> "Pairs":
        """Return what a batch is drawn from: whole pairs, whatever the window."""
        return self

    def without(self, taken: Tensor, window: int) -> "Pairs":
        """Return the pairs but those with the numbers `taken`, in their order."""
        return self.only(left_of(taken, len(self)))

    def few(self, most: int, window: int, context: int) -> "Pairs":
        """Return at most so many pairs, evenly spaced."""
        return self.only(even(len(self), most).tolist())

    def sample_tokens(self, window: int) -> float:
        """Return the tokens that a pair has, on average."""
        return len(self.ids) / len(self)

    def counts(self) -> dict[str, int]:
        """Return what a run folder records of the split, beside its tokens."""
        return {"samples": len(self), "too_long": self.too_long}

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return what is compared with other splits: the pairs."""
        return self.items

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield what identifies the split: tokens, and what makes pairs of them."""
        yield self.ids.numpy().tobytes()
        yield from list(self.both.digested())[1:]

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the pairs, and figures for reports."""
        assert self.reference is not None, "engines compute it before anything is scored"
        logprobs = -scorer.losses(self.both, 2 * scorer.batch).view(-1, 2)
        found = rewards(logprobs, self.reference)
        losses = preference_losses(found.values, self.reference.label_smoothing)
        counts = {
            "pairs": len(losses),
            "dpo_loss": losses.mean().item(),
            "reward_margin": found.margins.mean().item(),
        }
        preferred = found.preferred.tolist()
        return Measured(-logprobs[:, 0], self.chosen.lengths, preferred=preferred), counts

    def only(self, chosen: Sequence[int]) -> "Pairs":
        """These pairs, in this order."""
        rows = torch.as_tensor(chosen)
        return replace(
            self,
            both=self.both.only(both_rows(rows).tolist()),
            items=tuple(self.items[n] for n in chosen),
            reference=None if self.reference is None else self.reference.only(rows),
        )

    def batch(self, chosen: Tensor | range) -> PairBatch:
        """These pairs, padded at their ends to the longest of them."""
        rows = torch.as_tensor(chosen)
        assert self.reference is not None, "engines compute it before anything is learnt"
        return PairBatch(self.both.batch(both_rows(rows)), self.reference.only(rows))


def pairs(items: Sequence[Preference], how: Encoding) -> Pairs:
    """Preferences as tokens; pairs with a sample that does not fit are dropped and counted.

    Raises CoterieError if none is left.
    """
    ids_of, template = PartEncoder(how.encoder).ids, how.template
    first, end = how.ends

    def read(item: Instruction | Conversation) -> Sample:
        """An item as tokens, of which those of its last answer count."""
        texts = parts_of(item, template)
        ids = ids_of(texts)
        if isinstance(item, Instruction):
            ids = [[first, *ids[0]], [*ids[1], end]]
            size = len(item.answer.encode())
        else:
            assert template is not None, "there are conversations"
            size = len(texts[-1].removesuffix(template.around[1]).strip().encode())
        *before, last = ids
        return Sample([*((part, False) for part in before), (last, True)], item, size)

    kept: list[Preference] = []
    samples: list[Sample] = []
    too_long = 0
    for item in items:
        both = [read(item.chosen), read(item.rejected)]
        if max(sample.tokens for sample in both) > how.window + 1:
            too_long += 1
        elif how.limit is None or len(kept) < how.limit:
            kept.append(item)
            samples += both
    if not kept:
        size = f"at most {how.window} tokens ({len(items)} are longer)"
        fitting = f"pair whose two samples have {size}; raise data.window"
        raise how.nothing(items, fitting, "pairs; add some")
    return Pairs(samples_of(samples), tuple(kept), too_long)
