"""The command `coterie run`."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli import terminal
from coterie.cli.options import (
    Debug,
    FromRound,
    Out,
    Plugins,
    RunFile,
    Settings,
    check_run,
    needs_resume,
)
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.api import Run
    from coterie.config.run import RunConfig

Engine = Annotated[
    Literal["local", "flower-simulation"] | None,
    typer.Option(
        help="local: clients run one after another in this process. flower-simulation: clients run "
        "in parallel processes on this machine. Default: local, or the engine of the resumed run."
    ),
]


def run(
    file: RunFile = None,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the interrupted run in this folder."),
    ] = None,
    from_round: FromRound = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing run in the folder.")
    ] = False,
    engine: Engine = None,
    plugins: Plugins = None,
    debug: Debug = False,
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

    docs/run-file.md lists all keys, `coterie methods` all methods.
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
                config, out=folder, force=force, watch=terminal.watch, engine=engine or "local"
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
                resume, watch=terminal.watch, engine=engine, from_round=from_round
            )
    _show(finished, again)


def _again(file: Path | None, settings: list[str] | tuple[()]) -> str:
    """A run file and settings as a command takes them."""
    return "".join(
        [f" {quote(str(file))}" if file else "", *(f" --set {quote(s)}" for s in settings)]
    )


def _remark(config: "RunConfig") -> None:
    """What a user may not expect of a short run."""
    every = getattr(getattr(config.method, "router", None), "every", 0)
    steps = config.rounds * config.training.steps
    if every > steps:
        terminal.say(
            f"Note: the routers of {config.label} are first updated after {every} steps, and this "
            f"run has {steps}. Set method.router.every, or more rounds."
        )


def _show(finished: "Run", again: str | None) -> None:
    """A run's table, who gained, and what to do next; `again`: the run file and settings as a
    command takes them, where they are known."""
    from coterie.data.templates import fields

    client = min(next(iter(finished.results.values()))["trained"])
    terminal.console.print(finished.table())
    for method, result in finished.results.items():
        terminal.tell_unhelped(method, result)
    if gained := finished.gains():
        terminal.say(f"\n{gained}")
        plugins = terminal.plugin_options(finished.config.plugins)
        if again is not None:
            methods = ",".join(finished.results)
            terminal.say("To compare them over several seeds, or with other methods:")
            terminal.say(f"  coterie compare{again} --methods {methods} --seeds 3{plugins}")
        terminal.say("To draw this run:")
        terminal.say(f"  coterie report {finished.path}{plugins}")
    data, plugins = finished.config.data, terminal.plugin_options(finished.config.plugins)
    where = f"{finished.path} --client {client}"
    terminal.say(f"\nThe run is saved in {finished.path}.")
    if data.chats:
        terminal.say("To talk with a client's model:")
        terminal.say(f"  coterie chat {where}{plugins}")
        return
    given = '--prompt "..."'
    if data.instructions is not None:
        given = " ".join(f'--field {name}="..."' for name in fields(data.instructions.template))
    terminal.say("To generate text with a client's model:")
    terminal.say(f"  coterie generate {where} {given}{plugins}")
