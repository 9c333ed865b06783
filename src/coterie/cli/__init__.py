"""The command line: `coterie COMMAND`.

Modules of this package import torch, transformers and pydantic inside functions only, so that
`--help` and errors in arguments need not wait for them.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated

from typer import Exit, Option, Typer

from coterie.cli import (
    deploy,
    evaluate,
    export,
    flower,
    inspect,
    keys,
    operate,
    options,
    prepare,
    run,
    serve,
    terminal,
    use,
)
from coterie.errors import CoterieError, ran_out_of_memory

app = Typer(
    cls=options.Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalised federated fine-tuning of language models. Training text never leaves "
    "the client's machine.",
)


def _print_version(requested: bool) -> None:
    if requested:
        terminal.say(f"coterie {metadata.version('coterie')}")
        raise Exit


@app.callback()
def coterie(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options that precede a command."""


COMMANDS = (
    (options.Command, (prepare.init, prepare.divide)),
    (options.Command, (run.run, run.compare)),
    (options.Command, (inspect.data, inspect.methods, inspect.audit, inspect.base, inspect.report)),
    (options.Command, (use.generate, use.chat, use.ask)),
    (options.Command, (export.export, evaluate.evaluate, serve.serve)),
    (None, (inspect.align,)),
    (options.Command, (deploy.server, deploy.client)),
    (None, (operate.status, operate.expel, operate.forget)),
)
"""The commands in the order of the help; those with `options.Command` accept plugins."""
for kind, commands in COMMANDS:
    for command in commands:
        app.command(cls=kind)(command)
app.add_typer(keys.app, name="keys")
app.add_typer(flower.app, name="flower")


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise CoterieError if an argument is not valid text in the system's encoding."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise CoterieError(
                f"Argument {number}, {argument!a}, is not valid {sys.getfilesystemencoding()}; "
                "correct the argument, or the encoding of the terminal."
            ) from None


def main(app: Typer = app) -> None:
    """Run a command, and exit with code 2 after an error that the user can fix.

    The error is printed as one sentence. The files that the command creates are readable only by
    the user who runs the command, because models, losses and logs are personal.
    """
    os.umask(0o077)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # tests and programs may replace it
            stream.reconfigure(errors="replace")
    try:
        _check_arguments(sys.argv[1:])
        app()
    except (CoterieError, OSError) as error:
        if options.debug:
            raise
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}." if error.filename else f"{error}."
        terminal.complain(f"Error: {text}")
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if options.debug or not ran_out_of_memory(error):
            raise
        terminal.complain(
            "Error: out of memory. Set a smaller training.micro_batch, or base.weights: nf4."
        )
        sys.exit(2)
