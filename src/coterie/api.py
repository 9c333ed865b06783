"""What the library offers: run, resume, compare, load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel

from coterie.base import Base, Bases, Tokenizer, load_base, load_skeleton, load_tokenizer
from coterie.config import RunConfig, load_config, parse
from coterie.data import ClientData
from coterie.engines.local import LocalRun, Rounds
from coterie.errors import CoterieError
from coterie.federation import (
    EVERYONE,
    NOTHING,
    Federation,
    Participant,
    check,
    client_context,
    gathered,
    server_context,
)
from coterie.files import write_json, write_text
from coterie.methods import Method, available
from coterie.methods.base import SERVER
from coterie.report import Comparison, Table, run_table
from coterie.runs import RunFolder, Watch, describe

Config = RunConfig | Mapping[str, Any] | str | Path
"""A run: validated, as plain data, or the path of a run file."""
Engine = Literal["local", "flower-simulation"]
"""Where clients work: in this process, one at a time; or in several processes of this machine."""


@dataclass(frozen=True)
class Run:
    """A finished run and the baselines that were run beside it."""

    path: Path
    config: RunConfig
    results: dict[str, dict[str, Any]]
    """result.json by method: baselines first, the run's own method last."""

    def table(self) -> Table:
        """Each client's score by method."""
        scored = self.config.evaluation
        return run_table(self.results, scored.split, scored.figure)

    def model(self, client: str) -> PreTrainedModel:
        """A client's model, or the server's; see `load`."""
        return _load(RunFolder(self.path), self.config, client)


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    method: Method | None = None,
    force: bool = False,
    watch: Callable[[], Watch] = Watch,
    engine: Engine = "local",
) -> Run:
    """Run a method, after its baselines, into a new folder (default `runs/NAME`).

    `method` replaces the configuration's, and need not be registered where `engine` is "local".
    Raises CoterieError for anything that the caller can mend; nothing is overwritten unless
    `force`.
    """
    config = _config(config)
    if method is not None:
        config = config.model_copy(update={"method": method})
    path = Path(out) if out is not None else Path("runs") / config.name
    RunFolder(path).refuse(force)  # before a base is loaded
    session = Session(config, engine=engine)
    session.check(config, *map(config.with_method, config.baselines))
    description = session.description(config, session.participants(config))
    return _continue(session, RunFolder.create(path, description, force), watch)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    watch: Callable[[], Watch] = Watch,
    engine: Engine | None = None,
) -> Run:
    """Go on with a run that was stopped, to the same result that it would have had.

    The engine makes no difference to it; the default is the one that the run began with. Raises
    CoterieError if the folder holds no run or if the clients' texts have changed.
    """
    folder = RunFolder(Path(path))
    config, began = _recorded(folder, method), folder.description
    if "run" in began:
        raise CoterieError(
            f"{path} is of a deployment; `coterie server --resume`, or the same `coterie client` "
            "command, goes on with it."
        )
    session = Session(config, began["threads"], engine or began.get("engine", "local"))
    return _continue(session, folder, watch)


def compare(
    config: Config,
    methods: Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    watch: Callable[[], Watch] = Watch,
    report: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run several methods on the same data, over `seeds` seeds from the configuration's on.

    Runs are kept in `out` (default `runs/compare-NAME`) under the hash of their configuration:
    finished ones are used again, an interrupted one is continued. The table is written beside them
    as Markdown and JSON.
    """
    config = _config(config)
    if not methods:
        raise CoterieError("Name the methods to compare; `coterie methods` lists them.")
    cells = [(config.with_method(name), name) for name in dict.fromkeys(methods)]
    path = Path(out) if out is not None else Path("runs") / f"compare-{config.name}"
    session = Session(config)
    session.check(*(cell for cell, _ in cells))
    results: dict[str, list[dict[str, Any]]] = {name: [] for _, name in cells}
    split, figure = config.evaluation.split, config.evaluation.figure
    for seed in range(config.seed, config.seed + seeds):
        for cell, name in cells:
            results[name].append(session.cell(cell, name, seed, path, watch, report))
            write_comparison(Comparison(config.name, _filled(results), split, figure), path)
    return Comparison(config.name, results, split, figure)


def load(path: str | Path, client: str, *, method: Method | None = None) -> PreTrainedModel:
    """The personal model of a client of a run: a transformers model, in fp32, with its adapter.

    `.generate()` works on it; its tokenizer is `coterie.tokenizer(path, client)`. "server" is the
    server with a model of its own. `method` is needed for a run whose method is not registered. A
    pooled run has one model, whatever the client.
    """
    folder = RunFolder(Path(path))
    return _load(folder, _recorded(folder, method), client)


def _load(folder: RunFolder, config: RunConfig, client: str) -> PreTrainedModel:
    name = EVERYONE if config.pooled else client
    if name == SERVER and config.server is not None:
        return _load_server(folder, config)
    known = sorted(folder.description["clients"])
    if name not in known:
        raise CoterieError(
            f"The run {folder.path} has no client {client!r} (clients: {', '.join(known)})."
        )
    state = folder.load(f"client-{name}")
    empty = _empty(config, name)
    assert empty.base is not None
    side = config.method.client(client_context(config, empty.base, empty, lambda *_: None))
    side.restore(state)
    return side.model()


def _load_server(folder: RunFolder, config: RunConfig) -> PreTrainedModel:
    state = folder.load("server")
    skeleton = load_skeleton(config.base, config.root)
    names, own = folder.description["clients"], _empty(config, SERVER)
    side = config.method.server(server_context(config, skeleton, names, own, lambda *_: None))
    side.restore(state)
    model = side.model()
    if model is None:
        raise CoterieError(f"By {config.label} the server gets no model of its own to load.")
    return model


def _empty(config: RunConfig, name: str) -> Participant:
    """A client, or the server, with its base and without a text."""
    base = load_base(config.base_of(name), "fp32", config.data.window, config.root)
    return Participant(name, ClientData(NOTHING, NOTHING, NOTHING), {}, base=base)


def tokenizer(path: str | Path, client: str | None = None) -> Tokenizer:
    """The tokenizer of a run's base; of a client's (or the server's), where that may be another."""
    values = RunFolder(Path(path)).description["config"]
    config = parse({**values, "method": "local"})  # its own need not be registered
    return load_tokenizer(config.base_of(client or EVERYONE), config.root)


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Leave a comparison's table in a folder, as Markdown and JSON."""
    write_text(path / "compare.md", comparison.table().markdown())
    write_json(path / "compare.json", comparison.summary())


class Session:
    """What several runs on the same base and data have in common, loaded once."""

    def __init__(
        self, config: RunConfig, threads: int | None = None, engine: Engine = "local"
    ) -> None:
        self.config, self.engine = config, engine
        self.rounds = _rounds(engine, config.method)
        every = torch.get_num_threads() if engine == "local" else 1  # then clients are many at once
        torch.set_num_threads(threads or config.threads or every)
        self._federations: dict[tuple[int, bool], Federation] = {}

    @cached_property
    def bases(self) -> Bases:
        """The one copy of each base."""
        config = self.config
        return Bases(config.training.precision, config.data.window, config.root)

    @property
    def base(self) -> Base:
        """The run's base."""
        return self.bases[self.config.base]

    def participants(self, config: RunConfig) -> list[Participant]:
        """The clients of a run with this session's data."""
        return self.federation(config).clients

    def federation(self, config: RunConfig) -> Federation:
        """Everybody who takes part in a run with this session's data, with their bases."""
        key = (config.seed, config.pooled)
        if key not in self._federations:
            found = gathered(config, self.base.tokenizer)
            clients = [self._with_base(config, client) for client in found.clients]
            server = None if found.server is None else self._with_base(config, found.server)
            self._federations[key] = Federation(clients, server)
        return self._federations[key]

    def _with_base(self, config: RunConfig, one: Participant) -> Participant:
        return replace(one, base=self.bases[config.base_of(one.name)])

    def check(self, *configs: RunConfig) -> None:
        """Raise CoterieError if a method cannot run with the clients there are."""
        for config in configs:
            clients = self.participants(config)
            public = clients[0].public is not None
            check(config, tuple(client.name for client in clients), public)

    def start(self, config: RunConfig, folder: RunFolder, watch: Watch) -> Rounds:
        """A run with this session's data, ready for its rounds."""
        who = self.federation(config)
        return self.rounds(config, self.base, who.clients, folder, watch, who.server)

    def description(self, config: RunConfig, participants: list[Participant]) -> dict[str, Any]:
        """What a run folder must say so that the run can be repeated."""
        clients = {p.name: p.described() for p in participants}
        own = self.federation(config).server
        server = {} if own is None else {SERVER: own.described()}
        return describe(config.as_dict(), clients, engine=self.engine, **server)

    def cell(
        self,
        config: RunConfig,
        name: str,
        seed: int,
        path: Path,
        watch: Callable[[], Watch],
        report: Callable[[str], None],
    ) -> dict[str, Any]:
        """The result of one run of a comparison: found again, continued, or run."""
        config = config.model_copy(update={"seed": seed, "name": f"{name}-seed{seed}"})
        folder = self._folder(config, path, report)
        with folder.lock():
            self.finish(folder, config, watch)
        return folder.result or {}

    def _folder(self, config: RunConfig, path: Path, report: Callable[[str], None]) -> RunFolder:
        """The folder of one run of a comparison: found again if it is the same run, or made."""
        description = self.description(config, self.participants(config))
        same = sorted(path.glob(f"*-{config.digest()}"))  # perhaps of a row with another name
        folder = RunFolder(same[0] if same else path / f"{config.name}-{config.digest()}")
        if folder.is_run:
            if not _changed(folder, self.federation(config)):
                if folder.result is not None:
                    report(f"{config.name}: already there")
                return folder
            report(f"{config.name}: the texts have changed, running it again")
        return RunFolder.create(folder.path, description, force=True)

    def finish(self, folder: RunFolder, config: RunConfig, watch: Callable[[], Watch]) -> None:
        """Bring one run to its result, unless it has one."""
        if folder.result is not None:
            return
        for name in _changed(folder, self.federation(config)):
            whose = "the server" if name == SERVER else f"client {name!r}"
            raise CoterieError(
                f"The text of {whose} is not what it was when the run in "
                f"{folder.path} began; start a new run."
            )
        self.start(config, folder, watch()).run()


def _rounds(engine: Engine, method: Method) -> type[Rounds]:
    """What runs the rounds; raises CoterieError for an engine that is not there or cannot."""
    if engine == "local":
        return LocalRun
    if engine not in get_args(Engine):
        raise CoterieError(
            f"There is no engine {engine!r}; there are {', '.join(get_args(Engine))}."
        )
    try:
        from coterie.engines.flower.simulation import SimulatedRun
    except ModuleNotFoundError as error:
        if error.name not in ("flwr", "ray"):
            raise
        raise CoterieError(
            f"The engine {engine} needs {error.name}: install the extra, "
            "pip install 'coterie[simulation]'."
        ) from None
    if available().get(method.name) is not type(method):
        raise CoterieError(
            f"The engine {engine} finds methods by their names, and {method.name!r} is not "
            "registered: give it an entry point in the group coterie.methods, or run it with the "
            "engine local."
        )
    return SimulatedRun


def _changed(folder: RunFolder, who: Federation) -> list[str]:
    """Those whose text is not what it was when the run began."""
    described = folder.description
    server = {SERVER: described[SERVER]} if SERVER in described else {}
    then = {name: one["data"] for name, one in (described["clients"] | server).items()}
    now = who.digests()
    return [n for n in sorted(then.keys() | now.keys()) if then.get(n) != now.get(n)]


def _continue(session: Session, folder: RunFolder, watch: Callable[[], Watch]) -> Run:
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
            session.finish(inner, baseline, watch)
            results[name] = inner.result
        session.finish(folder, config, watch)
        results[config.label] = folder.result
        finished = Run(folder.path, config, results)
        write_text(folder.path / "table.md", finished.table().markdown())
    return finished


def _recorded(folder: RunFolder, method: Method | None) -> RunConfig:
    """The configuration that a run began with; `method` stands for one that is not registered."""
    values = folder.description["config"]
    return parse({**values, "method": method or values["method"]})


def _config(config: Config) -> RunConfig:
    match config:
        case RunConfig():
            return config
        case Mapping():
            return parse(config)
        case _:
            return load_config(Path(config))


def _filled(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {name: found for name, found in results.items() if found}
