"""Methods over scenarios: regret, harmed clients and costs, computed from the cells of a table.

A cell is the run of a method (row) in a scenario (column) with one seed. Losses are in nats per
token if the scenario's metric is perplexity. If the metric is a share, such as reward accuracy, the
loss is 100 minus the metric in per cent, in points.

The result file contains the time, the traffic and the clients' losses of every cell, and the losses
on up to BLOCKS blocks of adjacent windows of each client's test text. All tables are computed from
these entries, so that the run folders can be deleted. The bootstrap resamples blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, hypot, log
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from coterie.analysis.frame import Result, mean_score, of_clients, scores
from coterie.analysis.significance import (
    Difference,
    Floats,
    Unpaired,
    differences,
    window_scores,
)
from coterie.analysis.tables import Summary, Table, listed
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric, instance, metric_named
from coterie.evaluation.perplexity import PERPLEXITY

BLOCKS = 32
"""The maximum number of blocks of a test text.

The losses of all windows would take more than 1 MB for 13 rows, 7 scenarios and 3 seeds; the losses
of blocks take 0.3 MB. With 32 blocks, a standard error has a relative error of about 13 %.
"""
SCALE = 100
"""The factor by which the losses of blocks are multiplied before they are rounded to integers."""
ALONE, UNTRAINED, MEASURE = "local", "pretrained", "comigs-1g1s"
"""The rows that clients are compared with (ALONE, UNTRAINED) and that costs are divided by."""
BEST = ""
"""The key of the best single method beside the names of rows, which are not empty."""
POINT = "scored"
"""The only point of a round at which the results made from cells have scores."""


class Unit(NamedTuple):
    """A unit of losses."""

    name: str
    digits: int
    harm: float
    """The smallest increase of a client's loss that counts as harm."""


NATS, POINTS = Unit("nats per token", 3, log(1.01)), Unit("points", 1, 1.0)


class _Loss(Metric):
    name = title = "loss"

    def sums(self, items: Mapping[str, Any]) -> Sequence[Sequence[float]]:
        return [items["losses"] * items["weights"], items["weights"]]


LOSS = instance(_Loss)


def unit_of(metric: Metric) -> Unit:
    """Return the unit of a metric's losses; raise CoterieError if its losses are not defined."""
    if metric is PERPLEXITY:
        return NATS
    if metric.share and metric.higher:
        return POINTS
    raise CoterieError(f"Regret is defined for perplexity and for shares, not for {metric.title}.")


def new_cell(result: Result, metric: Metric) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a run's entry in the result file, and the weights of the blocks of its texts.

    Args:
        result: The result returned by `RunFolder.outcome`.
        metric: The scenario's metric.

    Raises:
        Unpaired: the run folder has no scores of single windows.
    """
    losses, blocks, texts, unit = {}, {}, {}, unit_of(metric)

    def loss(sums: Floats) -> Floats:
        means = sums[0] / sums[1]
        return means if unit is NATS else 100 * (1 - means)

    for client, items in window_scores(result, metric).items():
        sums, text = np.array(metric.sums(items), dtype=float), items["of"]
        starts = range(0, sums.shape[1], ceil(sums.shape[1] / BLOCKS))
        by_block = np.add.reduceat(sums, starts, axis=1)
        losses[client] = round(float(loss(sums.sum(1))), 6)
        blocks[client] = " ".join([text, *(f"{SCALE * value:.0f}" for value in loss(by_block))])
        texts[text] = " ".join(f"{weight:.0f}" for weight in by_block[1])
    traffic = sum(result["traffic"].values()) / 1e6
    costs = {"seconds": result["seconds"], "megabytes": round(traffic, 3)}
    return {**costs, "losses": losses, "blocks": blocks}, texts


def _result(seed: str, cell: Summary, texts: Mapping[str, str]) -> Result:
    """Return a cell of the result file in the form in which `differences` takes results."""
    items = {}
    for client, line in cell["blocks"].items():
        text, *values = line.split()
        weights = np.array(texts[text].split(), dtype=float)
        losses = np.array(values, dtype=float) / SCALE
        losses += cell["losses"][client] - np.average(losses, weights=weights)  # undo the rounding
        items[client] = {"of": text, "losses": losses, "weights": weights}
    by_client = {client: {LOSS.name: loss} for client, loss in cell["losses"].items()}
    return {"seed": seed, "reports": POINT, POINT: by_client, "items": {POINT: items}}


@dataclass(frozen=True)
class Scenario:
    """A scenario with at least one finished cell."""

    name: str
    unit: Unit
    cells: Mapping[str, Mapping[str, Summary]]
    """For each row, the cells by seed."""
    results: Mapping[str, Mapping[str, Result]]
    """For each row, the results by seed."""
    candidates: Sequence[str]
    """The rows from which the best single method is picked."""

    def best(self) -> dict[str, str]:
        """Pick the best single method of each seed by the mean loss with the other seeds.

        With one seed, the method is picked on this seed. A candidate that is not finished with all
        seeds is ignored if another candidate, which is, has a lower mean loss with the same seeds.
        Otherwise, only the seeds with which it is finished are used.
        """
        seeds = {row: set(self.results[row]) for row in self.candidates if self.results[row]}
        every = set[str]().union(*seeds.values())
        complete = [row for row in seeds if seeds[row] == every]
        kept = [
            row
            for row, own in seeds.items()
            if own == every or all(self._loss(row, own) <= self._loss(c, own) for c in complete)
        ]
        used = sorted((seed for seed in every if all(seed in seeds[row] for row in kept)), key=int)
        best = {}
        for seed in used:
            others = [other for other in used if other != seed] or used
            best[seed] = min(kept, key=lambda row: self._loss(row, others))
        return best

    def _loss(self, row: str, seeds: Iterable[str]) -> float:
        return mean_score([self.results[row][seed] for seed in sorted(seeds)], LOSS.name)

    def regrets(self) -> dict[str, Difference]:
        """Return each row's mean loss minus the best single method's; see `differences`."""
        best = self.best()
        if not best:
            return {}
        results = {
            row: [by_seed[seed] for seed in best if seed in by_seed]
            for row, by_seed in self.results.items()
        }
        return self._differences(
            {**results, BEST: [self.results[row][seed] for seed, row in best.items()]}, BEST
        )

    def changes(self, reference: str) -> dict[str, list[Difference]]:
        """Return each row's loss minus the reference row's, for each client."""
        changes: dict[str, list[Difference]] = {row: [] for row in self.results}
        seeds = self.results[reference]
        for client in scores(next(iter(seeds.values()))).index if seeds else ():
            results = {
                row: [of_clients(by_seed[seed], [client]) for seed in seeds if seed in by_seed]
                for row, by_seed in self.results.items()
            }
            for row, change in self._differences(results, reference).items():
                changes[row].append(change)
        return changes

    def _differences(
        self, results: Mapping[str, Sequence[Result]], reference: str
    ) -> dict[str, Difference]:
        outcomes = {}
        finished = {row: by_seed for row, by_seed in results.items() if by_seed}
        for row, outcome in differences(finished, reference, LOSS).items():
            if isinstance(outcome, Unpaired):
                against = reference or "the best single method"
                raise CoterieError(
                    f"{self.name}: {row} cannot be compared with {against}: {outcome}."
                )
            outcomes[row] = outcome
        return outcomes


def scenarios(summary: Summary) -> list[Scenario]:
    """Return the scenarios of a result file that have finished cells."""
    candidates = [row for row in summary["rows"] if row not in summary["excluded"]]
    measured = []
    for column in filter(lambda column: column["cells"], summary["columns"]):
        cells = {row: column["cells"].get(row, {}) for row in summary["rows"]}
        results = {
            row: {seed: _result(seed, cell, summary["texts"]) for seed, cell in by_seed.items()}
            for row, by_seed in cells.items()
        }
        unit = unit_of(metric_named(column["metric"]))
        measured.append(Scenario(column["name"], unit, cells, results, candidates))
    return measured


def regret_tables(summary: Summary) -> list[Table]:
    """Return the tables of a result file: regret by unit, harm, costs, and missing cells."""
    rows, measured = summary["rows"], scenarios(summary)
    by_unit = {unit: [s for s in measured if s.unit is unit] for unit in (NATS, POINTS)}
    tables = [_regret_table(rows, unit, group) for unit, group in by_unit.items() if group]
    tables += [
        _best_table(summary, measured),
        _harm_table(rows, measured),
        _cost_table(rows, measured),
    ]
    missing = {
        column["name"]: ", ".join(_missing(summary, column)) for column in summary["columns"]
    }
    lines = [[name, text] for name, text in missing.items() if text]
    if lines:
        note = (
            "These cells are not finished, and are part of no other table. In brackets: the seeds, "
            "if not all seeds are missing."
        )
        tables.append(Table("Missing cells", ["scenario", "methods"], lines, note))
    return tables


def _missing(summary: Summary, column: Summary) -> list[str]:
    """Return the unfinished rows of a scenario, each with the missing seeds in brackets."""
    missing = []
    for row in summary["rows"]:
        finished = column["cells"].get(row, {})
        seeds = ", ".join(seed for seed in summary["seeds"] if seed not in finished)
        if seeds:
            missing.append(f"{row} ({seeds})" if finished else row)
    return missing


def _regret_table(rows: Sequence[str], unit: Unit, group: Sequence[Scenario]) -> Table:
    regrets = {scenario.name: scenario.regrets() for scenario in group}
    several, nats = len(group) > 1, unit is NATS
    heads = ["method"]
    if several:
        heads += ["scenarios", "mean", "worst", "worst scenario"]
        heads += ["perplexity change"] if nats else []
    lines = []
    for row in rows:
        known = {name: by_row[row] for name, by_row in regrets.items() if row in by_row}
        by_scenario = [_cell(known.get(name), unit) for name in regrets]
        overall = _overall(known, unit) if known else [""] * (len(heads) - 2)
        number = f"{len(known)}/{len(group)}"
        lines.append([row, *([number, *overall] if several else []), *by_scenario])
    note = (
        f"A method's loss minus the loss of the scenario's best single method, mean over clients, "
        f"in {unit.name}. In brackets: 95 % intervals (paired bootstrap over blocks of test "
        f"windows, and over seeds if there are several).{_single(rows, group)}"
    )
    if several:
        note += " The interval of the mean takes scenarios as fixed and as independent."
        note += " Perplexity: change relative to the best single method." if nats else ""
    return Table(f"Regret in {unit.name}", [*heads, *regrets], lines, note)


def _overall(regrets: Mapping[str, Difference], unit: Unit) -> list[str]:
    """Return the cells with a method's mean regret and its regret in the worst scenario."""
    mean = fmean(regret.value for regret in regrets.values())
    half = hypot(*((r.high - r.low) / 2 for r in regrets.values())) / len(regrets)
    worst = max(regrets, key=lambda name: regrets[name].value)
    value = regrets[worst].value
    cells = [_interval(mean, mean - half, mean + half, unit), _number(value, unit), worst]
    return [*cells, *([f"{100 * (exp(value) - 1):+.1f} %"] if unit is NATS else [])]


def _cell(regret: Difference | None, unit: Unit) -> str:
    return "" if regret is None else _interval(regret.value, regret.low, regret.high, unit)


def _interval(value: float, low: float, high: float, unit: Unit) -> str:
    return f"{_number(value, unit)} [{_number(low, unit)}, {_number(high, unit)}]"


def _number(value: float, unit: Unit) -> str:
    return f"{round(value, unit.digits) + 0.0:.{unit.digits}f}"  # + 0.0: no -0.000


def _best_table(summary: Summary, measured: Sequence[Scenario]) -> Table:
    lines, single = [], []
    for scenario in measured:
        best = scenario.best()
        if not best:
            continue
        seeds_of = {row: [seed for seed in best if best[seed] == row] for row in best.values()}
        names = [f"{row} ({', '.join(seeds)})" for row, seeds in seeds_of.items()]
        results = [scenario.results[row][seed] for seed, row in best.items()]
        loss = _number(mean_score(results, LOSS.name), scenario.unit)
        clients = str(len(scores(results[0])))
        lines.append([scenario.name, clients, ", ".join(names), loss, scenario.unit.name])
        single += [scenario.name] if len(best) == 1 else []
    note = "In brackets: the seeds with which regret is measured against the method. "
    if len(single) < len(lines):
        note += "The best single method of a seed is picked on the other seeds. "
    if single:
        note += (
            f"With one seed ({listed(single)}), it is picked on the seed with which regret is "
            "measured. The regret is then optimistic for the best single method, which has a "
            "regret of 0 by construction, and pessimistic for the others. "
        )
    note += f"Not candidates: {listed(summary['excluded'])}. " if summary["excluded"] else ""
    note += " ".join(f"{c['name']}: {c['note']}." for c in summary["columns"] if c["note"])
    heads = ["scenario", "clients", "best single method", "loss", "unit"]
    return Table("Best single methods", heads, lines, note.strip())


def _harm_table(rows: Sequence[str], measured: Sequence[Scenario]) -> Table:
    heads, lines = ["method"], [[row] for row in rows]
    for reference in (ALONE, UNTRAINED):
        if reference not in rows:
            continue
        heads += [f"worse than {reference}", "beyond noise"]
        harm: dict[str, list[tuple[bool, bool]]] = {row: [] for row in rows}
        for scenario in measured:
            for row, changes in scenario.changes(reference).items():
                harm[row] += [(c.value > scenario.unit.harm, c.significant) for c in changes]
        for line in lines:
            clients = harm[line[0]]
            worse = [significant for is_worse, significant in clients if is_worse]
            share = f"{len(worse)}/{len(clients)} ({len(worse) / max(1, len(clients)):.0%})"
            line += [share, str(sum(worse))] if clients else ["", ""]
    note = (
        "Clients of all scenarios whose perplexity is more than 1 % higher, or whose accuracy is "
        "more than 1 point lower, on average over seeds. Beyond noise: how many of these clients "
        f"have a 95 % interval of the difference that excludes 0.{_single(rows, measured)}"
    )
    return Table("Clients that are worse off", heads, lines, note, group=2)


def _single(rows: Sequence[str], group: Sequence[Scenario]) -> str:
    """Return a sentence that names the rows with one seed, or an empty string without such rows."""
    single = [row for row in rows if any(len(s.cells[row]) == 1 for s in group)]
    return f" One seed, without the variation between seeds: {listed(single)}." if single else ""


def _cost_table(rows: Sequence[str], measured: Sequence[Scenario]) -> Table:
    lines = []
    for row in rows:
        line = [row]
        for key, digits in (("seconds", 0), ("megabytes", 2)):
            costs, ratios = [], []
            for scenario in measured:
                measures = scenario.cells.get(MEASURE, {})
                for seed, cell in scenario.cells[row].items():
                    costs.append(cell[key])
                    ratios += [cell[key] / measures[seed][key]] if seed in measures else []
            line.append(f"{fmean(costs):.{digits}f}" if costs else "")
            line.append(f"{fmean(ratios):.2f}" if ratios else "")
        lines.append(line)
    note = (
        f"Means over the runs of all scenarios and seeds. Ratios: to {MEASURE} in the same "
        "scenario with the same seed. MB: uploads and downloads of all clients in the whole run."
    )
    heads = ["method", "seconds", "ratio", "MB", "ratio"]
    return Table("Time and traffic of a run", heads, lines, note, group=2)
