"""The floor of a run's scores: the scores of always giving the commonest answer."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from coterie.config.run import RunConfig
from coterie.evaluation.commonest import commonest
from coterie.federation.participants import Participant, text_digest

FLOOR = "commonest"
"""The key of the floor's scores by sample in a run folder."""


def floor_items(config: RunConfig, client: Participant) -> dict[str, dict[str, Any]]:
    """Score the commonest answer of a client's training data on each of its test texts.

    Returns:
        Scores by sample, by the name of the text, in the format of a run folder. Only texts with
        answers that are chosen from a list are included.
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
    """Return the floor of a finished run as a result.

    Args:
        outcome: The run's outcome, from `RunFolder.outcome`.
    """
    return as_result(outcome.get("items", {}).get(FLOOR, {}), outcome.get("seed"))


def as_result(items: Mapping[str, Mapping[str, Any]], seed: int | None) -> dict[str, Any]:
    """Return scores by text and sample as a result, like `RunFolder.outcome`, with their means."""
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
