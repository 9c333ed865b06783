"""Print the answers of a run's models to questions, side by side."""

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from coterie.cli import terminal
from coterie.data.files import Record
from coterie.inference.asking import answers

NARROWEST = 20
"""The minimum width of the column of answers, in characters."""


def show_answers(
    run: Path, questions: Sequence[Record], clients: Sequence[str] = (), tokens: int | None = None
) -> None:
    """Let the models of a run answer questions, and print the answers below each question.

    The arguments are the first four arguments of `answers`.
    """
    with terminal.progress("Loading the base") as show:
        named = answers(run, questions, clients, tokens, show)
    column = max(map(cell_len, named)) + 2
    for number, question in enumerate(questions):
        heading = "\n".join(_lines(question["question"], terminal.console.width))
        terminal.console.print(f"\n{heading}", style="bold", highlight=False, markup=False)
        for name, texts in named.items():
            first, *others = _lines(texts[number], terminal.console.width - column)
            terminal.say(f"{name:<{column}}{first}", *(" " * column + line for line in others))


def _lines(text: str, width: int) -> list[str]:
    """Split a text into lines of at most `width` characters, without blank lines."""
    width = max(width, NARROWEST)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no answer)"]
    wrapped = [Text(line).wrap(terminal.console, width) for line in lines]
    return [line.plain.rstrip() for lines in wrapped for line in lines]
