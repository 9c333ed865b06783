"""What the library offers: run, resume, compare, load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from coterie.aggregation.transform import Transform
from coterie.analysis import Comparison, Table, run_table
from coterie.analysis.cells import Cells, Tuner
from coterie.analysis.comparison import check_against, gains
from coterie.config.read import load_config
from coterie.config.run import RunConfig, parse
from coterie.engines.floor import floor_in
from coterie.engines.session import Engine, Session
from coterie.errors import CoterieError
from coterie.files import path_part, write_json, write_text
from coterie.inference.finished import load, model_of, recorded, tokenizer
from coterie.methods.contract import Method
from coterie.runs import Callback, RunFolder

__all__ = ["Run", "compare", "load", "resume", "run", "tokenizer", "write_comparison"]

Config = RunConfig | Mapping[str, Any] | str | Path
"""A run: validated, as plain data, or the path of a run file."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run and the baselines that were run beside it."""

    path: Path
    config: RunConfig
    results: dict[str, dict[str, Any]]
    """result.json by method: baselines first, the run's own method last."""

    def __repr__(self) -> str:
        """Return the folder and the methods."""
        return f"Run({str(self.path)!r}, methods={list(self.results)})"

    def _repr_html_(self) -> str:
        """Return the table of scores for a notebook."""
        return self.table()._repr_html_()

    def table(self) -> Table:
        """Each client's score by method."""
        scored = self.config.evaluation
        outcome = RunFolder(self.path).outcome
        floor = None if outcome is None else floor_in(outcome)
        return run_table(self.results, scored.split, scored.metric, floor)

    def gains(self) -> str | None:
        """Who does better with the run's method than alone, told in a sentence; None where the run
        has no baseline `local`, or where scores by window are missing."""
        folders = {name: self.path / "baselines" / name for name in self.results}
        folders[self.config.label] = self.path
        found = {name: RunFolder(folders[name]).outcome for name in self.results}
        known = {name: outcome for name, outcome in found.items() if outcome is not None}
        return gains(known, self.config.evaluation.metric)

    def model(self, client: str) -> PreTrainedModel:
        """A client's model, or the server's; see `load`."""
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
) -> Run:
    """Run a method, after its baselines, into a new folder (default `runs/NAME`).

    `callbacks` follow the baselines and the run; see `Callback` for what they are told.
    `method` and `transforms` replace the configuration's; their classes need not be registered
    where `engine` is "local".
    Raises CoterieError for anything that the caller can mend; nothing is overwritten unless
    `force`.
    """
    config = _config(config)
    if method is not None:
        config = config.model_copy(update={"method": method})
    if transforms is not None:
        aggregation = config.aggregation.model_copy(update={"transforms": tuple(transforms)})
        config = config.model_copy(update={"aggregation": aggregation})
    path = Path(out) if out is not None else Path("runs") / config.name
    RunFolder(path).refuse(force)  # before a base is loaded
    session = Session(config, engine=engine)
    session.check(config, *map(config.with_method, config.baselines))
    description = session.description(config, session.participants(config))
    for text in session.warnings:
        for callback in callbacks:
            callback.on_warning(text)
    return _continue(session, RunFolder.create(path, description, force), callbacks)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    callbacks: Sequence[Callback] = (),
    engine: Engine | None = None,
    from_round: int | None = None,
) -> Run:
    """Go on with a run that was stopped, to the same result that it would have had.

    The engine makes no difference to it; the default is the one that the run began with.
    from_round: go on from the state after so many rounds, where the newest checkpoint is damaged.
    Raises CoterieError if the folder holds no run or if the clients' texts have changed.
    """
    folder = RunFolder(Path(path))
    config, began = recorded(folder, method), folder.description
    if "run" in began:
        raise CoterieError(
            f"{path} is a deployed run; continue it with `coterie server --resume`, or with "
            "the same `coterie client` command."
        )
    if from_round is not None:
        _go_back(folder, from_round)
    session = Session(config, began["threads"], engine or began.get("engine", "local"))
    return _continue(session, folder, callbacks)


def _go_back(folder: RunFolder, rounds: int) -> None:
    """Take what is unfinished of a run and its baselines back to a round."""
    every = [folder, *map(RunFolder, sorted(folder.path.glob("baselines/*")))]
    further = [run for run in every if run.result is None and run.rounds() > rounds]
    if not further:
        raise CoterieError(f"Nothing unfinished in {folder.path} is past round {rounds}.")
    with folder.lock():
        for run in further:
            run.go_back(rounds)


def compare(
    config: Config,
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    *,
    seeds: int = 1,
    tune: Mapping[str, Sequence[Any]] | None = None,
    against: str | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run several methods on the same data, over `seeds` seeds from the configuration's on.

    A method is a name or an object; a mapping gives each a name in the table, such as
    `{"rank 4": FedAvg(..), "rank 8": FedAvg(..)}`. Runs are kept in `out` (default
    `runs/compare-NAME`) under the hash of their configuration: finished ones are used again, an
    interrupted one is continued. The table is written beside them as Markdown and JSON.

    tune: values by dotted key, such as `{"training.learning_rate": [1e-4, 1e-3]}`. Each method is
    tried with all combinations, with the first seed; the one that does best on validation text is
    then run with all seeds. against: the row from which differences are told; default: the best.
    """
    config = _config(config)
    if not methods:
        raise CoterieError("Name at least one method to compare; `coterie methods` lists them.")
    rows = {name: config.with_method(method) for name, method in _named(methods).items()}
    check_against(against, rows)
    path = Path(out) if out is not None else Path("runs") / f"compare-{config.name}"
    if RunFolder(path).is_run:
        raise CoterieError(f"{path} holds a run; choose another folder with --out.")
    session = Session(config)
    session.check(*rows.values())
    for text in session.warnings:
        report(text)
    tuner = Tuner(session, tune or {})
    trials = {name: tuner.trials(name, row) for name, row in rows.items()}
    cells = Cells(sum(map(len, trials.values())) + seeds * len(rows), callbacks, report)
    tuned: dict[str, dict[str, Any]] = {}
    for name, tried in trials.items():
        if tried:
            rows[name], tuned[name] = tuner.choose(cells, tried, path)
    split, metric = config.evaluation.split, config.evaluation.metric
    floors: list[dict[str, Any]] = []
    results: dict[str, list[dict[str, Any]]] = {}
    found = Comparison(config.name, results, split, metric, against, tuned, floors)
    for seed in range(config.seed, config.seed + seeds):
        floors.append(session.floor(config.model_copy(update={"seed": seed})))
        for name, row in rows.items():
            cell = row.model_copy(update={"seed": seed, "name": f"{path_part(name)}-seed{seed}"})
            results.setdefault(name, []).append(cells.finished(session, cell, path)[1])
            write_comparison(replace(found), path)  # a copy: it keeps the rows that it has told
    return found


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Leave a comparison's table in a folder, as Markdown and JSON."""
    write_text(path / "compare.md", "\n".join(t.markdown() for t in comparison.tables()))
    write_json(path / "compare.json", comparison.summary())


def _continue(session: Session, folder: RunFolder, callbacks: Sequence[Callback]) -> Run:
    config, results = session.config, {}
    with folder.lock():
        for name in config.baselines:
            if name == config.label:
                continue
            baseline = config.with_method(name).model_copy(update={"name": name})
            inner = RunFolder(folder.path / "baselines" / name)
            if not inner.is_run:
                description = session.description(baseline, session.participants(baseline))
                inner = RunFolder.create(inner.path, description)
            session.finish(inner, baseline, callbacks)
            results[name] = inner.result
        session.finish(folder, config, callbacks)
        results[config.label] = folder.result
        finished = Run(folder.path, config, results)
        write_text(folder.path / "table.md", finished.table().markdown())
    return finished


def _named(methods: Sequence[str | Method] | Mapping[str, str | Method]) -> dict[str, str | Method]:
    """What is compared, by its name in the table."""
    if isinstance(methods, Mapping):
        return dict(methods)
    named: dict[str, str | Method] = {}
    for method in methods:
        name = method if isinstance(method, str) else method.name
        if named.setdefault(name, method) != method:
            raise CoterieError(
                f"Two methods are called {name!r}; pass a mapping with a name for each."
            )
    return named


def _config(config: Config) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return parse(config) if isinstance(config, Mapping) else load_config(Path(config))
