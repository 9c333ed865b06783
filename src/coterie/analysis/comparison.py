"""Several methods on the same data: means, ranks, and which differences are more than chance."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from coterie.analysis.frame import Column, Result, mean_score, of_clients, over_runs, scores, std
from coterie.analysis.significance import (
    COMMONEST,
    Difference,
    Unpaired,
    at_floor,
    differences,
    has_floor,
)
from coterie.analysis.tables import KEPT, Summary, Table, listed, shown_of, worst_of
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric
from coterie.evaluation.perplexity import PERPLEXITY

ALIKE = 12
"""Decimals to which figures must be the same to rank the same: what follows is rounding."""
ALONE = "local"
"""The method with which clients learn nothing from each other."""
MARK = "="
"""Beside the rank of a row that does not differ significantly."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Several methods on the same data: results by method, one per seed."""

    name: str
    results: Mapping[str, Sequence[Result]]
    split: str = "test"
    """Which text the models are scored on: test or validation."""
    asked: str | None = None
    """What is asked for of the scores; see `metric_of`."""
    against: str | None = None
    """The row from which the others' differences are told; default: the best."""
    tuned: Mapping[str, Summary] = field(default_factory=dict)
    """Of methods whose settings were chosen: `Tuned.summary`."""
    floor: Sequence[Result] = ()
    """What always giving the commonest answer scores, one result per seed; see `engines.floor`."""

    def __repr__(self) -> str:
        """Return the name and the methods."""
        return f"Comparison({self.name!r}, methods={list(self.results)})"

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        return "".join(table._repr_html_() for table in self.tables())

    @property
    def metric(self) -> Metric:
        """What is shown of the scores."""
        return shown_of((r for results in self.results.values() for r in results), self.asked)

    def summary(self) -> list[dict[str, Any]]:
        """Per method: its metric per client; over clients, the mean and the standard deviation
        (`spread`); over seeds, the mean's (`std`) and each client's (`clients_std`).

        The metric's key (perplexity, accuracy) holds the mean. Shares are from 0 to 1. `server` has
        that key, `std` and `seeds` of the server's own model, which is in no mean, or is None.
        `kept` is, per client, the round whose model it keeps, a list over seeds; empty where all
        keep the last.
        `difference` is a `Difference` and the row that it is `from`, or why there is none
        (`unpaired`); None for that row itself.

        Where answers are chosen from a list, the last row is COMMONEST, which has no rank, and each
        method's `at_floor` says whether it is no better than that by more than chance.
        """
        return self._rows

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        metric = self.metric
        rows = [self._row(name, results, metric.name) for name, results in self.results.items()]
        order = {row["method"]: round(metric.order(row[metric.name]), ALIKE) for row in rows}
        for row in rows:
            row["rank"] = 1 + sum(other < order[row["method"]] for other in order.values())
            if row["method"] in self.tuned:
                row["tuned"] = self.tuned[row["method"]]
        floored = bool(rows) and has_floor(self.floor, metric)
        if floored:
            low = at_floor(self.results, self.floor, metric)
            for row in rows:
                row["at_floor"] = row["method"] in low
            rows.append(
                _scored(COMMONEST, self.floor, metric.name) | {"server": None, "rank": None}
            )
        results = {**self.results, COMMONEST: self.floor} if floored else self.results
        best = self.against or min(order, key=order.__getitem__, default="")
        found = differences(results, best, metric) if best in results else {}
        told = {name: {"from": best, **_told(one)} for name, one in found.items()}
        return [row | {"difference": told.get(row["method"])} for row in rows]

    def table(self) -> Table:
        """A row per method, in the given order; see `clients_table`."""
        rows = {row["method"]: row for row in self.summary()}
        return clients_table(f"{self.name}: {self.split} {self.metric.label}", self.metric, rows)

    def tables(self) -> list[Table]:
        """The same, and where rows could be compared, by how much they differ."""
        rows = [row for row in self.summary() if "value" in (row["difference"] or {})]
        what = f"{self.name}: differences in mean {self.split} {self.metric.label}"
        return [self.table(), *([differences_table(what, self.metric, rows)] if rows else [])]

    def _row(self, method: str, results: Sequence[Result], key: str) -> dict[str, Any]:
        served = pd.Series([result["server"][key] for result in results if result.get("server")])
        kept = [result["kept"] for result in results if "kept" in result]
        clients = kept[0] if kept else ()
        return {
            **_scored(method, results, key),
            "server": _over_seeds(served, key) if len(served) else None,
            "bits_per_byte": mean_score(results, "bits_per_byte"),
            "trained": mean_score(results, key, "trained"),
            "aggregated": mean_score(results, key, "aggregated"),
            "kept": {client: [rounds[client] for rounds in kept] for client in clients},
        }


def _scored(method: str, results: Sequence[Result], key: str) -> dict[str, Any]:
    """Return a row's scores over clients and over seeds."""
    own = over_runs(results)
    clients = own.groupby("client", sort=False)[key].agg(["mean", "std"]).fillna(0.0)
    return {
        "method": method,
        "clients": clients["mean"].to_dict(),
        "clients_std": clients["std"].to_dict(),
        "spread": std(clients["mean"]),
        **_over_seeds(own[key].groupby("run").mean(), key),
    }


def _told(found: Difference | Unpaired) -> dict[str, Any]:
    if isinstance(found, Unpaired):
        return {"unpaired": str(found)}
    return {**asdict(found), "significant": found.significant}


def check_against(against: str | None, rows: Iterable[str]) -> None:
    """Raise CoterieError if there is no row of that name."""
    if against is not None and against not in rows:
        raise CoterieError(
            f"There is no row {against!r} to compare with (rows: {', '.join(rows)})."
        )


def _over_seeds(values: Column, key: str) -> dict[str, float]:
    """A metric of one model, or a mean over models, per seed: its mean and standard deviation."""
    return {key: float(values.mean()), "std": std(values), "seeds": len(values)}


def clients_table(title: str, metric: Metric, rows: Mapping[str, Summary]) -> Table:
    """Each client's score by method, the mean, the worst, and the rank; a server's model is last.

    rows: a method's entry in `Comparison.summary`, by its name. Columns of which nothing is known
    are left out.
    """
    entries = list(rows.values())
    clients, servers = entries[0]["clients"], [row["server"] for row in entries]
    counts = sorted({row["seeds"] for row in entries})  # they differ while it is under way
    spread = any(count > 1 for count in counts)
    beside = "bits/byte" if metric is PERPLEXITY else "over clients"
    columns = [
        ("method", list(rows)),
        *_chosen(entries),
        *((client, [_of_client(row, client, metric) for row in entries]) for client in clients),
        ("mean (std)" if spread else "mean", [with_spread(row, metric) for row in entries]),
        ("worst client", [_worst(row, metric) for row in entries] if len(clients) > 1 else [""]),
        (beside, [_beside_mean(row, metric) for row in entries]),
        ("rank", [_rank(row) for row in entries]),
        ("kept", [_rounds(row) for row in entries]),
        ("server", [with_spread(one, metric) if one else "" for one in servers]),
    ]
    known = [(head, cells) for head, cells in columns if any(cells)]
    seeds = f"{' to '.join(map(str, counts))} seed{'s' if spread else ''}"
    return Table(
        f"{title}, mean (standard deviation) over {seeds}" if spread else f"{title}, {seeds}",
        [head for head, _ in known],
        [list(row) for row in zip(*(cells for _, cells in known), strict=True)],
        " ".join(_notes(rows, metric)),
    )


def _notes(rows: Mapping[str, Summary], metric: Metric) -> Iterator[str]:
    """What stands under a table of clients' scores, sentence by sentence."""
    entries = rows.values()
    yield f"Column `mean`: over clients. {metric.better}"
    if any(row["server"] for row in entries):
        yield "Mean and rank exclude the server."
    if any(map(_rounds, entries)):
        yield f"Kept: {KEPT}"
    if tuned := next(filter(None, (row.get("tuned") for row in entries)), None):
        yield (
            f"{', '.join(tuned['settings'])}: the best of {len(tuned['trials'])} trials per "
            f"method, on validation text with seed {tuned['seed']}."
        )
    yield from _how_marked(rows)
    if any("at_floor" in row for row in entries):
        low = ", ".join(name for name, row in rows.items() if row.get("at_floor"))
        none = f" Not better than that by more than chance: {low}." if low else ""
        yield (
            f"`{COMMONEST}`: the score of always giving the commonest answer of the client's "
            f"training data.{none}"
        )


def differences_table(title: str, metric: Metric, rows: Sequence[Summary]) -> Table:
    """By how much rows differ from the one that they are compared with, which is not among them.

    rows: entries of `Comparison.summary` with such a figure.
    """
    found = [row["difference"] for row in rows]
    cells = [
        [
            row["method"],
            f"{metric.shown(one['value']):+.2f}",
            f"{metric.shown(one['low']):+.2f} to {metric.shown(one['high']):+.2f}",
            f"{one['p']:.3f}",
            "" if one["significant"] else MARK,
        ]
        for row, one in zip(rows, found, strict=True)
    ]
    way = "Above" if metric.higher else "Below"
    note = f"{way} zero is better than {found[0]['from']}. `{MARK}`: not significant."
    heads = ["method", f"less {found[0]['from']}", "95 % interval", "p", ""]
    return Table(title, heads, cells, note)


def _how_marked(rows: Mapping[str, Summary]) -> Iterator[str]:
    """What marks mean, and why there are none where there could be."""
    compared = {name: row["difference"] for name, row in rows.items() if row.get("difference")}
    reference = next((one["from"] for one in compared.values()), "")
    if any("value" in one for one in compared.values()):
        several = all(rows[name]["seeds"] > 1 for name in compared)
        over = "windows (or samples) and seeds" if several else "windows (or samples) of one seed"
        yield (
            f"`{MARK}`: no significant difference from {reference} (95 %, paired bootstrap over "
            f"{over})."
        )
    for why in dict.fromkeys(one["unpaired"] for one in compared.values() if "unpaired" in one):
        names = [name for name, one in compared.items() if one.get("unpaired") == why]
        yield f"Not compared with {reference}: {', '.join(names)}; {why}."


def _chosen(rows: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """A column for each setting that was tuned, with what was chosen."""
    chosen = [row.get("tuned", {}).get("settings", {}) for row in rows]
    keys = dict.fromkeys(key for settings in chosen for key in settings)
    return [(key, [str(settings.get(key, "")) for settings in chosen]) for key in keys]


def _rank(row: Summary) -> str:
    """The rank, marked if the row does not differ significantly from the one it is compared to."""
    alike = not (row.get("difference") or {}).get("significant", True)
    return f"{row['rank'] or ''}{f' {MARK}' if alike else ''}".strip()


def _of_client(row: Summary, client: str, metric: Metric) -> str:
    """A client's cell, with its standard deviation over seeds, where known."""
    own = {metric.name: row["clients"][client], "seeds": 1}
    if "clients_std" in row:
        own |= {"std": row["clients_std"][client], "seeds": row["seeds"]}
    return with_spread(own, metric)


def _worst(row: Summary, metric: Metric) -> str:
    """The score of the client with the worst one, and its name."""
    worst = worst_of(row["clients"], metric)
    return f"{metric.cell(row['clients'][worst])} ({worst})"


def _beside_mean(row: Summary, metric: Metric) -> str:
    """Perplexity in bits per byte; of a share, its standard deviation over clients, where known."""
    if metric is PERPLEXITY:
        return f"{row['bits_per_byte']:.3f}"
    return f"± {metric.cell(row['spread'])}" if "spread" in row else ""


def _rounds(row: Summary) -> str:
    """The first and the last of the rounds whose models are kept; empty where none is known."""
    rounds = sorted({round for kept in row.get("kept", {}).values() for round in kept})
    return "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else ""


def with_spread(row: Mapping[str, Any], metric: Metric) -> str:
    """A metric's mean and, of several seeds, its standard deviation."""
    spread = f" ({metric.cell(row['std'])})" if row["seeds"] > 1 else ""
    return metric.cell(row[metric.name]) + spread


def gains(results: Mapping[str, Result], asked: str | None = None) -> str | None:
    """Who does better with the last method of a run than alone, who worse, and who the same.

    Results by method, one seed, as `RunFolder.outcome` has them; asked: as in `metric_of`. None
    where there is nothing to compare: no run of `local`, or no scores by window.
    """
    method, joint = list(results.items())[-1]
    if method == ALONE or ALONE not in results:
        return None
    alone, metric = results[ALONE], shown_of(results.values(), asked)
    better, worse, same = [], [], []
    for client in sorted(scores(joint).index):
        pair = {ALONE: [of_clients(alone, [client])], method: [of_clients(joint, [client])]}
        found = differences(pair, ALONE, metric)[method]
        if not isinstance(found, Difference):
            return None
        before = float(scores(alone)[metric.name][client])
        told = f"{client} ({_change(found.value, before, metric)})"
        kind = better if metric.order(found.value) < 0 else worse
        (kind if found.significant else same).append(told)
    lower, higher = ("higher", "lower") if metric.higher else ("lower", "higher")
    parts = [
        f"{what} for {listed(names)}"
        for what, names in ((lower, better), (higher, worse), ("much the same", same))
        if names
    ]
    return (
        f"With {method} in place of {ALONE}, {metric.title} is {'; '.join(parts)}. (Differences "
        "are told apart from chance by the test texts of this one run, at 95 %.)"
    )


def _change(value: float, before: float, metric: Metric) -> str:
    """A difference as people say it: of a share in points, of perplexity in per cent of it."""
    if metric.share:
        return f"{metric.shown(value):+.1f} points"
    return f"{100 * value / before:+.1f} %"
