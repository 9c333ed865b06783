"""Sentences on who learns with whom, from the weights that clients recorded (metric `TRUST`)."""

from collections.abc import Iterable, Mapping

from coterie.analysis.comparison import ALONE, change
from coterie.analysis.experiments import ReportedRun
from coterie.analysis.frame import scores
from coterie.analysis.tables import listed, shown_of
from coterie.evaluation.metrics import Metric
from coterie.messages.names import TRUST

SMALLEST = 0.005
"""The weight below which another client is not mentioned."""
MOST_PEERS = 8
"""The largest number of items in the list of a sentence; the last may be `n others`."""
MOST_CLIENTS = 20
"""The largest number of clients that have a sentence each."""

Weights = Mapping[str, Mapping[str, float] | None]
"""For each client, the weights of the other clients with which it learns, largest first.

The value is None if the client recorded no weights before it scored the model that it kept.
"""
EARLIER = "kept a model from before {} first weights for other clients"
Pairs = Mapping[str, tuple[float, float]]
"""For each client, the score after training alone, and the score after learning with others."""


def sentences(run: ReportedRun, runs: Iterable[ReportedRun]) -> list[str]:
    """Describe with whom each client of a run learned the model that it kept.

    The sentences end with a comparison with training alone if `run` is finished, and `runs` contain
    exactly one finished run of `local` with the same seed.

    Args:
        run: The run.
        runs: All runs on the same texts and base.

    Returns:
        A sentence without a full stop for each client that recorded weights. With more than
        `MOST_CLIENTS` such clients, the list has one sentence about all of them. The list is empty
        if the run has no weights, or if it only records them (the setting `mix` of PCL).
    """
    if not run.names(TRUST) or run.config["method"].get("mix") is False:
        return []
    weights = _weights(run)
    metric, pairs = _scores(run, runs)
    subject = f"; {run.split} {metric.title}"
    if len(weights) > MOST_CLIENTS:
        return [_summary(weights, subject, metric, pairs)]
    return [
        f"{client} learns with {_named(peers)}"
        + (f"{subject} {_compared(*pairs[client], metric)} alone" if client in pairs else "")
        if peers
        else f"{client} {'learns alone' if peers is not None else EARLIER.format('its')}"
        for client, peers in weights.items()
    ]


def _weights(run: ReportedRun) -> Weights:
    """Return the weights that each client used last before it scored the model that it kept."""
    kept = (run.result or {}).get("kept", {})
    # A client receives the aggregate of a round, and records its weights, in the next round. The
    # last aggregate has no next round; its weights are recorded in the last round, after others.
    delay, last = run.reports == "aggregated", run.config["rounds"]
    chosen: dict[str, Mapping[str, float] | None] = {}
    for client, recorded in run.by_client(TRUST).groupby(level="client"):
        rows = [(round, row) for (_, round), row in recorded.iterrows()]
        rounds = kept.get(client, last)
        if delay and rounds < last == rows[-1][0]:
            del rows[-1]
        used = [row for round, row in rows if round <= rounds + delay]
        peers = {n: w for n, w in used[-1].items() if n != client and w >= SMALLEST} if used else {}
        ordered = dict(sorted(peers.items(), key=lambda peer: (-peer[1], peer[0])))
        chosen[client] = ordered if used else None
    return dict(sorted(chosen.items()))


def _scores(run: ReportedRun, runs: Iterable[ReportedRun]) -> tuple[Metric, Pairs]:
    """Return the metric to show, and the scores of all clients in two finished runs."""
    alone = [r for r in runs if r.method == ALONE and r.config["seed"] == run.config["seed"]]
    results = [r.result for r in (*alone, run) if r.result]
    metric = shown_of(results, run.config["evaluation"].get("metric"))
    if run.result is None or len(results) != 2:
        return metric, {}
    before, after = (scores(result)[metric.name] for result in results)
    return metric, {c: (before[c], after[c]) for c in before.index.intersection(after.index)}


def _compared(before: float, after: float, metric: Metric) -> str:
    if before == after:
        return "the same as"
    size = change(after - before, before, metric).lstrip("+-")
    return f"{size} {'higher' if after > before else 'lower'} than"


def _named(peers: Mapping[str, float]) -> str:
    names = [f"{name} ({weight:.2f})" for name, weight in peers.items()]
    if len(names) > MOST_PEERS:
        names[MOST_PEERS - 1 :] = [f"{len(names) - MOST_PEERS + 1} others"]
    return listed(names)


def _summary(weights: Weights, subject: str, metric: Metric, pairs: Pairs) -> str:
    together = {client: len(peers) for client, peers in weights.items() if peers}
    earlier = sum(peers is None for peers in weights.values())
    text = f"{len(together)} of {len(weights) - earlier} clients learn with others"
    if together:
        text += f" ({sum(together.values()) / len(together):.1f} on average)"
    compared = [pairs[client] for client in together if client in pairs]
    if compared:
        better = sum(metric.order(after) < metric.order(before) for before, after in compared)
        text += f"{subject} is better than alone for {better} of {len(compared)}"
    return text + (f"; {earlier} more {EARLIER.format('their')}" if earlier else "")
