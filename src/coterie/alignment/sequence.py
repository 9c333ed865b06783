"""Alignment of a teacher's and a student's token positions in the same text.

Teacher and student have different tokenizers. A text of m tokens has m + 1 positions: at position
j, a model predicts the token that follows the first j tokens. A position of the teacher and a
position of the student match if they are preceded by the same characters. The teacher's prediction
can then serve as the student's target.
"""

from collections.abc import Sequence

import torch
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from torch import Tensor

WITHIN = -1
"""Value that replaces the number of preceding characters for a position inside a character."""


def ends(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Count the characters of a text before each token position.

    A text of m tokens has m + 1 positions: one before each token, and one after the last token.

    Args:
        offsets: For each of the m tokens, the range of its characters (start, end).

    Returns:
        A list of m + 1 counts. A position inside a character has the count `WITHIN`. This happens,
        for example, when a byte-level tokenizer splits an emoji into several tokens, all of which
        have the same offsets. If several positions are preceded by the same number of characters,
        all of these positions except the last also have the count `WITHIN`. The remaining counts
        start at 0 and are strictly increasing.
    """
    counts = []
    read = 0
    for start, end in offsets:
        counts.append(read if start >= read and end > read else WITHIN)
        read = max(read, end)
    return [*counts, read]


def matched(student: Tensor, teacher: Tensor) -> Tensor:
    """Return, for each integer in `student`, the index of the same integer in `teacher`.

    If the integers are counts returned by `ends()`, each result is the teacher's position that is
    preceded by the same number of characters as the student's position. To match the positions of
    several texts at once, first convert the counts with `keyed()`.

    Args:
        student: The integers to find, (p,) int64. Negative integers match nothing.
        teacher: The integers among which to search, (q,) int64.

    Returns:
        A tensor (p,) int64, which contains -1 for each integer that has no match in `teacher`.
    """
    if not len(teacher):
        return torch.full_like(student, -1)
    order = teacher.argsort()
    ordered = teacher[order]
    index = torch.searchsorted(ordered, student).clamp(max=len(teacher) - 1)
    is_equal = (ordered[index] == student) & (student >= 0)
    return torch.where(is_equal, order[index], -1)


def keyed(ends: Tensor, starts: Tensor, keys: Tensor) -> Tensor:
    """Compute an integer for each position of several texts, to match positions across models.

    The integer combines the key of the position's text with the number of characters before the
    position. Equal positions in equal texts therefore have equal integers, whichever tokenizer
    produced the positions. Positions that cannot be matched have the integer -1.

    Args:
        ends: (p,), the number of characters before each position, text by text. See the function
            `ends`.
        starts: (n + 1,) int64, the index of each text's first position; the last entry is p.
        keys: (n,) int64, the key of each text, or -1 for a text without a key. Teacher and student
            must use equal keys for equal texts. Keys must be less than 2**31.

    Returns:
        A tensor (p,) int64, which contains -1 for positions inside a character and for texts
        without a key.
    """
    texts = keys.repeat_interleave(starts.diff())
    return torch.where((ends < 0) | (texts < 0), -1, texts * 2**31 + ends)


def dynamic(student: Sequence[str], teacher: Sequence[str]) -> list[int]:
    """Match the positions of two token sequences with FedMKT's dynamic-programming algorithm.

    A sequence of m tokens has m + 1 positions, numbered from 0. Position j is preceded by j tokens.
    Dynamic time warping pairs every token with one or more tokens of the other sequence such that
    the sum of edit distances is minimal. If a student's token is paired with exactly one token of
    the teacher, the positions directly after these two tokens match. The positions 0 of student and
    teacher also match. Ties are resolved in favour of moving by one token in both sequences, and
    then in favour of moving by one token in the student's sequence only. Fu et al. (arXiv
    2301.12726) proposed the warping of token sequences, and FedMKT (arXiv 2406.02224, appendix A)
    uses this warping to match positions.

    Args:
        student: The student's m tokens as text.
        teacher: The teacher's tokens as text.

    Returns:
        The teacher's position for each of the student's m + 1 positions, or -1 if no position
        matches.
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
