"""What a model knows of a set of prompts with answers, and how one side's lines up with another's.

The sets are the same text, tokenised by each side for itself. A sample is known by a hash of its
prompt and answer, a position within its answer by the characters that have been read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coterie.alignment.sequence import dynamic, ends, keyed, matched
from coterie.alignment.transfer import first
from coterie.data.examples import Examples
from coterie.data.items import Instruction
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.messages import MessageError


@dataclass(frozen=True)
class Knowledge:
    """A model's predictions of n samples' answers, at p positions in all.

    A sample whose answer has m tokens has m + 1 positions: before each of them, and before the end
    token.
    """

    samples: Tensor
    """(n,) int64: hashes of prompt and answer (`sample_keys`)."""
    losses: Tensor
    """(n,) float32: negative log-likelihood of the answer, in nats per UTF-8 byte."""
    starts: Tensor
    """(n + 1,) int64: where each sample's positions begin, and p."""
    ends: Tensor
    """(p,) int32: characters of the answer that have been read; -1 within a character."""
    tokens: Tensor
    """(p, k) int32: the likeliest next tokens, the likeliest first; -1 for none."""
    logprobs: Tensor
    """(p, k) float16: their log-probabilities."""
    lognorm: Tensor
    """(p,) float32: the log of the k probabilities' sum."""

    def only(self, samples: Tensor) -> "Knowledge":
        """Of these samples alone, a mask: (n,) bool."""
        rows = samples.repeat_interleave(self.starts.diff())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.starts.diff()[samples]])
        whole = (self.samples[samples], self.losses[samples], starts.cumsum(0))
        return Knowledge(
            *whole, self.ends[rows], self.tokens[rows], self.logprobs[rows], self.lognorm[rows]
        )

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a message or a state."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Knowledge":
        """From what `tensors` gave."""
        return cls(**{f.name: tensors[f.name] for f in fields(cls)})

    @classmethod
    def received(cls, tensors: Mapping[str, Tensor], vocabulary: int, most: int) -> "Knowledge":
        """From a message, whose tokens are of a vocabulary of that size, `most` at a position.

        Raises MessageError for anything that is no knowledge. That numbers are finite and of the
        right kind is the schema's to check.
        """
        if missing := {f.name for f in fields(cls)} - tensors.keys():
            raise MessageError(f"The tensor {min(missing)!r} is missing from the message.")
        found = cls.of(tensors)
        n, p = found.samples.numel(), found.ends.numel()
        k = found.tokens.shape[-1] if found.tokens.dim() == 2 else 0
        expected = {"samples": (n,), "losses": (n,), "starts": (n + 1,), "ends": (p,)}
        expected |= {"tokens": (p, k), "logprobs": (p, k), "lognorm": (p,)}
        for name, shape in expected.items():
            if tuple(getattr(found, name).shape) != shape:
                raise MessageError(f"The tensor {name!r} does not have the shape {shape}.")
        if not (k <= most and found._in_order() and found._possible(vocabulary)):
            raise MessageError("The predictions received are invalid.")
        return found

    def _in_order(self) -> bool:
        """Whether samples are there once, and their positions read on from one to the next."""
        n, p = len(self.samples), len(self.ends)
        inside = ((self.starts >= 0) & (self.starts <= p)).all()  # or a difference may overflow
        first_and_last = self.starts[0] == 0 and self.starts[-1] == p
        if not (inside and first_and_last and (self.starts.diff() > 0).all()):
            return False
        read = keyed(self.ends, self.starts, torch.arange(n))
        rising = (read[read >= 0].diff() > 0).all()
        whole = (self.ends[self.starts[1:] - 1] >= 0).all()  # at its end an answer has been read
        return bool(rising and whole) and len(self.samples.unique()) == n

    def _possible(self, vocabulary: int) -> bool:
        """Whether all numbers are within their bounds."""
        tokens = (self.tokens >= -1) & (self.tokens < vocabulary)
        sound = (tokens, self.losses >= 0, self.ends >= -1, self.lognorm < 1e-3)
        return all(bool(part.all()) for part in sound)


@dataclass(frozen=True)
class Positions:
    """One side's tokens of the samples' answers; see `Knowledge` for n, p and what is what."""

    samples: Tensor
    starts: Tensor
    ends: Tensor
    answers: tuple[str, ...]
    """(n,) as they were encoded."""

    @classmethod
    def of(cls, samples: Examples, tokenizer: PreTrainedTokenizerBase) -> "Positions":
        """As `data.examples` tokenised the samples with this tokenizer."""
        texts = [item.parts for item in samples.instructions]
        encoded = PartEncoder(bare_encoder(tokenizer)[0]).batch(texts)
        starts = torch.zeros(len(texts) + 1, dtype=torch.int64)
        starts[1:] = (samples.starts[1:] - samples.answers).cumsum(0)
        flat = [end for _, answer in encoded for end in ends(answer.offsets)]
        assert len(flat) == starts[-1], "answers are encoded as data.examples does"
        return cls(
            sample_keys(samples.instructions),
            starts,
            torch.tensor(flat, dtype=torch.int32),
            tuple(answer for _, answer in texts),
        )

    def of_samples(self, chosen: Tensor) -> Tensor:
        """The positions of some samples, (n,) bool or numbers, one sample after another."""
        numbers = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        lengths = self.starts.diff()[numbers]
        shifts = self.starts[numbers] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)

    def known(self, teacher: Knowledge) -> Tensor:
        """Which of the teacher's samples each of these is, or -1: (n,) int64."""
        return matched(self.samples, teacher.samples)

    def by_offsets(self, teacher: Knowledge) -> Tensor:
        """The teacher's position for each of these, where the same characters have been read, or
        -1: (p,) int64."""
        student = keyed(self.ends, self.starts, self.known(teacher))
        numbers = torch.arange(len(teacher.samples))
        return matched(student, keyed(teacher.ends, teacher.starts, numbers))

    def by_warping(self, teacher: Knowledge) -> Tensor:
        """The same by the paper's dynamic programme over the tokens' text."""
        places = torch.full(self.ends.shape, -1, dtype=torch.int64)
        for number, theirs in enumerate(self.known(teacher).tolist()):
            if theirs < 0:
                continue
            if teacher.ends[teacher.starts[theirs + 1] - 1] != len(self.answers[number]):
                continue  # it says that it has read something else
            mine, mine_text = _pieces(self, number, self.answers[number])
            other, other_text = _pieces(teacher, theirs, self.answers[number])
            found = torch.tensor(dynamic(mine_text, other_text))
            places[mine] = torch.where(found < 0, -1, other[found.clamp(min=0)])
        return places


def _pieces(of: Knowledge | Positions, number: int, answer: str) -> tuple[Tensor, list[str]]:
    """The positions of a sample at the ends of characters, and the text between them."""
    first, last = of.starts[number : number + 2].tolist()
    places = torch.arange(first, last)[of.ends[first:last] >= 0]
    read = of.ends[places].tolist()
    return places, [answer[a:b] for a, b in pairwise(read)]


def sample_keys(items: Sequence[Instruction]) -> Tensor:
    """Numbers by which two sides know that they speak of the same sample: (n,) int64, 0 or more."""
    texts = (f"{item.prompt}\0{item.answer}".encode() for item in items)
    hashes = (blake2b(text, digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(h, "big") >> 1 for h in hashes], dtype=torch.int64)


def first_of_each(keys: Tensor) -> Tensor:
    """Where a number stands for the first time: (n,) bool."""
    return first(keys[None])[0]
