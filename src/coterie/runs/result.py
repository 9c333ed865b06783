"""The result of a run, computed from its recorded metrics."""

from collections import defaultdict
from typing import Any

from coterie.messages import names as metric
from coterie.runs.folder import RunFolder


def result(folder: RunFolder, label: str, reports: str) -> dict[str, object]:
    """Return the result of a run, computed from its recorded metrics.

    Args:
        folder: The run folder.
        label: The name of the method in tables.
        reports: The point of the scores that are the method's result: `trained` or `aggregated`.

    Returns:
        The last scores of each text, the traffic in bytes and the time in seconds. If clients keep
        their best models, `kept[client]` is the number of rounds after which `client` had its best
        model. The scores under the key `reports` are then those of the best models, not of the last
        models. If clients were excluded from rounds, `left_out[client][round]` is the reason why
        `client` was excluded from `round`, where the first round is 1. If drift was measured,
        `drift[client]` is the drift of the model with the reported scores, in nats per token.
    """
    last: dict[str, dict[str | None, Any]] = defaultdict(dict)
    left_out: dict[str, dict[int, str]] = {}
    total = {metric.BYTES_UP: 0, metric.BYTES_DOWN: 0, metric.SECONDS: 0.0}
    for line in folder.metrics():
        name, client, value = line["name"], line["client"], line["value"]
        last[name][client] = value
        if name in total:
            total[name] += value
        elif name == metric.LEFT_OUT:
            left_out.setdefault(client, {})[line["round"] + 1] = value
    kept, drift = last[metric.KEPT], last[metric.DRIFT]
    points = {point: last[f"{metric.TEST}{point}"] for point in ("trained", "aggregated")}
    points[reports] |= last[metric.KEPT_SCORE]
    return {
        "method": label,
        "reports": reports,
        **({"kept": kept} if kept else {}),
        **({"left_out": left_out} if left_out else {}),
        **points,
        **({"drift": drift} if drift else {}),
        **({"server": server} if (server := last[metric.SERVER_SCORE].get(None)) else {}),
        "traffic": {"up": total[metric.BYTES_UP], "down": total[metric.BYTES_DOWN]},
        "seconds": round(total[metric.SECONDS], 1),
    }
