"""The commands that train: `coterie run` and `coterie compare`."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli import terminal
from coterie.cli.options import FromRound, Out, RunFile, Settings, check_run, listed, needs_resume
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.api import Run
    from coterie.config.run import RunConfig
    from coterie.runs import Callback

Engine = Annotated[
    Literal["local", "flower-simulation"] | None,
    typer.Option(
        help="local: clients run one after another in this process. flower-simulation: clients run "
        "in parallel processes on this machine. Default: local, or the engine of the resumed run."
    ),
]


METHODS: list[str] = ["pretrained", "local", "fedavg", "comigs-1g1s"]
"""What is compared unless the command is told."""
MethodNames = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated method names (see `coterie methods`). Default: {', '.join(METHODS)}."
    ),
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUES",
        help="Try each method with these values: training.learning_rate=1e-4,5e-4,2e-3. The one "
        "that does best on the validation text, with the first seed, is then scored on the test "
        "text. Repeatable; all combinations are tried.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD", help="Row that the others are compared with. Default: the best."
    ),
]


def run(
    file: RunFile = None,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the interrupted run in this folder.")
    ] = None,
    from_round: FromRound = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing run in the folder.")
    ] = False,
    engine: Engine = None,
) -> None:
    """Run a method and its baselines, and show each client's results.

    Without a run file, this runs the built-in demo: a few minutes on two cores, no downloads. For
    your own data, write a run file, such as

        method: comigs-1g1s
        rounds: 10
        clients:
          - {name: anna, path: anna.txt}
          - {name: ben, path: ben-notes/}

    and run it; --set overrides any key:

        coterie run mine.yaml --set training.batch=8 --set seed=1

    docs/use/run-file.md lists all keys, `coterie methods` all methods.
    """
    import coterie
    from coterie.config.read import load_here
    from coterie.config.values import read_values

    again = None
    if resume is None:
        needs_resume(from_round)
        again = _again(file, settings or ())
        config = load_here(read_values(file, settings or ()))
        _remark(config)
        folder = out or Path("runs") / config.name
        with terminal.stoppable(folder):
            finished = coterie.run(
                config, out=folder, force=force, callbacks=progress(), engine=engine or "local"
            )
    else:
        if file is not None or settings or out is not None or force:
            raise CoterieError(
                "--resume uses the saved configuration; it takes no run file, --set, --out or "
                "--force."
            )
        check_run(resume)
        with terminal.stoppable(resume):
            finished = coterie.resume(
                resume, callbacks=progress(), engine=engine, from_round=from_round
            )
    _show(finished, again)


def compare(
    file: Annotated[
        Path | None, typer.Argument(help="A run file (YAML). Default: the built-in demo.")
    ] = None,
    methods: MethodNames = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method.")] = 1,
    tune: Tune = None,
    against: Against = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/compare-NAME.")
    ] = None,
) -> None:
    """Compare methods on the same data and base over several seeds.

    Finished runs are saved and reused: to continue after an interruption, or to add methods or
    seeds, run the command again.

    Examples:

        coterie compare mine.yaml --methods local,fedavg,comigs-1g1s --seeds 3

        coterie compare mine.yaml --tune training.learning_rate=1e-4,5e-4,2e-3
    """
    import coterie
    from coterie.config.read import load_here
    from coterie.config.tune import read_tune
    from coterie.config.values import read_values

    values, trials = read_values(file, settings or ()), read_tune(tune or ())
    if {"rows", "shows"} & values.keys():
        raise CoterieError(f"{file} is a table file; fill it in with `python -m reproduce {file}`.")
    config = load_here(values, trials)
    folder = out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = coterie.compare(
            config,
            METHODS if methods is None else listed(methods),
            seeds=seeds,
            tune=trials,
            against=against,
            out=folder,
            callbacks=progress(),
            report=terminal.say,
        )
    terminal.console.print(*comparison.tables())
    terminal.say(
        f"\nSaved to {folder}/compare.md and compare.json.",
        "To add methods or seeds, run the command again with them; finished runs are reused.",
    )


def _again(file: Path | None, settings: Sequence[str]) -> str:
    """A run file and settings as a command takes them."""
    given = [] if file is None else [f" {quote(str(file))}"]
    return "".join([*given, *(f" --set {quote(setting)}" for setting in settings)])


def _remark(config: "RunConfig") -> None:
    """What a user may not expect of a short run."""
    every = getattr(getattr(config.method, "router", None), "every", 0)
    steps = config.rounds * config.training.steps
    if every > steps:
        terminal.say(
            f"Note: the routers of {config.label} are first updated after {every} steps, and this "
            f"run has {steps}. Set method.router.every, or more rounds."
        )


def progress() -> "list[Callback]":
    """Return what shows the progress of runs on this terminal."""
    from coterie.cli.progress import ConsoleProgress

    return [ConsoleProgress()]


def _show(finished: "Run", again: str | None) -> None:
    """A run's table, who gained, and what to do next; `again`: the run file and settings as a
    command takes them, where they are known."""
    from coterie.data.templates import fields

    client = min(next(iter(finished.results.values()))["trained"])
    terminal.console.print(finished.table())
    for method, result in finished.results.items():
        terminal.tell_unhelped(method, result)
    data, plugins = finished.config.data, terminal.plugin_options(finished.config.plugins)
    if gained := finished.gains():
        terminal.say(f"\n{gained}")
        if again is not None:
            methods = ",".join(finished.results)
            terminal.say(
                "To compare them over several seeds, or with other methods:",
                f"  coterie compare{again} --methods {methods} --seeds 3{plugins}",
            )
        terminal.say("To draw this run:", f"  coterie report {finished.path}{plugins}")
    where = f"{finished.path} --client {client}"
    terminal.say(f"\nThe run is saved in {finished.path}.")
    if data.chats:
        terminal.say("To talk with a client's model:", f"  coterie chat {where}{plugins}")
        return
    given = '--prompt "..."'
    if data.instructions is not None:
        given = " ".join(f'--field {name}="..."' for name in fields(data.instructions.template))
    terminal.say(
        "To generate text with a client's model:", f"  coterie generate {where} {given}{plugins}"
    )
