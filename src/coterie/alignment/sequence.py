"""Alignment of a teacher's positions with a student's in one text with two tokenizations.

A text of m tokens has m + 1 positions: position j predicts what follows the first j tokens. Two
positions match if the same characters precede them, so the teacher's prediction is a target for the
student's.
"""

from collections.abc import Sequence

import torch
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from torch import Tensor

WITHIN = -1
"""The end of a position inside a character."""


def ends(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Count the characters before each position.

    Args:
        offsets: (m,) character ranges of the tokens.

    Returns:
        (m + 1,) counts, strictly increasing from 0 apart from `WITHIN`. The count is `WITHIN`
        inside a character (byte-level tokenizers split an emoji into several tokens with the same
        offsets), and for all but the last of several positions after the same characters.
    """
    counts = []
    read = 0
    for start, end in offsets:
        counts.append(read if start >= read and end > read else WITHIN)
        read = max(read, end)
    return [*counts, read]


def matched(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the index in `teacher` of each number in `student`.

    For `ends`, this is the teacher's position after the same characters. Positions of several texts
    can be matched at once with `keyed` ends.

    Args:
        student: (p,) int64; -1 matches nothing.
        teacher: (q,) int64.

    Returns:
        (p,) int64; -1 if `teacher` does not contain the number.
    """
    if not len(teacher):
        return torch.full_like(student, -1)
    order = teacher.argsort()
    ordered = teacher[order]
    index = torch.searchsorted(ordered, student).clamp(max=len(teacher) - 1)
    is_equal = (ordered[index] == student) & (student >= 0)
    return torch.where(is_equal, order[index], -1)


def keyed(ends: Tensor, starts: Tensor, keys: Tensor) -> Tensor:
    """Combine the ends of several texts' positions with the texts' keys into unique numbers.

    Args:
        ends: (p,) ends of all positions, text by text.
        starts: (n + 1,) int64, the first position of each text, then p.
        keys: (n,) int64, a number below 2**31 that identifies a text on both sides, or -1.

    Returns:
        (p,) int64; -1 for positions inside a character and for texts without a key.
    """
    texts = keys.repeat_interleave(starts.diff())
    return torch.where((ends < 0) | (texts < 0), -1, texts * 2**31 + ends)


def dynamic(student: Sequence[str], teacher: Sequence[str]) -> list[int]:
    """Match the positions of two token sequences with the paper's dynamic programme.

    Dynamic time warping pairs every token with one or more tokens of the other side such that the
    sum of edit distances is minimal. If a student's token is paired with exactly one teacher's
    token, the positions after both match. Position 0 matches position 0. Tie-break: the diagonal
    first, then the student's step. (arXiv 2406.02224, appendix A; the warping is from Fu et al.,
    arXiv 2301.12726.)

    Args:
        student: The student's m tokens as text.
        teacher: The teacher's tokens as text.

    Returns:
        (m + 1,) positions of the teacher, or -1.
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
        neighbours = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        i, j = min(neighbours, key=lambda cell: total[cell[0]][cell[1]])
    return [0, *(indices[0] if len(indices) == 1 else -1 for indices in partners)]
