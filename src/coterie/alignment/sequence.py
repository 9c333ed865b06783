"""Which prediction of a teacher goes to which of a student's, where both tokenise one text.

A text of m tokens has m + 1 positions: at position j its first j tokens have been read and what
comes next is predicted. Two tokenizers' positions belong together where the same text has been
read. Teacher and student read the same characters there, so what the one expects next is what the
other should.
"""

from collections.abc import Sequence

import torch
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from torch import Tensor

WITHIN = -1
"""In place of an end: the position lies within a character."""


def ends(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """How many characters have been read at each position: (m + 1,) from (m,) tokens' offsets.

    `WITHIN` where a character has been read in part (byte-level tokenizers spell an emoji with
    several tokens, all of which have its offsets), and at all but the last of several positions
    at the same end. So the ends that are left rise, from 0 to the last token's.
    """
    found = []
    read = 0
    for start, end in offsets:
        found.append(read if start >= read and end > read else WITHIN)
        read = max(read, end)
    return [*found, read]


def matched(student: Tensor, teacher: Tensor) -> Tensor:
    """Where the teacher has the student's number, or -1: (p,) int64.

    student: (p,), teacher: (q,) int64; -1 matches nothing. Of ends, it is the teacher's position at
    which the same text has been read; those of many texts may stand in one tensor if each text's
    are moved into a range of their own (`keyed`).
    """
    if not len(teacher):
        return torch.full_like(student, -1)
    order = teacher.argsort()
    ordered = teacher[order]
    place = torch.searchsorted(ordered, student).clamp(max=len(teacher) - 1)
    same = (ordered[place] == student) & (student >= 0)
    return torch.where(same, order[place], -1)


def keyed(ends: Tensor, starts: Tensor, keys: Tensor) -> Tensor:
    """Ends of many texts' positions, each text's in a range of its own: (p,) int64.

    ends: (p,); starts: (n + 1,) int64, where each text's positions begin; keys: (n,) int64, a
    number less than 2**31 by which teacher and student know a text, or -1.
    """
    texts = keys.repeat_interleave(starts.diff())
    return torch.where((ends < 0) | (texts < 0), -1, texts * 2**31 + ends)


def dynamic(student: Sequence[str], teacher: Sequence[str]) -> list[int]:
    """The same by the paper's dynamic programme: (m + 1,) positions of the teacher, or -1.

    student: its m tokens as text; teacher: its tokens. The two are warped onto each other, every
    token to one or more neighbours of the other side, so that the edit distances of the pairs sum
    to the least; a student's token that is paired with one teacher's token alone takes over what
    the teacher expects after that. Ties: the diagonal first, then the student's step (arXiv
    2406.02224, appendix A; the warping is that of Fu et al., arXiv 2301.12726). Position 0, before
    both, is the teacher's position 0.
    """
    if not student or not teacher:
        return [0, *(-1 for _ in student)]
    cost = cdist(student, teacher, scorer=Levenshtein.distance).tolist()
    m, n = len(student), len(teacher)
    total = [[0.0] + [float("inf")] * n] + [[float("inf")] * (n + 1) for _ in range(m)]
    for i in range(m):
        for j in range(n):
            best = min(total[i][j], total[i][j + 1], total[i + 1][j])
            total[i + 1][j + 1] = cost[i][j] + best
    partners: list[list[int]] = [[] for _ in student]
    i, j = m, n
    while i and j:
        partners[i - 1].append(j)
        steps = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        i, j = min(steps, key=lambda step: total[step[0]][step[1]])
    return [0, *(found[0] if len(found) == 1 else -1 for found in partners)]
