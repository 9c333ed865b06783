"""Prompts with their answers, and conversations, as tokens; the loss counts the answers alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.data.batch import Batch
from coterie.data.chat import ChatTemplate
from coterie.data.items import Conversation, Instruction


@dataclass(frozen=True)
class Examples:
    """Samples, one after another: a first token, the prompt, the answer, the end token; or a
    conversation as its template renders it, to the end of its last answer.

    ids: (N,) int32. starts: (n + 1,) int64, where each sample begins, and N. answers: (n,) int64,
    where each one's last answer begins. counted: (N,) bool, the tokens of all answers with what
    ends them. sizes: (n,) int64, UTF-8 bytes of each one's answers. too_long: how many did not fit.
    cut: how many conversations were cut into several samples. template: of conversations.
    """

    ids: Tensor
    starts: Tensor
    answers: Tensor
    counted: Tensor
    sizes: Tensor
    items: tuple[Instruction | Conversation, ...]
    too_long: int = 0
    cut: int = 0
    template: ChatTemplate | None = None

    def __len__(self) -> int:
        """How many samples."""
        return len(self.items)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The items of samples that are prompts with answers."""
        found = tuple(item for item in self.items if isinstance(item, Instruction))
        assert len(found) == len(self), "asked for where there are no conversations"
        return found

    @property
    def markers(self) -> tuple[str, ...]:
        """All that ends answers in conversations, as some templates have another inside one."""
        return () if self.template is None else self.template.markers

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all answers."""
        return int(self.sizes.sum())

    @property
    def lengths(self) -> Tensor:
        """Tokens of each one's answers, ends included: what a loss or a score is over; (n,)
        int64."""
        return torch.nn.functional.pad(self.counted.cumsum(0), (1, 0))[self.starts].diff()

    def only(self, chosen: Sequence[int]) -> "Examples":
        """These samples, in this order."""
        bounds = [(int(self.starts[n]), int(self.starts[n + 1])) for n in chosen]
        starts = torch.tensor([0, *(end - start for start, end in bounds)]).cumsum(0)
        inside = self.answers - self.starts[:-1]
        rows = torch.as_tensor(chosen)
        return Examples(
            torch.cat([self.ids[start:end] for start, end in bounds]),
            starts,
            starts[:-1] + inside[rows],
            torch.cat([self.counted[start:end] for start, end in bounds]),
            self.sizes[rows],
            tuple(self.items[n] for n in chosen),
            self.too_long,
            self.cut,
            self.template,
        )

    def sample(self, batch: int, chance: torch.Generator) -> Batch:
        """Samples at random, drawn with replacement."""
        return self.batch(torch.randint(len(self), (batch,), generator=chance))

    def batch(self, chosen: Tensor | range) -> Batch:
        """These samples, padded at their ends to the longest of them."""
        chosen = torch.as_tensor(chosen)
        starts, ends = self.starts[chosen], self.starts[chosen + 1]
        place = torch.arange(int((ends - starts).max()))
        inside = place < (ends - starts)[:, None]
        places = (starts[:, None] + place).clamp(max=len(self.ids) - 1)
        counted = inside & self.counted[places]
        return Batch(self.ids[places].long() * inside, counted[:, 1:], inside[:, 1:])


def joined(parts: Sequence[Examples]) -> Examples:
    """Several clients' samples as one client's."""
    offsets = torch.tensor([0, *(len(part.ids) for part in parts)]).cumsum(0)
    shifted = list(zip(parts, offsets.tolist(), strict=False))
    return Examples(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.starts[:-1] + offset for part, offset in shifted] + [offsets[-1:]]),
        torch.cat([part.answers + offset for part, offset in shifted]),
        torch.cat([part.counted for part in parts]),
        torch.cat([part.sizes for part in parts]),
        tuple(item for part in parts for item in part.items),
        sum(part.too_long for part in parts),
        sum(part.cut for part in parts),
        parts[0].template,
    )


def samples_of(
    rows: Sequence[Sequence[tuple[list[int], bool]]],
    items: Sequence[Instruction | Conversation],
    sizes: Sequence[int],
    too_long: int,
    cut: int = 0,
) -> Examples:
    """Samples of parts, each its ids and whether they count; the last part is the last answer."""
    parts = [part for row in rows for part in row]
    counted = [said for ids, said in parts for _ in ids]
    starts = torch.tensor([0, *(sum(len(ids) for ids, _ in row) for row in rows)]).cumsum(0)
    last = torch.tensor([len(row[-1][0]) for row in rows])
    return Examples(
        torch.tensor([id for ids, _ in parts for id in ids], dtype=torch.int32),
        starts,
        starts[1:] - last,
        torch.tensor(counted),
        torch.tensor(sizes),
        tuple(items),
        too_long,
        cut,
    )
