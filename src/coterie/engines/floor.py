"""The floor of a run's scores: the scores of a model that always gives the commonest answer."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from coterie.config.run import RunConfig
from coterie.evaluation.commonest import commonest
from coterie.federation.participants import Participant, text_digest

FLOOR = "commonest"
"""The name under which a run folder contains the floor's score for each sample."""


def floor_items(config: RunConfig, client: Participant) -> dict[str, dict[str, Any]]:
    """Score a model that answers all questions in a client's test texts with the commonest answer.

    The commonest answer is the choice that is most frequent in the client's training answers.

    Returns:
        A mapping from the name of each test text to the scores of its samples, in the format of
        `RunFolder.keep_items`. Only texts whose answers are chosen from a list are included.
    """
    items: dict[str, dict[str, Any]] = {}
    train = client.data.train
    for name, test in client.tests.items():
        shares = commonest(train.questions, test.questions)
        if any(share is not None for share in shares):
            digest = text_digest(test, config.data.window)
            # A constant answer matches exactly if and only if it is the correct choice.
            items[name] = {"of": digest, "accuracy": shares, "exact_match": shares}
    return items


def floor_in(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the floor of a finished run's scores.

    The floor consists of the scores of a model that always gives the commonest answer. The result
    has the format of `RunFolder.outcome`.

    Args:
        outcome: The run's outcome, from `RunFolder.outcome`.
    """
    return as_result(outcome.get("items", {}).get(FLOOR, {}), outcome.get("seed"))


def as_result(items: Mapping[str, Mapping[str, Any]], seed: int | None) -> dict[str, Any]:
    """Convert scores to the format of `RunFolder.outcome`, which includes each text's mean score.

    Args:
        items: A mapping from the name of each test text to the scores of its samples.
        seed: The run's seed; None if it is unknown.
    """
    scores = {
        name: {
            key: fmean(share for share in shares if share is not None)
            for key, shares in scores_by_key.items()
            if key != "of"
        }
        for name, scores_by_key in items.items()
    }
    reports = "trained"  # a result needs a key; the floor is the same for all keys
    return {"reports": reports, reports: scores, "seed": seed, "items": {reports: dict(items)}}
