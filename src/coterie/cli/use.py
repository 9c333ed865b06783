"""The command that uses what a run has learned: `coterie generate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, check_run
from coterie.cli.writing import answer, write
from coterie.errors import CoterieError


def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    client: Annotated[str, typer.Option(help="Client whose model to use.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="For a run on instructions, instead of --prompt: a field of its template. "
            "Repeatable.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 80,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Sampling temperature; 0 is greedy decoding. Default: 0.8, or 0 with --field.",
        ),
    ] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Generate text with a client's model.

    Example, after the demo:

        coterie generate runs/demo --client ada --prompt "I sing of"

    After a run on instructions, fill in its template:

        coterie generate runs/mine --client anna --field instruction="Name a sea."
    """
    check_run(run)
    if (prompt is None) == (not field):
        raise CoterieError("Give either --prompt, or --field NAME=TEXT for each field.")
    if temperature is None:
        temperature = 0.8 if prompt is not None else 0.0
    from coterie.evaluation.generation import Sampling

    sampling = Sampling(tokens, temperature, top_p, seed)
    if prompt is not None:
        terminal.say(write(run, client, prompt, sampling))
    else:
        terminal.say(answer(run, client, _fields(field or ()), sampling))


def _fields(given: Iterable[str]) -> dict[str, str]:
    """Fields' names and texts, from NAME=TEXT."""
    fields: dict[str, str] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name or name in fields:
            raise CoterieError(f"--field takes NAME=TEXT, each name once, not {item!r}.")
        fields[name] = text
    return fields
