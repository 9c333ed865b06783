"""The score of a constant answer, which needs no model: the floor of accuracy."""

from collections import Counter
from collections.abc import Sequence

from coterie.data.items import Conversation, Instruction

Question = Instruction | Conversation


def commonest(train: Sequence[Question], test: Sequence[Question]) -> list[float | None]:
    """Score the answer to each test sample that is the commonest one in the training samples.

    The answer is looked for among the test sample's own choices. Where several choices are equally
    common, the score is the expected one of a draw among them, so that choices that were never seen
    score as guessing does.

    Returns:
        For each test sample, its score from 0 to 1, or None if it has no choices.
    """
    counts = Counter(item.answer for item in train)

    def score(answer: str, choices: tuple[str, ...]) -> float | None:
        most = max((counts[choice] for choice in choices), default=None)
        best = {choice for choice in choices if counts[choice] == most}
        return (answer in best) / len(best) if best else None

    return [score(item.answer, item.choices) for item in test]
