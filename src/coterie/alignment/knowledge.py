"""A model's predictions of the answers to prompts, and their alignment with another tokenizer.

Teacher and student tokenise the same samples separately. A sample is identified by a hash of its
prompt and answer. A position in an answer is identified by the number of characters of the answer
that precede the position.
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
    """A model's top-k predictions for the next token, at all positions in the answers of n samples.

    All answers together have p positions. An answer that consists of m tokens and an end token has
    m + 1 positions: one before each of the m tokens, and one before the end token.
    """

    samples: Tensor
    """(n,) int64: a hash of each sample's prompt and answer; see `sample_keys`."""
    losses: Tensor
    """(n,) float32: negative log-likelihood of each answer, in nats per UTF-8 byte."""
    starts: Tensor
    """(n + 1,) int64: the index of each sample's first position; the last entry is p."""
    ends: Tensor
    """(p,) int32: number of the answer's characters before each position, or -1 for positions
    inside a character; see `alignment.sequence.ends`."""
    tokens: Tensor
    """(p, k) int32: the k most probable next tokens, in descending order of probability; -1 in
    unused entries."""
    logprobs: Tensor
    """(p, k) float16: log-probabilities of `tokens`."""
    lognorm: Tensor
    """(p,) float32: logarithm of the sum of the k probabilities."""

    def only(self, samples: Tensor) -> "Knowledge":
        """Return the predictions for selected samples.

        Args:
            samples: (n,) bool, a mask of the samples to select.
        """
        rows = samples.repeat_interleave(self.starts.diff())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.starts.diff()[samples]])
        by_sample = (self.samples[samples], self.losses[samples], starts.cumsum(0))
        return Knowledge(
            *by_sample, self.ends[rows], self.tokens[rows], self.logprobs[rows], self.lognorm[rows]
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors in a dictionary keyed by name, for a message or a state."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Knowledge":
        """Create knowledge from a dictionary returned by `tensors()`."""
        return cls(**{f.name: tensors[f.name] for f in fields(cls)})

    @classmethod
    def received(cls, tensors: Mapping[str, Tensor], vocabulary: int, most: int) -> "Knowledge":
        """Create knowledge from a message and validate it.

        The schema has already checked that the tensors are finite and have the right dtypes.

        Args:
            tensors: The group of tensors that the message contains.
            vocabulary: Size of the sender's vocabulary.
            most: Maximum number k of tokens per position.

        Raises:
            MessageError: A tensor is missing, has an invalid shape, or contains invalid values.
        """
        if missing := {f.name for f in fields(cls)} - tensors.keys():
            raise MessageError(f"The tensor {min(missing)!r} is missing from the message.")
        knowledge = cls.of(tensors)
        n, p = knowledge.samples.numel(), knowledge.ends.numel()
        k = knowledge.tokens.shape[-1] if knowledge.tokens.dim() == 2 else 0
        expected = {"samples": (n,), "losses": (n,), "starts": (n + 1,), "ends": (p,)}
        expected |= {"tokens": (p, k), "logprobs": (p, k), "lognorm": (p,)}
        for name, shape in expected.items():
            if tuple(getattr(knowledge, name).shape) != shape:
                raise MessageError(f"The tensor {name!r} does not have the shape {shape}.")
        if not (k <= most and knowledge._is_ordered() and knowledge._is_in_bounds(vocabulary)):
            raise MessageError("The received predictions are invalid.")
        return knowledge

    def _is_ordered(self) -> bool:
        """Return whether all samples are unique and the positions of each sample are ordered.

        In each sample, the positions must advance from the start to the end of the answer.
        """
        n, p = len(self.samples), len(self.ends)
        # Without this check, the differences below could overflow.
        inside = ((self.starts >= 0) & (self.starts <= p)).all()
        first_and_last = self.starts[0] == 0 and self.starts[-1] == p
        if not (inside and first_and_last and (self.starts.diff() > 0).all()):
            return False
        read = keyed(self.ends, self.starts, torch.arange(n))
        rising = (read[read >= 0].diff() > 0).all()
        # The last position of an answer is never inside a character.
        complete = (self.ends[self.starts[1:] - 1] >= 0).all()
        return bool(rising and complete) and len(self.samples.unique()) == n

    def _is_in_bounds(self, vocabulary: int) -> bool:
        """Return whether the values of all tensors are within their bounds."""
        tokens = (self.tokens >= -1) & (self.tokens < vocabulary)
        checks = (tokens, self.losses >= 0, self.ends >= -1, self.lognorm < 1e-3)
        return all(bool(check.all()) for check in checks)


@dataclass(frozen=True)
class Positions:
    """The positions of one tokenizer's tokens in the answers of n samples.

    `samples`, `starts`, `ends`, n and p have the same meaning as in `Knowledge`.
    """

    samples: Tensor
    starts: Tensor
    ends: Tensor
    answers: tuple[str, ...]
    """The n answers, in the form in which they were tokenised."""

    @classmethod
    def of(cls, samples: Examples, tokenizer: PreTrainedTokenizerBase) -> "Positions":
        """Compute the positions of a tokenizer's tokens in the answers of samples.

        Args:
            samples: Prompts with answers, which must have been encoded with `tokenizer`.
            tokenizer: The tokenizer whose tokens' positions are computed.
        """
        texts = [item.parts for item in samples.instructions]
        encoded = PartEncoder(bare_encoder(tokenizer)[0]).batch(texts)
        starts = torch.zeros(len(texts) + 1, dtype=torch.int64)
        starts[1:] = (samples.starts[1:] - samples.answers).cumsum(0)
        flat = [end for _, answer in encoded for end in ends(answer.offsets)]
        assert len(flat) == starts[-1], "answers must be encoded as data.examples encodes them"
        return cls(
            sample_keys(samples.instructions),
            starts,
            torch.tensor(flat, dtype=torch.int32),
            tuple(answer for _, answer in texts),
        )

    def of_samples(self, chosen: Tensor) -> Tensor:
        """Return the indices of all positions in selected samples, sample by sample.

        Args:
            chosen: Either a mask of the samples, (n,) bool, or the indices of the samples.
        """
        numbers = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        lengths = self.starts.diff()[numbers]
        shifts = self.starts[numbers] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)

    def known(self, teacher: Knowledge) -> Tensor:
        """Return the index of each sample among the teacher's samples.

        Returns:
            A tensor (n,) int64, which contains -1 for each sample that is not among the teacher's
            samples.
        """
        return matched(self.samples, teacher.samples)

    def by_offsets(self, teacher: Knowledge) -> Tensor:
        """Match each position of the student with a position of the teacher.

        This object contains the student's p positions. A position of the student matches a position
        of the teacher if both are preceded by the same number of characters of the same answer.

        Returns:
            A tensor (p,) int64, which contains the index of the teacher's position, or -1 if no
            position matches.
        """
        student = keyed(self.ends, self.starts, self.known(teacher))
        numbers = torch.arange(len(teacher.samples))
        return matched(student, keyed(teacher.ends, teacher.starts, numbers))

    def by_warping(self, teacher: Knowledge) -> Tensor:
        """Match each position of the student with a position of the teacher, as FedMKT does.

        This object contains the student's p positions. The positions are matched by dynamic time
        warping; see the function `dynamic`.

        Returns:
            A tensor (p,) int64, which contains the index of the teacher's position, or -1 if no
            position matches.
        """
        matches = torch.full(self.ends.shape, -1, dtype=torch.int64)
        for number, teacher_number in enumerate(self.known(teacher).tolist()):
            if teacher_number < 0:
                continue
            if teacher.ends[teacher.starts[teacher_number + 1] - 1] != len(self.answers[number]):
                continue  # the teacher's answer has another length, so its text differs
            positions, pieces = _pieces(self, number, self.answers[number])
            teacher_positions, teacher_pieces = _pieces(
                teacher, teacher_number, self.answers[number]
            )
            indices = torch.tensor(dynamic(pieces, teacher_pieces))
            matches[positions] = torch.where(
                indices < 0, -1, teacher_positions[indices.clamp(min=0)]
            )
        return matches


def _pieces(side: Knowledge | Positions, number: int, answer: str) -> tuple[Tensor, list[str]]:
    """Return the indices of a sample's positions, and the texts between consecutive positions.

    Positions inside a character are left out. A position is inside a character if the tokenizer
    splits the character into several tokens; see `alignment.sequence.ends`.

    Args:
        side: The positions of the teacher or of the student in all samples.
        number: The index of the sample in `side`.
        answer: The sample's answer.
    """
    first, last = side.starts[number : number + 2].tolist()
    positions = torch.arange(first, last)[side.ends[first:last] >= 0]
    read = side.ends[positions].tolist()
    return positions, [answer[a:b] for a, b in pairwise(read)]


def sample_keys(items: Sequence[Instruction]) -> Tensor:
    """Return hashes by which teacher and student identify samples.

    The hashes are a tensor (n,) int64 without negative numbers.
    """
    texts = (f"{item.prompt}\0{item.answer}".encode() for item in items)
    hashes = (blake2b(text, digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(h, "big") >> 1 for h in hashes], dtype=torch.int64)


def first_of_each(keys: Tensor) -> Tensor:
    """Return a mask, (n,) bool, that is True at the first occurrence of each key.

    Args:
        keys: (n,) int64, the keys, which may be repeated.
    """
    return first(keys[None])[0]
