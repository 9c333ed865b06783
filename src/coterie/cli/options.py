"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

debug = False
"""Whether errors are to be shown with their traceback."""


def _remember_debug(value: bool) -> bool:
    global debug
    debug = value
    return value


RunFile = Annotated[
    Path | None,
    typer.Argument(
        help="A run file (YAML); without one, the embedded demo. `who-wrote-this` is an embedded "
        "one on instructions."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the run file: training.batch=4. Repeatable."),
]
Out = Annotated[
    Path | None, typer.Option(help="The run's folder; default runs/NAME.", show_default=False)
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_remember_debug, help="Show the traceback of an error."),
]
