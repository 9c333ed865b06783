"""The floor under a run's scores: what always giving the commonest answer scores."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from coterie.config.run import RunConfig
from coterie.evaluation.commonest import commonest
from coterie.federation.participants import Participant, text_digest

FLOOR = "commonest"
"""The point under which a run folder keeps the floor's scores by sample."""


def floor_items(config: RunConfig, client: Participant) -> dict[str, dict[str, Any]]:
    """Score the commonest answer in a client's training data on each of its test texts.

    Returns:
        Scores by sample, by the name of the text, as a run folder keeps them; without texts whose
        answers are not chosen from a list.
    """
    found: dict[str, dict[str, Any]] = {}
    train = client.data.train
    for name, test in client.tests.items():
        shares = commonest(train.questions, test.questions)
        if any(share is not None for share in shares):
            of = text_digest(test, config.data.window)
            # A constant answer is written exactly as it is chosen.
            found[name] = {"of": of, "accuracy": shares, "exact_match": shares}
    return found


def floor_in(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the floor that a finished run's folder has kept, as a result."""
    return as_result(outcome.get("items", {}).get(FLOOR, {}), outcome.get("seed"))


def as_result(items: Mapping[str, Mapping[str, Any]], seed: int | None) -> dict[str, Any]:
    """Return scores by text and sample as a result with their means, like `RunFolder.outcome`."""
    scores = {
        name: {
            key: fmean(share for share in shares if share is not None)
            for key, shares in kept.items()
            if key != "of"
        }
        for name, kept in items.items()
    }
    reports = "trained"  # a result needs a point; the floor is the same at each
    return {"reports": reports, reports: scores, "seed": seed, "items": {reports: dict(items)}}
