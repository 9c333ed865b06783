"""The command `coterie run`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Out, RunFile, Settings
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.api import Run


def run(
    file: RunFile = None,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the stopped run in this folder.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a run in the folder.")] = False,
    engine: Annotated[
        Literal["local", "flower-simulation"] | None,
        typer.Option(
            help="local: clients work in turn, in this process; flower-simulation: in several "
            "processes of this machine. Default local, or as the run began.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Learn together: run a method and its baselines, and show each client's result.

    Without a file it runs the embedded demo: minutes on two cores, nothing to download. For a run
    of your own write a run file, such as

        method: comigs-1g1s
        rounds: 10
        clients:
          - {name: anna, path: anna.txt}
          - {name: ben, path: ben-notes/}

    and start it, with any of its keys changed by --set:

        coterie run mine.yaml --set training.batch=8 --set seed=1

    docs/run-file.md explains every key; `coterie methods` lists what `method` can be.
    """
    from coterie import api
    from coterie.config import load_config
    from coterie.runs import ConsoleWatch

    watch = partial(ConsoleWatch, terminal.console)
    if resume is None:
        config = load_config(file, settings or ())
        folder = out or Path("runs") / config.name
        with terminal.stoppable(folder):
            finished = api.run(
                config, out=folder, force=force, watch=watch, engine=engine or "local"
            )
    else:
        if file is not None or settings or out is not None or force:
            raise CoterieError(
                "A run continues as it began: --resume takes no run file, --set, --out or --force."
            )
        with terminal.stoppable(resume):
            finished = api.resume(resume, watch=watch, engine=engine)
    _show(finished)


def _show(finished: "Run") -> None:
    """A run's table, and how to write with one of its models."""
    from coterie.data.templates import fields

    client = min(next(iter(finished.results.values()))["trained"])
    terminal.console.print(finished.table())
    terminal.say(f"\nThe run is in {finished.path}. Write with a client's model:")
    given = '--prompt "..."'
    if (instructions := finished.config.data.instructions) is not None:
        given = " ".join(f'--field {name}="..."' for name in fields(instructions.template))
    terminal.say(f"  coterie generate {finished.path} --client {client} {given}")
