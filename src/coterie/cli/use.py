"""The commands that use what a run has learned: `coterie generate` and `coterie chat`."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli import terminal
from coterie.cli.options import SamplingSeed, TopP, check_run, listed
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.cli.talk import Talk
    from coterie.evaluation.generation import Sampling


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
    top_p: TopP = 0.95,
    seed: SamplingSeed = 0,
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
    top_p: TopP = 0.95,
    seed: SamplingSeed = 0,
    think: Annotated[
        bool,
        typer.Option(
            "--think",
            help="Let answers begin with thinking (`<think>`), "
            "where the template has a place for it.",
        ),
    ] = False,
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
    talk = Talk(speakers(run, client, listed(others), sampling, system))
    if sys.stdin.isatty():
        _converse(talk, f"{client} of {run}")
    else:
        for line in sys.stdin:
            if line.strip() and not talk.take(line):
                break


def _fields(given: Iterable[str]) -> dict[str, str]:
    """Fields' names and texts, from NAME=TEXT."""
    fields: dict[str, str] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name or name in fields:
            raise CoterieError(f"--field takes NAME=TEXT, each name once, not {item!r}.")
        fields[name] = text
    return fields


def write(run: Path, client: str, prompt: str, sampling: "Sampling") -> str:
    """The prompt and what the client's model writes after it.

    Raises CoterieError if the prompt and the tokens asked for do not fit in the base's context.
    """
    from coterie.api import tokenizer
    from coterie.runs import RunFolder

    if RunFolder(run).description["config"]["data"].get("messages") is not None:
        terminal.complain(
            "Note: this run is on conversations, and --prompt is continued as plain text. To talk "
            f"with the model: coterie chat {run} --client {client}"
        )
    encoder: Any = tokenizer(run, client)
    ids = encoder(prompt or encoder.bos_token or encoder.eos_token)["input_ids"]
    found = _continued(run, client, ids, [encoder.eos_token_id], sampling)
    return encoder.decode(found, skip_special_tokens=True)


def answer(run: Path, client: str, fields: Mapping[str, str], sampling: "Sampling") -> str:
    """What the client's model answers to the run's template, filled in with these fields.

    Raises CoterieError, too, if the run is not on instructions or the template has other fields.
    """
    from coterie.api import tokenizer
    from coterie.bases import context_token
    from coterie.data.chat import chat_template
    from coterie.data.items import Instruction, Turn
    from coterie.data.parts import PartEncoder, bare_encoder
    from coterie.data.spec import CHAT
    from coterie.data.templates import render
    from coterie.evaluation.generation import before_any, ends_of
    from coterie.runs import RunFolder

    data = RunFolder(run).description["config"]["data"]
    instructions = data.get("instructions")
    if instructions is None:
        raise CoterieError(
            f"The run {run} is not on instructions and has no template to fill in; use --prompt."
        )
    prompt = render(instructions["template"], fields, "The prompt")
    encoder: Any = tokenizer(run, client)
    begun, markers = [context_token(encoder)], ()
    if instructions["template"] == CHAT:
        chat = chat_template(encoder, data.get("chat_template"))
        parts = chat.opening_and_answer((Turn("user", prompt.strip()),))
        markers = chat.markers
        begun = []  # as the template begins
    else:
        parts = Instruction(prompt, "A").parts
    ids = [*begun, *PartEncoder(bare_encoder(encoder)[0]).opening(parts)]
    ends, stops = ends_of(encoder, markers)
    found = _continued(run, client, ids, ends, sampling)
    text = encoder.decode(found[len(ids) :], skip_special_tokens=True)
    return before_any(text, stops).strip()


def _continued(
    run: Path, client: str, ids: list[int], ends: list[int], sampling: "Sampling"
) -> list[int]:
    """The tokens and those that the model writes after them, up to an end token."""
    import torch

    from coterie.api import load
    from coterie.evaluation.generation import context_length, generated

    model = load(run, client)
    longest = context_length(model)
    if longest is not None and len(ids) + sampling.tokens > longest:
        raise CoterieError(
            f"The prompt's {len(ids)} tokens and {sampling.tokens} new ones exceed the base's "
            f"context of {longest} tokens; lower --tokens."
        )
    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([ids], device=model.device)
    found = generated(model, prompt, torch.ones_like(prompt), **sampling.options(ends))
    return found[0].tolist()


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
