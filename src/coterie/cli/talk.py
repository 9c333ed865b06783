"""A chat in the terminal, with one model or several models side by side."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from coterie.cli import terminal
from coterie.data.chat import chat_template
from coterie.errors import CoterieError
from coterie.evaluation.generation import Sampling
from coterie.files import append_line
from coterie.inference.beside import find_beside
from coterie.inference.bundle import is_bundle
from coterie.inference.finished import Loaded, Loader, load_bundle, recorded, tokenizer
from coterie.inference.models import BASE
from coterie.inference.speaking import Speaker
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder

HELP = """\
/reset       clear the conversation
/save FILE   append the first model's conversation to a .jsonl file; a run file with the
             section data.messages can use this file as a client's text
/help        show this help
/quit        end the chat, as Ctrl-D does
Ctrl-C stops an answer; the conversation keeps the text generated so far."""


class Talk:
    """A chat that passes the user's lines to models and prints the models' answers.

    Args:
        speakers: A mapping from names to models. If there are several models, each answer is
            printed under the name of the model.
    """

    def __init__(self, speakers: Mapping[str, Speaker]) -> None:
        self.speakers = dict(speakers)
        self._warned = False

    def take(self, line: str) -> bool:
        """Execute a command, such as /save, or let the models answer a question.

        Args:
            line: The line that the user typed, which is a command or a question.

        Returns:
            Whether the chat continues.
        """
        text = line.strip()
        command, _, argument = text.partition(" ")
        match command, argument.strip():
            case "/quit", "":
                return False
            case "/reset", "":
                for speaker in self.speakers.values():
                    speaker.reset()
                terminal.complain("The conversation is cleared.")
            case "/help", "":
                terminal.say(HELP)
            case "/save", "":
                raise CoterieError("/save requires a file, such as /save chat.jsonl.")
            case "/save", file:
                self._save(Path(file))
            case _ if re.fullmatch("/[a-z]+", command):
                raise CoterieError(f"There is no command {text!r}; /help lists the commands.")
            case _:
                self._answer(text)
        return True

    def _answer(self, question: str) -> None:
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise CoterieError("The question is not UTF-8 text.") from error
        waiting = list(self.speakers)
        for name, speaker in self.speakers.items():
            waiting.remove(name)
            if len(self.speakers) > 1:
                terminal.console.print(f"\n{name}", style="bold", highlight=False, markup=False)
            text = None
            try:
                text = speaker.answer(question, partial(terminal.say, end=""))
            except KeyboardInterrupt:
                if waiting:
                    terminal.complain(f"\nThese models have not answered: {', '.join(waiting)}.")
                raise
            finally:
                if text is not None:
                    terminal.say("" if text else "(no answer)")
            if speaker.left_out and not self._warned:
                self._warned = True
                terminal.complain(
                    f"Note: the conversation exceeds the context of {name}'s base; from now on, "
                    "the oldest turns are left out. /reset clears the conversation."
                )

    def _save(self, file: Path) -> None:
        speaker = next(iter(self.speakers.values()))
        if file.suffix != ".jsonl":
            raise CoterieError(f"/save writes .jsonl files only, not {file}.")
        if not any(turn.role == "assistant" for turn in speaker.turns):
            raise CoterieError("The conversation has no answer yet; there is nothing to save.")
        record = {"messages": [turn._asdict() for turn in speaker.turns]}
        append_line(file, json.dumps(record, ensure_ascii=False))
        terminal.complain(f"Appended to {file}.")


def speakers(
    run: Path, client: str | None, others: Sequence[str], sampling: Sampling, system: str | None
) -> dict[str, Speaker]:
    """Load the model of a client, and the models listed in `coterie chat --with`.

    Args:
        run: The run folder, or a bundle, which contains a single model.
        client: The client's name; ignored for a bundle.
        others: The names in `--with`.
        sampling: Settings with which answers are generated.
        system: The system prompt, if any.

    Returns:
        A mapping from names to models, each with an empty history.

    Raises:
        CoterieError: A model does not exist, or is listed twice.
    """
    if client is None or is_bundle(run):
        if others:
            raise CoterieError("--with compares models of runs; give a run folder, not a bundle.")
        template = chat_template(tokenizer(run), None)
        base, attach, gate = load_bundle(run)
        return {run.name: Speaker(base, attach, template, sampling, system, gate)}
    loader, folder = Loader(), RunFolder(run)
    loaded: dict[str, Speaker] = {}
    untrained: list[str] = []
    for name in (client, *others):
        if name in loaded:
            raise CoterieError(
                f"--with lists {name!r}, but this model is already in the chat; remove the "
                "duplicate."
            )
        model_folder, owner = _resolve(folder, name) if loaded else (folder, name)
        config = recorded(model_folder)
        if name == BASE and loaded:
            base = loader.base(config, client)
            model = Loaded(base, lambda base=base: bare(base))
        else:
            model = loader.load(model_folder, config, owner)
            if not (config.data.chats or config.data.declared.compares):
                untrained.append(name)
        template = chat_template(model.base.tokenizer, config.data.chat_template)
        loaded[name] = Speaker(*model[:2], template, sampling, system, model.gate)
    if untrained:
        terminal.complain(
            f"Note: these models were not trained on conversations: {', '.join(untrained)}."
        )
    return loaded


def _resolve(folder: RunFolder, name: str) -> tuple[RunFolder, str]:
    """Return the run and the client that a name in `--with` refers to."""
    run, colon, client = name.rpartition(":")
    if not colon:
        return folder, name
    if (Path(run) / "run.json").is_file():
        return RunFolder(Path(run)), client
    return find_beside(folder, run), client
