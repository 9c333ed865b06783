"""Runs as their folders tell of them: found in folders, put together by experiment and method.

An experiment is runs on the same texts and base. Its runs are told apart by a label: the method's
name, with those settings in which runs of that method differ. Runs that differ only in their seed
have one label; their figures are averaged.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import pandas as pd

from coterie.analysis.frame import Frame, metrics, parts
from coterie.bases import BaseSpec
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric, metric_of
from coterie.files import refuse_links
from coterie.messages.names import ASSIGNMENT, ROUTING, SERVER_SCORE, TEST
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import SERVER, Method
from coterie.methods.registry import POOLED, kind_of, method_from, names
from coterie.runs import RunFolder
from coterie.runs.read import Outcome, read_json

MEAN = "mean over clients"
"""A column beside the clients', of whose names none has a space."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, finished or not: what it was and what it has measured so far."""

    path: Path
    config: Mapping[str, Any]
    clients: Mapping[str, Mapping[str, Any]]
    """run.json's entry of each client: its tokens and labels, where the run recorded them."""
    metrics: Frame
    """A row per line of metrics.jsonl; see `metrics`."""
    result: Mapping[str, Any] | None
    """As `RunFolder.outcome` has it."""
    server: Mapping[str, Any]
    """run.json's entry of a server with a model of its own; empty without one."""

    @classmethod
    def read(cls, folder: RunFolder) -> "ReportedRun":
        """Everything but the checkpoints. A server that was told no scores has no result."""
        about, result = folder.description, folder.outcome
        if result is not None:
            read_json(folder.path, "result.json", Outcome)
            result = result if result[result["reports"]] else None
        found, server = metrics(folder.metrics()), about.get("server", {})
        return cls(folder.path, about["config"], about["clients"], found, result, server)

    @property
    def method(self) -> str:
        """The method's name for tables."""
        return POOLED if self.config["pooled"] else self.config["method"]["name"]

    @property
    def rounds(self) -> int:
        """Rounds of which there are figures."""
        return max(self.metrics["round"], default=0)

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
        return (kind_of(self.method) if self.method in names() else Method).reports

    @property
    def own(self) -> str:
        """The name of the figure that holds the method's own scores."""
        return f"{TEST}{self.reports}"

    def by_client(self, name: str) -> Frame:
        """A figure of the clients; see `parts`."""
        return parts(self.metrics[(self.metrics["name"] == name) & self.metrics["client"].notna()])

    def names(self, prefix: str) -> list[str]:
        """Names of figures that begin so, in the order of their first appearance."""
        return [name for name in self.metrics["name"].unique() if name.startswith(prefix)]

    @property
    def has_routers(self) -> bool:
        """Whether it recorded its routers' weights, of experts that stay with their clients."""
        return bool(self.names(ROUTING)) and not self.names(ASSIGNMENT)

    def expert_names(self, client: str, count: int) -> list[str]:
        """What to call a client's experts: by their role, numbered where there are several."""
        try:
            method = method_from(dict(self.config["method"]))
            roles = method.layout(client).roles if isinstance(method, AdapterMethod) else ()
        except CoterieError:  # a method that is not installed here
            roles = ()
        if len(roles) != count:
            return [f"expert {n + 1}" for n in range(count)]
        several = {role for role in roles if roles.count(role) > 1}
        return [
            f"{role} {roles[: n + 1].count(role)}" if role in several else role
            for n, role in enumerate(roles)
        ]

    def by_round(self, name: str) -> dict[int, Any]:
        """Values of one figure of the run itself, by round (1 is the first)."""
        found = self.metrics[(self.metrics["name"] == name) & self.metrics["client"].isna()]
        return dict(zip(found["round"], found["value"], strict=True))

    @property
    def scores(self) -> list[Mapping[str, float]]:
        """The method's own scores: those at the end or, without an end, all there are."""
        if self.result is not None:
            return list(self.result[self.result["reports"]].values())
        return list(self.metrics["value"][self.metrics["name"] == self.own])

    def headline(self, metric: Metric) -> dict[str, float]:
        """Return the result's scores in the unit that is shown, as columns of `series`."""
        if self.result is None:
            return {}
        clients = self.result[self.result["reports"]]
        shown = {name: metric.shown(score[metric.name]) for name, score in clients.items()}
        server = self.result.get("server")
        served = {SERVER: metric.shown(server[metric.name])} if server else {}
        return {MEAN: sum(shown.values()) / len(shown), **shown, **served}

    def series(self, metric: Metric) -> Frame:
        """The method's own figure in the unit that is shown: a row per round, a column per client.

        Then MEAN, where all clients have one; SERVER is the server's own model, if it was scored.
        """
        scored = self.metrics["name"].isin([self.own, SERVER_SCORE])
        scores = parts(self.metrics[scored].fillna({"client": SERVER}))
        shown = scores.reindex(columns=[metric.name])[metric.name].dropna().map(metric.shown)
        found = shown.groupby(["round", "client"]).last().unstack("client")
        served = [SERVER] if self.names(SERVER_SCORE) else []
        clients = found.drop(columns=served, errors="ignore")
        return found.assign(**{MEAN: clients.mean(axis=1, skipna=False)})


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
        runs = self.runs.items()
        return {label: [r for r in own if r.result] or list(own) for label, own in runs}

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
    def series(self) -> Frame:
        """That of the drawn runs: a row per label, run (0, 1, ...) and round; columns as of one."""
        found = {
            (label, n): run.series(self.metric)
            for label, runs in self.drawn.items()
            for n, run in enumerate(runs)
        }
        return pd.concat(found).rename_axis(index=["label", "run", "round"])

    @cached_property
    def clients(self) -> list[str]:
        """Names of the clients whose test texts are scored; without scores, of those in the run."""
        tested = {c for run in self.all for c in run.by_client(run.own).index.unique("client")}
        return sorted(tested or {client for run in self.all for client in run.clients})

    @cached_property
    def bases(self) -> tuple[list[str], str | None]:
        """The clients' bases in words, and the server's where it has a model."""
        config = self.all[0].config
        own, server = config.get("bases") or {}, config.get("server")
        bases = [own.get(client, config["base"]) for client in self.clients] or [config["base"]]
        named = list(dict.fromkeys(str(BaseSpec.model_validate(base)) for base in bases))
        served = str(BaseSpec.model_validate(server["base"] or config["base"])) if server else None
        return named, served

    @property
    def first(self) -> list[tuple[str, ReportedRun]]:
        """Of each label the drawn run with the smallest seed."""
        return [(label, runs[0]) for label, runs in self.drawn.items()]

    @cached_property
    def finished(self) -> dict[str, list[Mapping[str, Any]]]:
        """Results by label, of those that have any."""
        results = {label: [r.result for r in runs if r.result] for label, runs in self.runs.items()}
        return {label: found for label, found in results.items() if found}


def experiments(paths: Iterable[Path]) -> list[Experiment]:
    """The runs in these folders, put together; raises CoterieError if a folder holds none.

    A folder may be a run's, one that holds runs, or one that holds such folders.
    """
    found: dict[Path, tuple[str, ReportedRun]] = {}
    for path in paths:
        for name, folder in _find(path):
            found.setdefault(folder.path.resolve(), (name, ReportedRun.read(folder)))
    together: dict[str, list[tuple[str, ReportedRun]]] = {}
    for name, run in found.values():
        together.setdefault(_texts_and_base(run), []).append((name, run))
    named: dict[str, Experiment] = {}
    for alike in together.values():
        name = alike[0][0]
        choices = chain([name], (f"{name}-{n}" for n in count(2)))
        unique = next(choice for choice in choices if choice not in named)
        named[unique] = Experiment(unique, _by_label([run for _, run in alike]))
    return list(named.values())


def _find(path: Path) -> Iterator[tuple[str, RunFolder]]:
    """Run folders with the name of what they belong to: the run, or the folder that holds them."""
    if RunFolder(path).is_run:
        about = RunFolder(path).description  # checks the format first
        name = about["config"]["name"]
        for folder in (path, *sorted((path / "baselines").glob("*"))):
            refuse_links(path, folder.relative_to(path))
            if RunFolder(folder).is_run:
                yield name, RunFolder(folder)
        return
    for pattern in ("*", "*/*"):
        inner = [p for p in sorted(path.glob(pattern)) if RunFolder(p).is_run]
        for folder in inner:
            yield from ((folder.parent.name, found) for _, found in _find(folder))
        if inner:
            return
    raise CoterieError(f"{path} is neither a run folder nor a folder of runs.")


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
    known = [*names(), POOLED]
    labelled: dict[str, list[ReportedRun]] = {}
    methods = dict.fromkeys(run.method for run in runs)
    for method in sorted(methods, key=lambda m: known.index(m) if m in known else len(known)):
        alike = [run for run in runs if run.method == method]
        settings = {id(run): dict(_settings(run.config)) for run in alike}
        keys = dict.fromkeys(key for found in settings.values() for key in found)
        differ = [k for k in keys if len({str(s.get(k, "")) for s in settings.values()}) > 1]
        for run in sorted(alike, key=lambda run: run.config["seed"]):
            chosen = settings[id(run)]
            shown = [f"{k.partition('.')[2] or k}={chosen[k]}" for k in differ if k in chosen]
            label = " ".join([method, *shown])
            labelled.setdefault(label, []).append(run)
    return labelled


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "rounds", config["rounds"]
    for section in ("method", "training"):
        for key, value in config[section].items():
            inner = value if isinstance(value, Mapping) else {}
            yield from ((f"{section}.{key}.{name}", setting) for name, setting in inner.items())
            if not inner:
                yield f"{section}.{key}", value


def chosen_layers(layer: str | None, count: int) -> list[int]:
    """Which of so many layers are shown, from 0; raises CoterieError if there is no such layer."""
    if not count:
        return []  # a client with one expert has no router
    named = {"first": 0, "middle": (count - 1) // 2, "last": count - 1}
    if layer is None:
        return sorted(set(named.values()))
    if layer in named:
        return [named[layer]]
    if not (layer.isdecimal() and 1 <= int(layer) <= count):
        raise CoterieError(f"--layer takes first, middle, last, or a number from 1 to {count}.")
    return [int(layer) - 1]
