"""Runs as a report reads them: found in folders, put together by experiment and method.

An experiment is runs on the same texts and base. Its runs are told apart by a label: the method's
name, with those settings in which runs of that method differ. Runs that differ only in their seed
have one label; their figures are averaged.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.part import SERVER_SCORE
from coterie.errors import CoterieError
from coterie.methods import POOLED, Method, available
from coterie.runs import RunFolder
from coterie.scoring.metrics import PERPLEXITY, Metric, metric_of

Series = dict[int, float]
"""A figure by round or step, from 1 on."""


@dataclass(frozen=True)
class ReportedRun:
    """One run, finished or not: what it was and what it has measured so far."""

    path: Path
    config: Mapping[str, Any]
    clients: Mapping[str, Mapping[str, Any]]
    """run.json's entry of each client: its tokens and labels, where the run recorded them."""
    metrics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None
    server: Mapping[str, Any]
    """run.json's entry of a server with a model of its own; empty without one."""

    @classmethod
    def read(cls, folder: RunFolder) -> "ReportedRun":
        """Everything but the checkpoints. A server that was told no scores has no result."""
        about, result = folder.description, folder.result
        if result is not None and not result[result["reports"]]:
            result = None
        metrics = list(folder.metrics())
        server = about.get("server", {})
        return cls(folder.path, about["config"], about["clients"], metrics, result, server)

    @property
    def method(self) -> str:
        """The method's name for tables."""
        return POOLED if self.config["pooled"] else self.config["method"]["name"]

    @property
    def rounds(self) -> int:
        """Rounds of which there are figures."""
        return max((line["round"] + 1 for line in self.metrics), default=0)

    @property
    def progress(self) -> str:
        """How far a run is that is not finished."""
        return f"seed {self.config['seed']}: {self.rounds} of {self.config['rounds']} rounds"

    @property
    def split(self) -> str:
        """Which text the models are scored on: test or validation."""
        return self.config["evaluation"].get("split", "test")

    @property
    def reports(self) -> str:
        """Which evaluation is the method's own: "trained" or "aggregated"."""
        if self.result is not None:
            return self.result["reports"]
        return available().get(self.method, Method).reports

    def by_client(self, name: str) -> dict[str, list[tuple[int, Any]]]:
        """Values of one figure per client, each with its round (1 is the first), in order."""
        found: dict[str, list[tuple[int, Any]]] = {}
        for line in self.metrics:
            if line["name"] == name and line["client"] is not None:
                found.setdefault(line["client"], []).append((line["round"] + 1, line["value"]))
        return found

    def names(self, prefix: str) -> list[str]:
        """Names of figures that begin so, in the order of their first appearance."""
        found = (line["name"] for line in self.metrics)
        return list(dict.fromkeys(name for name in found if name.startswith(prefix)))

    def by_round(self, name: str) -> dict[int, Any]:
        """Values of one figure of the run itself, by round."""
        return {
            line["round"] + 1: line["value"]
            for line in self.metrics
            if line["name"] == name and line["client"] is None
        }

    @property
    def scores(self) -> list[Mapping[str, float]]:
        """The method's own scores: those at the end or, without an end, all there are."""
        if self.result is not None:
            return list(self.result[self.result["reports"]].values())
        return [score for s in self.by_client(f"test/{self.reports}").values() for _, score in s]

    def series(self, metric: Metric) -> dict[str, Series]:
        """The method's own figure by client and round, in the unit that is shown."""
        scores = self.by_client(f"test/{self.reports}")
        found = {
            client: {r: metric.shown(s[metric.key]) for r, s in one if metric.key in s}
            for client, one in scores.items()
        }
        return {client: one for client, one in found.items() if one}

    def server_series(self, metric: Metric) -> Series:
        """The same of the server's own model, where it has one."""
        scores = self.by_round(SERVER_SCORE)
        return {r: metric.shown(s[metric.key]) for r, s in scores.items() if metric.key in s}


@dataclass(frozen=True)
class Experiment:
    """Runs on the same texts and base, by label, a list of seeds each."""

    name: str
    runs: Mapping[str, Sequence[ReportedRun]]

    @cached_property
    def all(self) -> list[ReportedRun]:
        """Every run."""
        return [run for runs in self.runs.values() for run in runs]

    @cached_property
    def drawn(self) -> dict[str, list[ReportedRun]]:
        """The runs behind figures: of each label the finished ones or, if none is, all.

        A mean that loses a seed on its way would jump where nothing happened.
        """
        finished = {label: [r for r in runs if r.result] for label, runs in self.runs.items()}
        return {label: finished[label] or list(runs) for label, runs in self.runs.items()}

    @property
    def split(self) -> str:
        """Which text the models are scored on: test or validation."""
        return self.all[0].split

    @cached_property
    def metric(self) -> Metric:
        """What figures show of the scores: what a run asks for, or what suits them."""
        asked = (run.config["evaluation"].get("metric") for run in self.all)
        scores = (score for runs in self.drawn.values() for run in runs for score in run.scores)
        return metric_of(scores, next(filter(None, asked), None))

    @cached_property
    def instructed(self) -> bool:
        """Whether the clients hold prompts with answers, which are samples, rather than text."""
        scores = [score for run in self.all for score in run.scores]
        return bool(scores) and all("samples" in score for score in scores)

    @cached_property
    def clients(self) -> list[str]:
        """Names of the clients whose test texts are scored; without scores, of those in the run."""
        tested = {client for run in self.all for client in run.series(PERPLEXITY)}
        return sorted(tested or {client for run in self.all for client in run.clients})

    @property
    def first(self) -> Iterator[tuple[str, ReportedRun]]:
        """Of each label the drawn run with the smallest seed."""
        for label, runs in self.drawn.items():
            yield label, runs[0]

    @cached_property
    def finished(self) -> dict[str, list[Mapping[str, Any]]]:
        """Results by label, of those that have any."""
        results = {label: [r.result for r in runs if r.result] for label, runs in self.runs.items()}
        return {label: found for label, found in results.items() if found}


def over_seeds(series: Iterable[Series]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Rounds (or steps), and there the mean over seeds and the standard deviation (0 for one)."""
    found = list(series)
    at = sorted({x for one in found for x in one})
    values = [[one[x] for one in found if x in one] for x in at]
    spread = [np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values]
    return at, np.array([np.mean(v) for v in values]), np.array(spread)


def mean_series(series: Iterable[Series]) -> Series:
    """The mean over clients, where all of them have a figure."""
    found = list(series)
    common = set.intersection(*(set(one) for one in found)) if found else set()
    return {x: float(np.mean([one[x] for one in found])) for x in sorted(common)}


def experiments(paths: Iterable[Path]) -> list[Experiment]:
    """The runs in these folders, put together; raises CoterieError if a folder holds none.

    A folder may be a run's, one that holds runs, or one that holds such folders.
    """
    found: dict[Path, tuple[str, ReportedRun]] = {}
    for path in paths:
        for name, folder in _find(path):
            found.setdefault(folder.path.resolve(), (name, ReportedRun.read(folder)))
    together: dict[str, tuple[str, list[ReportedRun]]] = {}
    for name, run in found.values():
        together.setdefault(_texts_and_base(run), (name, []))[1].append(run)
    names: list[str] = []
    for name, _ in together.values():
        names.append(f"{name}-{names.count(name) + 1}" if name in names else name)
    return [
        Experiment(name, _by_label(runs))
        for name, (_, runs) in zip(names, together.values(), strict=True)
    ]


def _find(path: Path) -> Iterator[tuple[str, RunFolder]]:
    """Run folders with the name of what they belong to: the run, or the folder that holds them."""
    if RunFolder(path).is_run:
        name = RunFolder(path).description["config"]["name"]
        for folder in (path, *sorted((path / "baselines").glob("*"))):
            if RunFolder(folder).is_run:
                yield name, RunFolder(folder)
        return
    for pattern in ("*", "*/*"):
        inner = [p for p in sorted(path.glob(pattern)) if RunFolder(p).is_run]
        for folder in inner:
            yield from ((folder.parent.name, found) for _, found in _find(folder))
        if inner:
            return
    raise CoterieError(f"{path} is neither a run's folder nor one that holds runs.")


def _texts_and_base(run: ReportedRun) -> str:
    """What the runs of an experiment have in common; keys that are not set do not count."""
    keys = ("base", "bases", "server", "data", "clients", "divide")
    common = {key: run.config.get(key) for key in keys}
    return json.dumps([run.split, _set_only(common)], sort_keys=True)


def _set_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        # None, false and an empty mapping are what a key's absence stands for.
        kept = {k: v for k, v in value.items() if v is not None and v is not False and v != {}}
        return {key: _set_only(inner) for key, inner in kept.items()}
    return [_set_only(inner) for inner in value] if isinstance(value, list | tuple) else value


def _by_label(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Runs by label, methods in the order of `coterie methods`, seeds in theirs."""
    known = [*available(), POOLED]
    labelled: dict[str, list[ReportedRun]] = {}
    methods = dict.fromkeys(run.method for run in runs)
    for method in sorted(methods, key=lambda m: known.index(m) if m in known else len(known)):
        alike = [run for run in runs if run.method == method]
        settings = {id(run): dict(_settings(run.config)) for run in alike}
        keys = dict.fromkeys(key for found in settings.values() for key in found)
        differ = [k for k in keys if len({str(s.get(k)) for s in settings.values()}) > 1]
        for run in sorted(alike, key=lambda run: run.config["seed"]):
            chosen = settings[id(run)]
            label = " ".join([method, *(f"{k.split('.')[-1]}={chosen.get(k)}" for k in differ)])
            labelled.setdefault(label, []).append(run)
    return labelled


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "rounds", config["rounds"]
    for section in ("method", "training"):
        yield from ((f"{section}.{key}", value) for key, value in config[section].items())
