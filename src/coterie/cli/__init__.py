"""The command line: `coterie COMMAND`.

No module here imports torch, transformers or pydantic outside a function: help is there at once.
"""

import sys

import typer

from coterie.cli import compare, deploy, inspect, keys, options, run, terminal, use
from coterie.errors import CoterieError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models together and personally: the text never leaves its machine.",
)
app.command()(run.run)
app.command()(compare.compare)
app.command()(inspect.methods)
app.command()(inspect.audit)
app.command()(inspect.report)
app.command()(use.generate)
app.command()(inspect.align)
app.command()(deploy.server)
app.command()(deploy.client)
app.add_typer(keys.app, name="keys")


def main() -> None:
    """Run a command; an error that the user can mend is one sentence and exit code 2."""
    try:
        app()
    except (CoterieError, OSError) as error:
        if options.debug:
            raise
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}." if error.filename else f"{error}."
        terminal.complain(f"Error: {text}")
        sys.exit(2)
    except RuntimeError as error:
        if options.debug or type(error).__name__ != "OutOfMemoryError":  # torch's; slow to import
            raise
        terminal.complain(
            "Error: the GPU has too little memory; a smaller training.batch needs less."
        )
        sys.exit(2)
