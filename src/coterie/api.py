"""The Python API: run, resume and compare methods, and load and evaluate trained models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from coterie.analysis import Comparison, Table, run_table
from coterie.analysis.benchmarks import evaluate
from coterie.analysis.cells import Cells, Report, Tuner
from coterie.analysis.comparison import check_against, gains
from coterie.config.read import load_config
from coterie.config.run import RunConfig, parse
from coterie.engines.floor import floor_in
from coterie.engines.processes import completing
from coterie.engines.session import Engine, Session
from coterie.errors import CoterieError
from coterie.exports import Exported, export
from coterie.files import path_part, write_json, write_text
from coterie.inference.finished import load, model_of, recorded, tokenizer
from coterie.methods.contract import Method
from coterie.runs import Callback, RunFolder
from coterie.transforms.contract import Transform

__all__ = ["Exported", "Run", "compare", "evaluate", "export", "load", "resume", "run"]
__all__ += ["tokenizer", "write_comparison"]

Config = RunConfig | Mapping[str, Any] | str | Path
"""A `RunConfig`, the content of a run file as a mapping, or the path of a run file."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run and its baselines."""

    path: Path
    """The run folder; baselines are in its subfolder `baselines`."""
    config: RunConfig
    """The configuration of the run."""
    results: dict[str, dict[str, Any]]
    """The content of each result.json. The keys are the names of the methods.

    The baselines come first, and the run's method comes last.
    """

    def __fspath__(self) -> str:
        """Return the run folder, so that functions accept a run in place of its path."""
        return str(self.path)

    def __repr__(self) -> str:
        """Return a text that shows the run folder and the names of the methods."""
        return f"Run({str(self.path)!r}, methods={list(self.results)})"

    def _repr_html_(self) -> str:
        """Return the table of scores as HTML, which notebooks display."""
        return self.table()._repr_html_()

    def table(self) -> Table:
        """Return the scores of all clients.

        Returns:
            A table with a row per client and a column per method.
        """
        scored = self.config.evaluation
        outcome = RunFolder(self.path).outcome
        floor = None if outcome is None else floor_in(outcome)
        return run_table(self.results, scored.split, scored.metric, floor)

    def gains(self) -> str | None:
        """Compare the run's method with `local` for each client.

        Returns:
            A sentence that says for which clients the method is better or worse than `local`. The
            result is None if `local` is not among the run's baselines, or if the results contain no
            scores of individual test windows.
        """
        folders = {name: self.path / "baselines" / name for name in self.results}
        folders[self.config.label] = self.path
        outcomes = {name: RunFolder(folders[name]).outcome for name in self.results}
        finished = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        return gains(finished, self.config.evaluation.metric)

    def model(self, client: str) -> PreTrainedModel:
        """Load the model of a client or of the server.

        LoRA pairs are merged into the base's weights in the same cases in which the function
        `coterie.load` merges them by default.

        Args:
            client: The client's name, or "server" for the server's own model.

        Returns:
            A PEFT model if the adapter is a soft prompt, and a transformers model otherwise.

        Raises:
            CoterieError: The run has no such client, or the method trains no model on the server.
        """
        return model_of(RunFolder(self.path), self.config, client)


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    method: Method | None = None,
    transforms: Sequence[Transform] | None = None,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
    engine: Engine = "local",
    address: str | None = None,
    gpus: float | None = None,
    jobs: int = 1,
    report: Report = lambda line: None,
) -> Run:
    """Execute a run and its baselines.

    The baselines are executed first, or at the same time if `jobs` is greater than 1.

    Args:
        config: A `RunConfig`, the content of a run file as a mapping, or the path of a run file.
        out: The folder to create for the run; by default, `runs/NAME` with the run's name.
        method: A method to use instead of the method in `config`. Its class need not be registered
            if `engine` is "local".
        transforms: Aggregation transforms to use instead of the transforms in `config`. Their
            classes need not be registered if `engine` is "local" and `jobs` is 1.
        force: Whether to overwrite a run that the folder already contains.
        callbacks: Objects whose hooks are called during the baselines and the run.
        engine: "local" trains clients one at a time in this process; "ray" trains them in several
            processes on this machine or in a Ray cluster.
        address: The HOST:PORT of a running Ray cluster for the engine "ray"; by default, the engine
            starts Ray on this machine.
        gpus: The number of GPUs of each process of the engine "ray", which may be a fraction, such
            as 0.25. By default, each process has the number of GPUs that the key `device` of the
            run file requests. For `auto`, this is one GPU, or none if the Ray cluster has no GPU.
        jobs: The maximum number of processes. This process executes the run; each other process
            executes one baseline at a time. Unless the run file sets `threads`, the processes share
            the processors equally. The engine "ray" needs `jobs=1`.
        report: Function that is called with each line of a baseline's progress in another process.
            The call is made in another thread.

    Returns:
        The finished run and its baselines.

    Raises:
        CoterieError: The configuration is invalid, the method cannot carry out the run, or training
            diverged. The error is also raised if a text or a base cannot be read, or if the folder
            already contains a run and `force` is false.
    """
    config = _config(config)
    if method is not None:
        config = config.model_copy(update={"method": method})
    if transforms is not None:
        aggregation = config.aggregation.model_copy(update={"transforms": tuple(transforms)})
        config = config.model_copy(update={"aggregation": aggregation})
    path = Path(out) if out is not None else Path("runs") / config.name
    RunFolder(path).refuse(force)  # before a base is loaded
    _check_jobs(jobs, engine)
    threads = config.threads or (max(1, torch.get_num_threads() // jobs) if jobs > 1 else None)
    session = Session(config, threads, engine, address, gpus)
    session.check(config, *map(config.with_method, config.baselines))
    description = session.description(config, session.participants(config))
    for text in session.warnings:
        for callback in callbacks:
            callback.on_warning(text)
    folder = RunFolder.create(path, description, force)
    return _continue(session, folder, callbacks, jobs, report)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    callbacks: Sequence[Callback] = (),
    engine: Engine | None = None,
    address: str | None = None,
    gpus: float | None = None,
    from_round: int | None = None,
    jobs: int = 1,
    report: Report = lambda line: None,
) -> Run:
    """Continue an interrupted run from its newest checkpoint.

    The result is identical to the result of an uninterrupted run.

    Args:
        path: The run folder.
        method: The run's method, if its class is not registered.
        callbacks: Objects whose hooks are called during the baselines and the run.
        engine: "local" or "ray", as in `run`; by default, the engine that the run began with. The
            result does not depend on the engine.
        address: The Ray cluster, as in `run`; it is not recorded in the run folder.
        gpus: The number of GPUs of each process, as in `run`; it is not recorded either.
        from_round: The number of complete rounds in the checkpoint from which the run continues.
            Use this argument if the newest checkpoint is damaged. The newest checkpoint itself
            cannot be selected in this way. The checkpoints of later rounds are deleted. By default,
            the newest checkpoint is used.
        jobs: The maximum number of processes, as in `run`; it is not recorded either.
        report: Function that is called with lines of progress, as in `run`.

    Returns:
        The finished run and its baselines.

    Raises:
        CoterieError: The folder contains no run, or contains a deployed run (of `coterie server` or
            `coterie client`). The error is also raised if a client's text or a plugin has changed
            since the run began, or if `from_round` refers to the newest checkpoint or to a
            checkpoint that does not exist.
    """
    folder = RunFolder(Path(path))
    config, description = recorded(folder, method), folder.description
    if "run" in description:
        raise CoterieError(
            f"{path} is a deployed run; continue a server's run with `coterie server --resume`, "
            "and a client's run with the same `coterie client` command that started it."
        )
    if from_round is not None:
        _go_back(folder, from_round)
    recorded_engine: Engine = description.get("engine", "local")
    _check_jobs(jobs, engine or recorded_engine)
    session = Session(config, description["threads"], engine or recorded_engine, address, gpus)
    return _continue(session, folder, callbacks, jobs, report)


def _go_back(folder: RunFolder, rounds: int) -> None:
    """Delete newer checkpoints of a run and its baselines, to return to a given round.

    Finished runs keep their checkpoints.

    Args:
        folder: The folder of the run.
        rounds: The number of complete rounds to return to. Checkpoints with more complete rounds
            are deleted.

    Raises:
        CoterieError: There is no checkpoint to delete. The error is also raised if an unfinished
            run has checkpoints of later rounds, but no checkpoint with exactly `rounds` complete
            rounds.
    """
    runs = [folder, *map(RunFolder, sorted(folder.path.glob("baselines/*")))]
    unfinished = [(run, recorded(run).turns_in) for run in runs if run.result is None]
    later = [(run, turns_in) for run, turns_in in unfinished if run.turns() > turns_in(rounds)]
    if not later:
        raise CoterieError(
            f"No unfinished run in {folder.path} has a checkpoint later than round {rounds}; "
            "choose an earlier round."
        )
    with folder.lock():
        for run, turns_in in later:
            run.go_back(rounds, turns_in)


def compare(
    config: Config,
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    *,
    seeds: int = 1,
    tune: Mapping[str, Sequence[Any]] | None = None,
    against: str | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    report: Report = lambda text: None,
) -> Comparison:
    """Run several methods on the same data, and compare their scores.

    Args:
        config: The configuration, in any form that `run` accepts. The method and the baselines in
            the configuration are not used.
        methods: Names of methods, or `Method` objects. The keys of a mapping become the names of
            rows in the tables, as in `{"rank 4": FedAvg(...), "rank 8": FedAvg(...)}`.
        seeds: The number of consecutive seeds; the first seed is the seed in `config`.
        tune: Values to try for keys of the run file, such as
            `{"training.learning_rate": [1e-4, 1e-3]}`. Each method uses the combination with the
            best validation score for the first seed.
        against: The name of the row with which the other rows are compared; by default, the row
            with the best score.
        out: The folder for runs, compare.md and compare.json; by default, `runs/compare-NAME`.
            Finished runs in this folder are reused, and an interrupted run is continued.
        callbacks: Objects whose hooks are called during all runs.
        report: Function that is called with a line of text for each run and each warning.

    Returns:
        The results of all runs, from which tables can be created.

    Raises:
        CoterieError: An argument is invalid, `out` is the folder of a run, or training diverged.
    """
    config = _config(config)
    rows = {name: config.with_method(method) for name, method in _named(methods).items()}
    check_against(against, rows)
    path = Path(out) if out is not None else Path("runs") / f"compare-{config.name}"
    if RunFolder(path).is_run:
        raise CoterieError(f"{path} already contains a run; choose another folder with --out.")
    session = Session(config)
    session.check(*rows.values())
    for text in session.warnings:
        report(text)
    tuner = Tuner(session, tune or {})
    trials = {name: tuner.trials(name, row) for name, row in rows.items()}
    cells = Cells(sum(map(len, trials.values())) + seeds * len(rows), callbacks, report)
    tuned: dict[str, dict[str, Any]] = {}
    for name, candidates in trials.items():
        if candidates:
            rows[name], tuned[name] = tuner.choose(cells, candidates, path)
    floors: list[dict[str, Any]] = []
    results: dict[str, list[dict[str, Any]]] = {}
    split, metric = config.evaluation.split, config.evaluation.metric
    comparison = Comparison(config.name, results, split, metric, against, tuned, floors)
    for seed in range(config.seed, config.seed + seeds):
        floors.append(session.floor(config.model_copy(update={"seed": seed})))
        for name, row in rows.items():
            cell = row.model_copy(update={"seed": seed, "name": f"{path_part(name)}-seed{seed}"})
            results.setdefault(name, []).append(cells.finished(session, cell, path)[1])
            write_comparison(replace(comparison), path)  # a copy, as the original caches its rows
    return comparison


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the tables of a comparison to compare.md, and the summary to compare.json.

    Args:
        comparison: The comparison.
        path: The folder for both files.
    """
    write_text(path / "compare.md", "\n".join(t.markdown() for t in comparison.tables()))
    write_json(path / "compare.json", comparison.summary())


def _continue(
    session: Session, folder: RunFolder, callbacks: Sequence[Callback], jobs: int, report: Report
) -> Run:
    config, results = session.config, {}
    names = [name for name in config.baselines if name != config.label]
    with folder.lock():
        if jobs > 1:
            baselines = [_baseline(session, folder, name)[0] for name in names]
            paths = [baseline.path for baseline in baselines if baseline.result is None]
            plugins = list(dict.fromkeys(plugin["file"] for plugin in config.plugins.values()))
            with completing(paths, jobs - 1, plugins, report):
                session.finish(folder, config, callbacks)
        for name in names:
            baseline, baseline_config = _baseline(session, folder, name)
            session.finish(baseline, baseline_config, callbacks)
            results[name] = baseline.result
        session.finish(folder, config, callbacks)
        results[config.label] = folder.result
        finished = Run(folder.path, config, results)
        write_text(folder.path / "table.md", finished.table().markdown())
    return finished


def _baseline(session: Session, folder: RunFolder, name: str) -> tuple[RunFolder, RunConfig]:
    """Return the folder and the configuration of a baseline; create the folder if necessary."""
    # Questions are asked at the end.
    evaluation = session.config.evaluation.model_copy(update={"questions": None})
    update = {"name": name, "evaluation": evaluation}
    config = session.config.with_method(name).model_copy(update=update)
    baseline = RunFolder(folder.path / "baselines" / name)
    if not baseline.is_run:
        description = session.description(config, session.participants(config))
        baseline = RunFolder.create(baseline.path, description)
    return baseline, config


def _check_jobs(jobs: int, engine: Engine) -> None:
    """Raise CoterieError if the number of processes cannot be used with an engine."""
    if jobs < 1:
        raise CoterieError(f"jobs is {jobs}; it must be at least 1.")
    if jobs > 1 and engine != "local":
        raise CoterieError("Several jobs need the engine `local`; leave out --engine or --jobs.")


def _named(methods: Sequence[str | Method] | Mapping[str, str | Method]) -> dict[str, str | Method]:
    """Return a mapping from the name of each table row to the method that the row shows."""
    if not methods:
        raise CoterieError("Name at least one method to compare; `coterie methods` lists them.")
    if isinstance(methods, Mapping):
        return dict(methods)
    named: dict[str, str | Method] = {}
    for method in methods:
        name = method if isinstance(method, str) else method.name
        if named.setdefault(name, method) != method:
            raise CoterieError(
                f"Two methods are called {name!r}; pass a mapping with a different name for each."
            )
    return named


def _config(config: Config) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return parse(config) if isinstance(config, Mapping) else load_config(Path(config))
