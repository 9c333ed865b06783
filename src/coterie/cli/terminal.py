"""How commands speak: to the console, about errors, and when they are stopped."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)


def say(text: str) -> None:
    """Print plain text as it is, whatever the width."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print it where errors go."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def stopped(how: str) -> NoReturn:
    """End a command that was stopped, saying how to go on."""
    complain(f"Stopped. {how}")
    raise typer.Exit(130) from None


@contextmanager
def stoppable(folder: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says how to go on with the run in a folder, if there is one.

    Without a folder, the same command goes on.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command"
        if folder is not None and (folder / "run.json").exists():
            again = f"`coterie run --resume {folder}`"
        stopped(f"Finished rounds are kept; continue with {again}.")
