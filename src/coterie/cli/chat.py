"""The command `coterie chat`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, check_run
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.cli.talk import Talk

Others = Annotated[
    str | None,
    typer.Option(
        "--with",
        metavar="MODELS",
        help="Models that answer beside it, comma-separated: `base` (without adapter), NAME "
        "(another client), METHOD:NAME (a client in a baseline, or in a run beside this one in a "
        "comparison), FOLDER:NAME (a client of any run).",
    ),
]


def chat(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    client: Annotated[str, typer.Option(help="Client whose model to talk with.")],
    others: Others = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of new tokens of an answer.")
    ] = 120,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    think: Annotated[
        bool,
        typer.Option(
            "--think",
            help="Let answers begin with thinking (`<think>`), "
            "where the template has a place for it.",
        ),
    ] = False,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Talk with a client's model, or with several side by side.

        coterie chat runs/mine --client anna --with base,ben,local:anna

    Each model keeps a history of its own. /help lists what else can be typed: /save adds the
    conversation to a file that a run can be trained on. Ctrl-C stops an answer, Ctrl-D ends.

    If the input is not a terminal, each line of it is a question, and only answers are printed:

        echo "Name a sea." | coterie chat runs/mine --client anna --temperature 0
    """
    check_run(run)
    from coterie.cli.talk import Talk, speakers
    from coterie.evaluation.generation import Sampling

    sampling = Sampling(tokens, temperature, top_p, seed, think)
    asked = [name.strip() for name in (others or "").split(",") if name.strip()]
    talk = Talk(speakers(run, client, asked, sampling, system))
    if sys.stdin.isatty():
        _converse(talk, f"{client} of {run}")
    else:
        for line in sys.stdin:
            if line.strip() and not talk.take(line):
                break


def _converse(talk: "Talk", whom: str) -> None:
    """Until /quit or Ctrl-D; a mistake does not end it."""
    terminal.say(f"Talking with {whom}. /help lists commands, Ctrl-D ends.")
    for line in _typed():
        try:
            if not talk.take(line):
                break
        except KeyboardInterrupt:
            terminal.say("\n(Stopped.)")
        except CoterieError as error:
            terminal.complain(str(error))


def _typed() -> Iterator[str]:
    """What is typed, line by line, without empty lines."""
    import readline  # noqa: F401 - lets `input` edit lines and recall earlier ones

    while True:
        try:
            line = input("\n> ")
        except EOFError:
            terminal.say("")
            return
        except KeyboardInterrupt:
            terminal.say("\nPress Ctrl-D to end, or type /quit.")
            continue
        if line.strip():
            yield line
