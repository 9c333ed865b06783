"""Commands that use trained models: `coterie generate`, `coterie chat` and `coterie ask`."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import SamplingSeed, TopP, check_model, check_run, listed
from coterie.errors import CoterieError, enough_memory

if TYPE_CHECKING:
    from coterie.cli.talk import Talk
    from coterie.evaluation.generation import Sampling


Others = Annotated[
    str | None,
    Option(
        "--with",
        metavar="MODELS",
        help="Other models, separated by commas, that answer each question too, for comparison: "
        "`base` (the client's base without an adapter), NAME (another client), METHOD:NAME (a "
        "client of a baseline, or of another method in the same comparison), FOLDER:NAME (a client "
        "of any run).",
    ),
]


def generate(
    run: Annotated[Path, Argument(help="Run folder, or bundle of `coterie export`.")],
    client: Annotated[
        str | None, Option(help="Client whose model is used; not needed for a bundle.")
    ] = None,
    prompt: Annotated[
        str | None, Option(help="Text to continue; required without --field.")
    ] = None,
    field: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=TEXT",
            help="Text for a field of the prompt template, such as instruction=TEXT. If the run "
            "trained on instructions, use --field instead of --prompt. Repeatable.",
        ),
    ] = None,
    tokens: Annotated[int, Option(min=1, help="Maximum number of new tokens.")] = 80,
    temperature: Annotated[
        float | None,
        Option(
            min=0.0,
            help="Sampling temperature; 0 decodes greedily. Default: 0.8, or 0 with --field.",
        ),
    ] = None,
    top_p: TopP = 0.95,
    seed: SamplingSeed = 0,
) -> None:
    """Generate text with a client's model.

    Example, after the demo:

        coterie generate runs/demo --client ada --prompt "I sing of"

    Example, if the run trained on instructions and its template has a field `instruction`:

        coterie generate runs/mine --client anna --field instruction="Name a sea."
    """
    check_model(run, client)
    if (prompt is None) == (not field):
        raise CoterieError(
            "Give either --prompt, or --field NAME=TEXT for each field of the template."
        )
    if temperature is None:
        temperature = 0.8 if prompt is not None else 0.0
    from coterie.evaluation.generation import Sampling

    sampling = Sampling(tokens, temperature, top_p, seed)
    if prompt is not None:
        terminal.say(write(run, client, prompt, sampling))
    else:
        terminal.say(answer(run, client, _fields(field or ()), sampling))


def chat(
    run: Annotated[Path, Argument(help="Run folder, or bundle of `coterie export`.")],
    client: Annotated[
        str | None, Option(help="Client whose model answers; not needed for a bundle.")
    ] = None,
    others: Others = None,
    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt.")] = None,
    tokens: Annotated[int, Option(min=1, help="Maximum number of new tokens per answer.")] = 120,
    temperature: Annotated[
        float, Option(min=0.0, help="Sampling temperature; 0 decodes greedily.")
    ] = 0.7,
    top_p: TopP = 0.95,
    seed: SamplingSeed = 0,
    think: Annotated[
        bool,
        Option(
            "--think",
            help="Let answers begin with reasoning (`<think>`), if the chat template supports it.",
        ),
    ] = False,
) -> None:
    """Chat with a client's model, or with several models side by side.

    Each model keeps its own history. Type /help for a list of commands: /save, for example, appends
    the conversation to a file that a run can train on. Ctrl-C stops an answer, Ctrl-D ends the
    chat.

    For example:

        coterie chat runs/mine --client anna --with base,ben,local:anna

    If the input is not a terminal, each line is a question, and only the answers are printed:

        echo "Name a sea." | coterie chat runs/mine --client anna --temperature 0
    """
    check_model(run, client)
    from coterie.cli.talk import Talk, speakers
    from coterie.evaluation.generation import Sampling

    sampling = Sampling(tokens, temperature, top_p, seed, think)
    talk = Talk(speakers(run, client, listed(others), sampling, system))
    if sys.stdin.isatty():
        _chat(talk, str(run) if client is None else f"{client} of {run}")
    else:
        for line in sys.stdin:
            if line.strip() and not talk.take(line):
                break


def ask(
    run: Annotated[Path, Argument(help="Run folder.")],
    questions: Annotated[
        list[str] | None, Argument(metavar="[QUESTION]", help="Question. Repeatable.")
    ] = None,
    file: Annotated[
        Path | None,
        Option(
            "--questions",
            metavar="FILE.jsonl",
            help="File with further questions, in the field `question` of each record.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        Option(help="Client whose models answer. Repeatable. Default: all clients."),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum number of new tokens per answer. Default: evaluation.generate of the "
            "run, or 120.",
        ),
    ] = None,
) -> None:
    """Show the answers of all models of a run to questions, side by side.

    The base, the baselines and the run's own method answer, with greedy decoding. A method whose
    clients all have the same model answers once.

    For example:

        coterie ask runs/reviews "Good or bad?" "Is it long?" --client anna
    """
    check_run(run)
    if not questions and file is None:
        raise CoterieError("There is no question; give one after the run folder, or --questions.")
    from coterie.cli.ask import show_answers
    from coterie.data.files import Record
    from coterie.inference.asking import check_questions, read_questions

    texts = enumerate(questions or (), start=1)
    records = [Record(f"Question {number}", {"question": text}) for number, text in texts]
    check_questions(records)
    if file is not None:
        records += read_questions(file, "--questions")
    show_answers(run, records, client or (), tokens)


def _fields(options: Iterable[str]) -> dict[str, str]:
    """Parse options of the form NAME=TEXT into a mapping from fields to texts."""
    fields: dict[str, str] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name or name in fields:
            raise CoterieError(
                f"--field {option} is invalid; give NAME=TEXT, and each name only once."
            )
        fields[name] = text
    return fields


def write(run: Path, client: str | None, prompt: str, sampling: "Sampling") -> str:
    """Return the prompt, followed by the text that the client's model generates.

    Raises:
        CoterieError: The prompt and the new tokens do not fit in the base's context.
    """
    from coterie.api import tokenizer
    from coterie.runs import RunFolder

    folder = RunFolder(run)
    if folder.is_run and folder.description["config"]["data"].get("messages") is not None:
        terminal.complain(
            "Note: the run trained on conversations, but the model continues --prompt as plain "
            f"text. To chat with the model: coterie chat {run} --client {client}"
        )
    encoder: Any = tokenizer(run, client)
    ids = encoder(prompt or encoder.bos_token or encoder.eos_token)["input_ids"]
    tokens = _generate(run, client, ids, [encoder.eos_token_id], sampling)
    return encoder.decode(tokens, skip_special_tokens=True)


def answer(run: Path, client: str | None, fields: Mapping[str, str], sampling: "Sampling") -> str:
    """Fill in the run's prompt template, and return the answer of the client's model.

    Args:
        run: The run folder.
        client: The client's name.
        fields: A mapping from the fields of the template to texts.
        sampling: Settings with which the answer is generated.

    Raises:
        CoterieError: The run's data are not instructions, or the keys of `fields` are not the
            fields of the template. The error is also raised if the prompt and the new tokens do not
            fit in the base's context.
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

    if not (folder := RunFolder(run)).is_run:
        raise CoterieError(f"The bundle {run} has no prompt template; use --prompt.")
    data = folder.description["config"]["data"]
    instructions = data.get("instructions")
    if instructions is None:
        raise CoterieError(
            f"The run {run} did not train on instructions and has no prompt template; use --prompt."
        )
    prompt = render(instructions["template"], fields, "The prompt")
    encoder: Any = tokenizer(run, client)
    context, markers = [context_token(encoder)], ()
    if instructions["template"] == CHAT:
        chat = chat_template(encoder, data.get("chat_template"))
        parts = chat.opening_and_answer((Turn("user", prompt.strip()),))
        markers = chat.markers
        context = []  # the chat template has its own first token
    else:
        parts = Instruction(prompt, "A").parts
    ids = [*context, *PartEncoder(bare_encoder(encoder)[0]).opening(parts)]
    ends, stops = ends_of(encoder, markers)
    tokens = _generate(run, client, ids, ends, sampling, gated=True)
    return before_any(encoder.decode(tokens[len(ids) :], skip_special_tokens=True), stops).strip()


def _generate(
    run: Path,
    client: str | None,
    ids: list[int],
    ends: list[int],
    sampling: "Sampling",
    gated: bool = False,
) -> list[int]:
    """Return the tokens `ids`, followed by the model's continuation up to a token in `ends`.

    If `gated` is true, the base continues a prompt that the client's gate does not accept.
    """
    import torch

    from coterie.evaluation.gate import answering
    from coterie.evaluation.generation import context_length, generated
    from coterie.inference.finished import load_client
    from coterie.inference.speaking import FEWER

    base, attach, gate = load_client(run, client)
    model = attach()
    longest = context_length(model)
    if longest is not None and len(ids) + sampling.tokens > longest:
        raise CoterieError(
            f"The prompt's {len(ids)} tokens and {sampling.tokens} new tokens exceed the base's "
            f"context of {longest} tokens; set a smaller --tokens or a shorter prompt."
        )
    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([ids], device=model.device)
    chosen = answering(gate if gated else None, base, model, prompt[0].cpu())
    with enough_memory("a text", lambda: [FEWER]), chosen as answerer:
        tokens = generated(answerer, prompt, torch.ones_like(prompt), **sampling.options(ends))
    return tokens[0].tolist()


def _chat(talk: "Talk", model: str) -> None:
    """Run a chat until /quit or Ctrl-D; an error does not end the chat."""
    terminal.say(f"Chat with {model}. /help lists the commands, Ctrl-D ends the chat.")
    for line in _lines():
        try:
            if not talk.take(line):
                break
        except KeyboardInterrupt:
            terminal.say("\n(Stopped.)")
        except CoterieError as error:
            terminal.complain(str(error))


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, without empty lines."""
    import readline  # noqa: F401 - lets `input` edit lines and recall earlier lines

    while True:
        try:
            line = input("\n> ")
        except EOFError:
            terminal.say("")
            return
        except KeyboardInterrupt:
            terminal.say("\nTo end the chat, press Ctrl-D or type /quit.")
            continue
        if line.strip():
            yield line
