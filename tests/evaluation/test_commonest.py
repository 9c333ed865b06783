"""The floor of accuracy: always giving the commonest answer."""

import pytest

from coterie.data.items import Instruction
from coterie.evaluation.commonest import commonest


def samples(*items: tuple[str, tuple[str, ...]]) -> list[Instruction]:
    return [Instruction("?", answer, choices) for answer, choices in items]


YES_NO = ("yes", "no")


@pytest.mark.parametrize(
    ("train", "test", "scores"),
    [
        (["yes", "yes", "no"], ["yes", "no", "no"], [1, 0, 0]),
        (["no"], ["yes", "yes"], [0, 0]),  # the test text's own commonest answer does not count
        (["yes", "no"], ["yes", "no", "no"], [0.5, 0.5, 0.5]),
        (["maybe", "maybe", "no"], ["no", "yes"], [1, 0]),  # which is no choice here
        (["maybe"], ["no", "yes"], [0.5, 0.5]),
    ],
)
def test_the_answer_that_is_commonest_in_training(train, test, scores) -> None:
    learnt = samples(*((answer, YES_NO) for answer in train))
    assert commonest(learnt, samples(*((answer, YES_NO) for answer in test))) == scores


def test_choices_of_a_samples_own_that_were_never_seen_score_as_guessing() -> None:
    test = samples(("oven", ("oven", "roof", "fridge", "lake")), ("yes", YES_NO), ("free", ()))
    assert commonest(samples(("yes", YES_NO)), test) == [0.25, 1, None]
