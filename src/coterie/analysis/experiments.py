"""Runs read from their folders, grouped by experiment and label.

An experiment is a set of runs on the same texts and base. The label of a run is the method's name,
followed by the settings in which the runs of that method differ. Runs that differ only in their
seeds have the same label, and figures show the mean over these runs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from coterie.analysis.frame import Frame, components, metrics
from coterie.bases import BaseSpec
from coterie.config.errors import validated
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
"""The name of the column of means. It differs from all clients' names, which have no spaces."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A finished or unfinished run: its configuration, and the metrics recorded so far."""

    path: Path
    config: Mapping[str, Any]
    clients: Mapping[str, Mapping[str, Any]]
    """Each client's entry in run.json, which includes the number of tokens in each split."""
    metrics: Frame
    """The recorded metrics, with a row per line of metrics.jsonl; see `frame.metrics`."""
    result: Mapping[str, Any] | None
    """The run's outcome (`RunFolder.outcome`); None if the run is unfinished or has no scores."""
    server: Mapping[str, Any]
    """The server's entry in run.json; empty if the server has no model of its own."""

    @classmethod
    def read(cls, folder: RunFolder) -> "ReportedRun":
        """Read a run folder, except for the checkpoints."""
        description, result = folder.description, folder.outcome
        if result is not None:
            read_json(folder.path, "result.json", Outcome)
            # A server to which the clients send no scores has an empty result.
            result = result if result[result["reports"]] else None
        config, clients = description["config"], description["clients"]
        server = description.get("server", {})
        return cls(folder.path, config, clients, metrics(folder.metrics()), result, server)

    @property
    def method(self) -> str:
        """The name of the run's method in tables and figures."""
        return POOLED if self.config["pooled"] else self.config["method"]["name"]

    @property
    def rounds(self) -> int:
        """The number of rounds that have metrics."""
        return max(self.metrics["round"], default=0)

    @property
    def progress(self) -> str:
        """A description of an unfinished run, with the seed and the number of rounds so far."""
        return f"seed {self.config['seed']}: {self.rounds} of {self.config['rounds']} rounds"

    @property
    def split(self) -> str:
        """The split on which models are scored: "test" or "validation"."""
        return self.config["evaluation"].get("split", "test")

    @property
    def reports(self) -> str:
        """The point of a round at which the method reports scores: "trained" or "aggregated"."""
        if self.result is not None:
            return self.result["reports"]
        return (kind_of(self.method) if self.method in names() else Method).reports

    @property
    def score_name(self) -> str:
        """The name of the metric that contains the scores at the point named by `reports`."""
        return f"{TEST}{self.reports}"

    def by_client(self, name: str) -> Frame:
        """Return the values of a metric that is recorded for each client; see `components`."""
        rows = (self.metrics["name"] == name) & self.metrics["client"].notna()
        return components(self.metrics[rows])

    def names(self, prefix: str) -> list[str]:
        """Return the names of the metrics that begin with a prefix, in the order of the log."""
        return [name for name in self.metrics["name"].unique() if name.startswith(prefix)]

    @property
    def has_routers(self) -> bool:
        """Whether the run recorded routing weights that can be shown for each expert.

        They cannot be shown for each expert if the clients' experts are reassigned in every round.
        """
        return bool(self.names(ROUTING)) and not self.names(ASSIGNMENT)

    def expert_names(self, client: str, count: int) -> list[str]:
        """Return names for a client's experts.

        An expert's name is its role, such as `generalist`, followed by a number if several experts
        have the same role. If the roles are unknown, the names are `expert 1`, `expert 2`, ...

        Args:
            client: The name of the client.
            count: The number of the client's experts.
        """
        try:
            method = method_from(dict(self.config["method"]))
            roles = method.layout(client).roles if isinstance(method, AdapterMethod) else ()
        except (CoterieError, ValidationError):  # the method is not installed, or has changed
            roles = ()
        if len(roles) != count:
            return [f"expert {n + 1}" for n in range(count)]
        return [
            f"{role} {roles[: n + 1].count(role)}" if roles.count(role) > 1 else role
            for n, role in enumerate(roles)
        ]

    def by_round(self, name: str) -> dict[int, Any]:
        """Map each round (counted from 1) to the value of a metric of the whole run."""
        rows = self.metrics[(self.metrics["name"] == name) & self.metrics["client"].isna()]
        return dict(zip(rows["round"], rows["value"], strict=True))

    @property
    def scores(self) -> list[Mapping[str, float]]:
        """The final scores of all clients or, for an unfinished run, all scores recorded so far."""
        if self.result is not None:
            return list(self.result[self.result["reports"]].values())
        return list(self.metrics["value"][self.metrics["name"] == self.score_name])

    def headline(self, metric: Metric) -> dict[str, float]:
        """Return the final scores in the unit used in tables and figures.

        Returns:
            A mapping from the columns of `series` to scores. It is empty if the run is unfinished.
        """
        if self.result is None:
            return {}
        clients = self.result[self.result["reports"]]
        shown = {name: metric.shown(score[metric.name]) for name, score in clients.items()}
        server = self.result.get("server")
        served = {SERVER: metric.shown(server[metric.name])} if server else {}
        return {MEAN: sum(shown.values()) / len(shown), **shown, **served}

    def series(self, metric: Metric) -> Frame:
        """Return the scores over rounds in the unit used in tables and figures.

        Returns:
            A frame with a row per round and a column per client. Column MEAN contains the mean over
            clients, or NaN if any client has no score in the round. If the server's own model was
            scored, column SERVER contains its scores.
        """
        scored = self.metrics["name"].isin([self.score_name, SERVER_SCORE])
        scores = components(self.metrics[scored].fillna({"client": SERVER}))
        shown = scores.reindex(columns=[metric.name])[metric.name].dropna().map(metric.shown)
        series = shown.groupby(["round", "client"]).last().unstack("client")
        served = [SERVER] if self.names(SERVER_SCORE) else []
        clients = series.drop(columns=served, errors="ignore")
        return series.assign(**{MEAN: clients.mean(axis=1, skipna=False)})


@dataclass(frozen=True)
class Experiment:
    """A set of runs on the same texts and base, grouped by label.

    A label is the name of a method, followed by the settings in which the method's runs differ.
    """

    name: str
    runs: Mapping[str, Sequence[ReportedRun]]
    """For each label, the label's runs, one per seed."""

    @cached_property
    def all(self) -> list[ReportedRun]:
        """All runs of the experiment."""
        return [run for runs in self.runs.values() for run in runs]

    @cached_property
    def drawn(self) -> dict[str, list[ReportedRun]]:
        """For each label, the runs that appear in figures.

        For each label, these are the finished runs, or all runs if no run of the label is finished.
        Finished and unfinished runs are not averaged together, because the mean over seeds would
        jump after the last recorded round of an unfinished run.
        """
        labelled = self.runs.items()
        return {label: [r for r in runs if r.result] or list(runs) for label, runs in labelled}

    @property
    def split(self) -> str:
        """The split on which models are scored: "test" or "validation"."""
        return self.all[0].split

    @cached_property
    def metric(self) -> Metric:
        """The metric shown in figures: the default metric, or a metric named by a run file."""
        asked = (run.config["evaluation"].get("metric") for run in self.all)
        scores = (score for runs in self.drawn.values() for run in runs for score in run.scores)
        return metric_of(scores, next(filter(None, asked), None))

    @cached_property
    def instructed(self) -> bool:
        """Whether the clients' data are samples (prompts with answers) rather than plain text."""
        scores = [score for run in self.all for score in run.scores]
        return bool(scores) and all("samples" in score for score in scores)

    @cached_property
    def series(self) -> Frame:
        """A frame with the scores after every round, for all runs in `drawn`.

        The frame has a row for each label, run and round, and the same columns as the frames that
        `ReportedRun.series` returns. Within a label, runs are numbered from 0.
        """
        frames = {
            (label, n): run.series(self.metric)
            for label, runs in self.drawn.items()
            for n, run in enumerate(runs)
        }
        return pd.concat(frames).rename_axis(index=["label", "run", "round"])

    @cached_property
    def clients(self) -> list[str]:
        """The names of the clients on whose texts models are scored.

        If no run has scores yet, these are the names of all clients.
        """
        scores = (run.by_client(run.score_name) for run in self.all)
        tested = {client for frame in scores for client in frame.index.unique("client")}
        return sorted(tested or {client for run in self.all for client in run.clients})

    @cached_property
    def bases(self) -> tuple[list[str], str | None]:
        """Descriptions of the clients' bases, and of the server's base, if it has one."""
        config = self.all[0].config
        default, server = config["base"], config.get("server")
        by_client = config.get("bases") or {}
        bases = [by_client.get(client, default) for client in self.clients] or [default]
        bases += [server["base"] or default] if server else []
        with RunFolder(self.all[0].path).naming_versions():
            described = [str(validated(BaseSpec, base, ("base",))) for base in bases]
        served = described.pop() if server else None
        return list(dict.fromkeys(described)), served

    @property
    def first(self) -> list[tuple[str, ReportedRun]]:
        """For each label, a pair of the label and the run in `drawn` with the smallest seed."""
        return [(label, runs[0]) for label, runs in self.drawn.items()]

    @cached_property
    def finished(self) -> dict[str, list[Mapping[str, Any]]]:
        """For each label with finished runs, the results of these runs."""
        results = {label: [r.result for r in runs if r.result] for label, runs in self.runs.items()}
        return {label: finished for label, finished in results.items() if finished}


def experiments(paths: Iterable[Path]) -> list[Experiment]:
    """Read the runs in some folders, and group the runs by experiment.

    Args:
        paths: Run folders, or folders that contain run folders one or two levels below.

    Raises:
        CoterieError: if a folder contains no run.
    """
    runs: dict[Path, tuple[str, ReportedRun]] = {}
    for path in paths:
        for name, folder in _find(path):
            runs.setdefault(folder.path.resolve(), (name, ReportedRun.read(folder)))
    groups: dict[str, list[tuple[str, ReportedRun]]] = {}
    for name, run in runs.values():
        groups.setdefault(_texts_and_base(run), []).append((name, run))
    result: dict[str, Experiment] = {}
    for members in groups.values():
        name = members[0][0]
        choices = chain([name], (f"{name}-{n}" for n in count(2)))
        unique = next(choice for choice in choices if choice not in result)
        result[unique] = Experiment(unique, _by_label([run for _, run in members]))
    return list(result.values())


def _find(path: Path) -> Iterator[tuple[str, RunFolder]]:
    """Yield a pair (name, run folder) for every run folder at a path.

    If the path is itself a run folder, there is a pair for this folder, and a pair for the folder
    of each of the run's baselines. All of these pairs contain the name of the run at the path.
    Otherwise, there is a pair for each run folder below the path, and a pair for the folder of each
    of this run's baselines. The name in all of these pairs is the name of the folder that contains
    the run folder.
    """
    if RunFolder(path).is_run:
        name = RunFolder(path).description["config"]["name"]  # checks the folder's format first
        for folder in (path, *sorted((path / "baselines").glob("*"))):
            refuse_links(path, folder.relative_to(path))
            if RunFolder(folder).is_run:
                yield name, RunFolder(folder)
        return
    for pattern in ("*", "*/*"):
        inner = [p for p in sorted(path.glob(pattern)) if RunFolder(p).is_run]
        for folder in inner:
            yield from ((folder.parent.name, run) for _, run in _find(folder))
        if inner:
            return
    raise CoterieError(f"{path} is neither a run folder nor a folder of runs.")


def _texts_and_base(run: ReportedRun) -> str:
    """Return a string that identifies the experiment to which a run belongs.

    The string contains the split and the parts of the configuration that determine the texts and
    the bases. All runs of an experiment have the same string; other runs have different strings.
    """
    keys = ("base", "bases", "server", "data", "clients", "divide")
    common = {key: run.config.get(key) for key in keys}
    return json.dumps([run.split, _set_only(common)], sort_keys=True)


def _set_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        # An absent key is equivalent to the values None, False and {}.
        present = {k: v for k, v in value.items() if v is not None and v is not False and v != {}}
        return {key: _set_only(inner) for key, inner in present.items()}
    return [_set_only(inner) for inner in value] if isinstance(value, list | tuple) else value


def _by_label(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Group runs by label.

    The labels are in the order in which `coterie methods` lists the methods. The runs of a label
    are in the order of their seeds.
    """
    order = [*names(), POOLED]
    labelled: dict[str, list[ReportedRun]] = {}
    methods = dict.fromkeys(run.method for run in runs)
    for method in sorted(methods, key=lambda m: order.index(m) if m in order else len(order)):
        members = [run for run in runs if run.method == method]
        settings = {id(run): dict(_settings(run.config)) for run in members}
        keys = dict.fromkeys(key for values in settings.values() for key in values)
        differ = [k for k in keys if len({str(s.get(k, "")) for s in settings.values()}) > 1]
        for run in sorted(members, key=lambda run: run.config["seed"]):
            values = settings[id(run)]
            shown = [f"{k.partition('.')[2] or k}={values[k]}" for k in differ if k in values]
            labelled.setdefault(" ".join([method, *shown]), []).append(run)
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
    """Return the indices of the layers to show.

    Args:
        layer: "first", "middle", "last", or the number of a layer, counted from 1. None selects the
            first, the middle and the last layer.
        count: The number of layers to choose from, which are the layers that have a router. If the
            number is 0, no layer is shown. This is the case for a client that has a single expert,
            because a single expert needs no router.

    Returns:
        Indices, counted from 0.

    Raises:
        CoterieError: if the layer does not exist.
    """
    if not count:
        return []
    named = {"first": 0, "middle": (count - 1) // 2, "last": count - 1}
    if layer is None:
        return sorted(set(named.values()))
    if layer in named:
        return [named[layer]]
    if not (layer.isdecimal() and 1 <= int(layer) <= count):
        raise CoterieError(
            f"--layer {layer!r} is invalid: give first, middle, last or a number from 1 to {count}."
        )
    return [int(layer) - 1]
