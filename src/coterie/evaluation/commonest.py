"""The accuracy of always giving the commonest answer: a baseline that needs no model."""

from collections import Counter
from collections.abc import Sequence

from coterie.data.items import Conversation, Instruction

Question = Instruction | Conversation


def commonest(train: Sequence[Question], test: Sequence[Question]) -> list[float | None]:
    """Score a baseline that predicts the most frequent training answer for each test sample.

    The prediction for a test sample is the choice that is most frequent among the training answers.
    If several choices are equally frequent, the score is the expected score of a random tie-break.
    If no choice occurs among the training answers, all choices are tied, so the score is the
    expected score of a random guess.

    Args:
        train: The samples whose answers are counted.
        test: The samples to score.

    Returns:
        One score from 0 to 1 per test sample, or None for a sample without choices.
    """
    counts = Counter(item.answer for item in train)

    def score(answer: str, choices: tuple[str, ...]) -> float | None:
        most = max((counts[choice] for choice in choices), default=None)
        best = {choice for choice in choices if counts[choice] == most}
        return (answer in best) / len(best) if best else None

    return [score(item.answer, item.choices) for item in test]
