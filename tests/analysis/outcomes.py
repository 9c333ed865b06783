"""Results of runs that are written by hand."""

import math
from typing import Any

import numpy as np


def outcome(seed: int, **clients: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run, from the losses and shares of its clients' texts."""
    scores = {}
    for name, items in clients.items():
        scores[name] = {"perplexity": math.exp(sum(items["nats"]) / sum(items["tokens"]))}
        for key in items.keys() - {"of", "nats", "tokens"}:
            known = [value for value in items[key] if value is not None]
            scores[name][key] = float(np.mean(known))
    return {"reports": "trained", "trained": scores, "seed": seed, "items": {"trained": clients}}
