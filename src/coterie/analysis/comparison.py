"""Comparison of methods on the same data: means, ranks and significant differences."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean
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
from coterie.analysis.tables import DRIFT, KEPT, Summary, Table, listed, shown_of, worst_of
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric
from coterie.evaluation.perplexity import PERPLEXITY

DECIMALS = 12
"""The number of decimals to which scores are rounded before they are ranked.

Without rounding, floating-point errors could decide the rank of equal scores.
"""
ALONE = "local"
"""The name of the method with which each client trains alone."""
MARK = "="
"""The mark of a row that does not differ significantly from the reference row."""
ONE_SEED = "With one seed, intervals do not include the variation between seeds."
MIXED = "Rows without a standard deviation have one seed."


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Results of several methods on the same data."""

    name: str
    results: Mapping[str, Sequence[Result]]
    """For each method, the results of its runs: one result per seed."""
    split: str = "test"
    """The split on which models are scored: "test" or "validation"."""
    asked: str | None = None
    """The name of the metric to show; None selects the metric that suits the data (`metric_of`)."""
    against: str | None = None
    """The name of the row with which all other rows are compared; None selects the best row."""
    tuned: Mapping[str, Summary] = field(default_factory=dict)
    """For each tuned method, the record of its tuning; see `Tuner.choose`."""
    floor: Sequence[Result] = ()
    """The results of always giving the commonest answer, one per seed (`coterie.engines.floor`)."""

    def __repr__(self) -> str:
        """Return the comparison's name and methods."""
        return f"Comparison({self.name!r}, methods={list(self.results)})"

    def _repr_html_(self) -> str:
        """Return the tables as HTML for a notebook."""
        return "".join(table._repr_html_() for table in self.tables())

    @property
    def metric(self) -> Metric:
        """The metric that tables show."""
        return shown_of((r for results in self.results.values() for r in results), self.asked)

    def summary(self) -> list[dict[str, Any]]:
        """Return one row per method as plain data.

        Under the metric's name (`perplexity`, `accuracy`, ...), each row contains the method's mean
        score over clients and seeds. The other entries include:

        - `clients`: for each client, the mean of the client's scores over seeds;
        - `clients_std`: for each client, the standard deviation of the client's scores over seeds;
        - `spread`: the standard deviation, over clients, of the clients' means;
        - `std`: the standard deviation, over seeds, of the mean over clients;
        - `rank`: the rank of the method by mean score; the best method has rank 1;
        - `server`: the score of the server's own model, as a mapping. The mapping contains the mean
          over seeds (under the metric's name), the standard deviation over seeds (`std`) and the
          number of seeds (`seeds`). The score is not part of any mean over clients. The entry is
          None if the server has no model;
        - `kept`: for each client, the rounds of the kept models, one per seed; empty if clients
          always keep the model of the last round;
        - `drift`: the mean drift over clients and seeds, in nats per token, if it was measured;
        - `difference`: the difference from the reference row, with which all other rows are
          compared. The entry is a mapping with the fields of a `Difference` and the name of the
          reference row (under `from`). If the two rows cannot be compared, the mapping contains
          the reason (under `unpaired`) instead of the fields. The entry is None for the reference
          row;
        - `at_floor`: whether the method is not significantly better than always giving the
          commonest answer.

        Metrics that are fractions, such as accuracy, have values from 0 to 1. If answers are chosen
        from a list, the last row is COMMONEST, which contains the scores of always giving the
        commonest answer. The `rank` of this row is None.
        """
        return self._rows

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        metric = self.metric
        rows = [self._row(name, results, metric.name) for name, results in self.results.items()]
        order = {row["method"]: round(metric.order(row[metric.name]), DECIMALS) for row in rows}
        for row in rows:
            row["rank"] = 1 + sum(other < order[row["method"]] for other in order.values())
            if row["method"] in self.tuned:
                row["tuned"] = self.tuned[row["method"]]
        results = dict(self.results)
        if rows and has_floor(self.floor, metric):
            results[COMMONEST] = self.floor
            floor_methods = at_floor(self.results, self.floor, metric)
            for row in rows:
                row["at_floor"] = row["method"] in floor_methods
            commonest = _scored(COMMONEST, self.floor, metric.name)
            rows.append(commonest | {"server": None, "rank": None})
        reference = self.against or min(order, key=order.__getitem__, default="")
        outcomes = differences(results, reference, metric) if reference in results else {}
        details = {
            name: {"from": reference, **_difference_data(outcome)}
            for name, outcome in outcomes.items()
        }
        return [row | {"difference": details.get(row["method"])} for row in rows]

    def table(self) -> Table:
        """Return a table with a row per method, in the order of `results`; see `clients_table`."""
        rows = {row["method"]: row for row in self.summary()}
        return clients_table(f"{self.name}: {self.split} {self.metric.label}", self.metric, rows)

    def tables(self) -> list[Table]:
        """Return the table of scores and, if rows could be compared, the table of differences."""
        title = f"{self.name}: differences in mean {self.split} {self.metric.label}"
        return [self.table(), *differences_tables(title, self.metric, self.summary())]

    def _row(self, method: str, results: Sequence[Result], key: str) -> dict[str, Any]:
        served = pd.Series([result["server"][key] for result in results if result.get("server")])
        kept_rounds = [result["kept"] for result in results if "kept" in result]
        clients = kept_rounds[0] if kept_rounds else ()
        drifts = [fmean(result["drift"].values()) for result in results if "drift" in result]
        return {
            **_scored(method, results, key),
            "server": _over_seeds(served, key) if len(served) else None,
            "bits_per_byte": mean_score(results, "bits_per_byte"),
            "trained": mean_score(results, key, "trained"),
            "aggregated": mean_score(results, key, "aggregated"),
            "kept": {client: [rounds[client] for rounds in kept_rounds] for client in clients},
            **({"drift": fmean(drifts)} if drifts else {}),
        }


def _scored(method: str, results: Sequence[Result], key: str) -> dict[str, Any]:
    """Return a method's row with means and standard deviations over clients and over seeds.

    Args:
        method: The name of the method.
        results: The results of the method's runs, one per seed.
        key: The name of the metric.
    """
    frame = over_runs(results)
    clients = frame.groupby("client", sort=False)[key].agg(["mean", "std"]).fillna(0.0)
    return {
        "method": method,
        "clients": clients["mean"].to_dict(),
        "clients_std": clients["std"].to_dict(),
        "spread": std(clients["mean"]),
        **_over_seeds(frame[key].groupby("run").mean(), key),
    }


def _difference_data(outcome: Difference | Unpaired) -> dict[str, Any]:
    if isinstance(outcome, Unpaired):
        return {"unpaired": str(outcome)}
    return {**asdict(outcome), "significant": outcome.significant}


def check_against(against: str | None, rows: Iterable[str]) -> None:
    """Raise CoterieError if a reference row is named but does not exist."""
    if against is not None and against not in rows:
        raise CoterieError(
            f"There is no row {against!r} to compare with; the rows are {', '.join(rows)}."
        )


def _over_seeds(values: Column, key: str) -> dict[str, float]:
    """Return the mean, standard deviation and length of a series with one value per seed."""
    return {key: float(values.mean()), "std": std(values), "seeds": len(values)}


def clients_table(title: str, metric: Metric, rows: Mapping[str, Summary]) -> Table:
    """Return a table of scores with a row per method.

    The columns contain the tuned settings, the clients' scores, the mean, the worst client, the
    rank, the rounds of the kept models, and the score of the server's model. Columns without any
    value are omitted.

    Args:
        title: The table's title, to which the number of seeds is added.
        metric: The metric to show.
        rows: For each method, the row returned by `Comparison.summary`.
    """
    entries = list(rows.values())
    clients, servers = entries[0]["clients"], [row["server"] for row in entries]
    # The counts differ while some runs are unfinished.
    counts = sorted({row["seeds"] for row in entries})
    spread = any(count > 1 for count in counts)
    beside = "bits/byte" if metric is PERPLEXITY else "over clients"
    columns = [
        ("method", list(rows)),
        *_tuned_columns(entries),
        *((client, [_client_cell(row, client, metric) for row in entries]) for client in clients),
        ("mean (std)" if spread else "mean", [with_spread(row, metric) for row in entries]),
        ("worst client", [_worst(row, metric) for row in entries] if len(clients) > 1 else [""]),
        (beside, [_beside_mean(row, metric) for row in entries]),
        ("rank", [_rank(row) for row in entries]),
        ("kept", [_rounds(row) for row in entries]),
        ("drift", [f"{row['drift']:.2f}" if "drift" in row else "" for row in entries]),
        ("server", [with_spread(score, metric) if score else "" for score in servers]),
    ]
    filled = [(head, cells) for head, cells in columns if any(cells)]
    seeds = f"{' to '.join(map(str, counts))} seed{'s' if spread else ''}"
    table = Table(
        f"{title}, mean (standard deviation) over {seeds}" if spread else f"{title}, {seeds}",
        [head for head, _ in filled],
        [list(row) for row in zip(*(cells for _, cells in filled), strict=True)],
        " ".join(_notes(rows, metric)),
    )
    return replace(table, narrower=table.without(beside)) if metric is PERPLEXITY else table


def _notes(rows: Mapping[str, Summary], metric: Metric) -> Iterator[str]:
    """Yield the sentences of the note below a table of clients' scores."""
    entries = rows.values()
    yield f"Column `mean`: mean over clients. {metric.better}"
    if any(row["server"] for row in entries):
        yield "Mean and rank exclude the server."
    if any("drift" in row for row in entries):
        yield DRIFT
    if any(map(_rounds, entries)):
        yield f"Column `kept`: {KEPT} A range spans all clients and seeds."
    if tuned := next(filter(None, (row.get("tuned") for row in entries)), None):
        yield (
            f"{', '.join(tuned['settings'])}: best of {len(tuned['trials'])} trials per method, "
            f"scored on validation text with seed {tuned['seed']}."
        )
    if 1 in (counts := {row["seeds"] for row in entries}) and len(counts) > 1:
        yield MIXED
    yield from _comparison_notes(rows)
    if any("at_floor" in row for row in entries):
        methods = ", ".join(name for name, row in rows.items() if row.get("at_floor"))
        same = f" Not significantly better than `{COMMONEST}`: {methods}." if methods else ""
        meaning = "always giving the commonest answer of the client's training data."
        yield f"`{COMMONEST}`: {meaning}{same}"


def differences_tables(title: str, metric: Metric, rows: Sequence[Summary]) -> list[Table]:
    """Return a table of the differences from the reference row; none if no row has a difference.

    Args:
        title: The table's title.
        metric: The metric to show.
        rows: All rows of `Comparison.summary`.
    """
    compared = [row for row in rows if "value" in (row.get("difference") or {})]
    if not compared:
        return []
    cells, reference = [], compared[0]["difference"]["from"]
    for row in compared:
        difference = row["difference"]
        shown = [f"{metric.shown(difference[key]):+.2f}" for key in ("value", "low", "high")]
        span, p = " to ".join(shown[1:]), f"{difference['p']:.3f}"
        cells.append([row["method"], shown[0], span, p, "" if difference["significant"] else MARK])
    seeds = f" {ONE_SEED}" if any(row["seeds"] == 1 for row in rows) else ""
    sign = "Positive" if metric.higher else "Negative"
    note = f"{sign}: better than {reference}. `{MARK}`: not significant.{seeds}"
    heads = ["method", f"difference from {reference}", "95 % interval", "p", ""]
    return [Table(title, heads, cells, note)]


def _comparison_notes(rows: Mapping[str, Summary]) -> Iterator[str]:
    """Yield the notes on comparisons with the reference row.

    One sentence explains MARK, which marks rows without a significant difference. Further sentences
    name the rows that could not be compared.
    """
    compared = {name: row["difference"] for name, row in rows.items() if row.get("difference")}
    reference = next((difference["from"] for difference in compared.values()), "")
    if any("value" in difference for difference in compared.values()):
        several = all(rows[name]["seeds"] > 1 for name in (reference, *compared))
        over = "and seeds" if several else "of one seed, without the variation between seeds"
        yield (
            f"`{MARK}`: no significant difference from {reference} (95 %, paired bootstrap over "
            f"windows (or samples) {over})."
        )
    reasons: dict[str, list[str]] = {}
    for name, difference in compared.items():
        if "unpaired" in difference:
            reasons.setdefault(difference["unpaired"], []).append(name)
    for reason, names in reasons.items():
        yield f"Not compared with {reference}: {', '.join(names)}; {reason}."


def _tuned_columns(rows: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Return a pair for each tuned setting: the key, and a list of chosen values, one per row."""
    chosen = [row.get("tuned", {}).get("settings", {}) for row in rows]
    keys = dict.fromkeys(key for settings in chosen for key in settings)
    return [(key, [str(settings.get(key, "")) for settings in chosen]) for key in keys]


def _rank(row: Summary) -> str:
    """Return a row's rank, with MARK if the difference from the reference is not significant."""
    insignificant = not (row.get("difference") or {}).get("significant", True)
    return f"{row['rank'] or ''}{f' {MARK}' if insignificant else ''}".strip()


def _client_cell(row: Summary, client: str, metric: Metric) -> str:
    """Return a client's score, with the standard deviation over seeds if it is known."""
    cell = {metric.name: row["clients"][client], "seeds": 1}
    if "clients_std" in row:
        cell |= {"std": row["clients_std"][client], "seeds": row["seeds"]}
    return with_spread(cell, metric)


def _worst(row: Summary, metric: Metric) -> str:
    """Return the score and the name of the client with the worst score in a table row."""
    worst = worst_of(row["clients"], metric)
    return f"{metric.cell(row['clients'][worst])} ({worst})"


def _beside_mean(row: Summary, metric: Metric) -> str:
    """Return a row's cell in the column `bits/byte` or `over clients`.

    If the metric is perplexity, the cell contains bits per byte. For any other metric, the cell
    contains the standard deviation over clients, or is empty if this deviation is unknown.
    """
    if metric is PERPLEXITY:
        return f"{row['bits_per_byte']:.3f}"
    return f"± {metric.cell(row['spread'])}" if "spread" in row else ""


def _rounds(row: Summary) -> str:
    """Return the range of the kept models' rounds, such as `2-5`, or an empty string if unknown."""
    rounds = sorted({round for kept in row.get("kept", {}).values() for round in kept})
    return "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else ""


def with_spread(row: Mapping[str, Any], metric: Metric) -> str:
    """Format a row's mean. If the row has several seeds, append the standard deviation over seeds.

    This deviation is the row's entry `std`. The entry `spread` is the deviation over clients.
    """
    spread = f" ({metric.cell(row['std'])})" if row["seeds"] > 1 else ""
    return metric.cell(row[metric.name]) + spread


def gains(results: Mapping[str, Result], asked: str | None = None) -> str | None:
    """Describe for which clients a method has better or worse scores than `local`.

    Args:
        results: For each method, the result of one run, returned by `RunFolder.outcome`. All runs
            have the same seed. The last method is compared with `local`.
        asked: The name of the metric; None selects the metric that suits the data (`metric_of`).

    Returns:
        A sentence, or None if the last method is `local`, if `results` does not contain `local`, or
        if the two results cannot be compared window by window.
    """
    method, joint = list(results.items())[-1]
    if method == ALONE or ALONE not in results:
        return None
    alone, metric = results[ALONE], shown_of(results.values(), asked)
    better, worse, unclear = [], [], []
    for client in sorted(scores(joint).index):
        pair = {ALONE: [of_clients(alone, [client])], method: [of_clients(joint, [client])]}
        difference = differences(pair, ALONE, metric)[method]
        if not isinstance(difference, Difference):
            return None
        baseline = float(scores(alone)[metric.name][client])
        entry = f"{client} ({change(difference.value, baseline, metric)})"
        improved = metric.order(difference.value) < 0
        (unclear if not difference.significant else better if improved else worse).append(entry)
    gain, loss = ("higher", "lower") if metric.higher else ("lower", "higher")
    relations = {gain: better, loss: worse, "not significantly different": unclear}
    clauses = [f"{name} for {listed(entries)}" for name, entries in relations.items() if entries]
    return (
        f"With {method} instead of {ALONE}, {metric.title} is {'; '.join(clauses)}. (95 % "
        "confidence, bootstrap over this run's test texts; results with other seeds may differ.)"
    )


def change(value: float, baseline: float, metric: Metric) -> str:
    """Format the change `value` from the score `baseline` to another score.

    If the metric is a fraction, such as accuracy, the change is formatted in percentage points.
    Otherwise, the change is formatted in per cent of `baseline`.
    """
    if metric.share:
        return f"{metric.shown(value):+.1f} points"
    return f"{100 * value / baseline:+.1f} %"
