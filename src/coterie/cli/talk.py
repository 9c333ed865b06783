"""A conversation in the terminal, with one model or several side by side."""

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
from coterie.inference.finished import Loaded, Loader, recorded
from coterie.inference.speaking import Speaker
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder

HELP = """\
/reset       forget what was said
/save FILE   add the conversation (with the first model) to a .jsonl file, for data.messages
/help        show this
/quit        end, as Ctrl-D does
Ctrl-C stops an answer, of which the conversation keeps what there is."""
BASE = "base"
"""What a run's base without an adapter is called beside clients."""


class Talk:
    """Passes what is typed on to models, and shows their answers.

    speakers: by the heading of their answers. With one, there is no heading.
    """

    def __init__(self, speakers: Mapping[str, Speaker]) -> None:
        self.speakers = dict(speakers)
        self._told = False

    def take(self, line: str) -> bool:
        """Answer a line, or do what it commands; False: it ends the conversation."""
        text = line.strip()
        command, _, argument = text.partition(" ")
        match command, argument.strip():
            case "/quit", "":
                return False
            case "/reset", "":
                for speaker in self.speakers.values():
                    speaker.reset()
                terminal.complain("Forgotten.")
            case "/help", "":
                terminal.say(HELP)
            case "/save", "":
                raise CoterieError("/save needs a file, such as /save talk.jsonl.")
            case "/save", file:
                self._save(Path(file))
            case _ if re.fullmatch("/[a-z]+", command):
                raise CoterieError(f"There is no command {text!r}; /help lists all.")
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
            said = None
            try:
                said = speaker.answer(question, partial(terminal.say, end=""))
            except KeyboardInterrupt:
                if waiting:
                    terminal.complain(f"\nNot asked: {', '.join(waiting)}.")
                raise
            finally:
                if said is not None:
                    terminal.say("" if said else "(no answer)")
            if speaker.left_out and not self._told:
                self._told = True
                terminal.complain(
                    f"Note: the conversation no longer fits in the context of {name}'s base; from "
                    "now on, the oldest exchanges are left out. /reset begins anew."
                )

    def _save(self, file: Path) -> None:
        speaker = next(iter(self.speakers.values()))
        if file.suffix != ".jsonl":
            raise CoterieError(f"Conversations are saved in .jsonl files, not in {file}.")
        if not any(turn.role == "assistant" for turn in speaker.turns):
            raise CoterieError("Nothing has been said yet that could be saved.")
        record = {"messages": [turn._asdict() for turn in speaker.turns]}
        append_line(file, json.dumps(record, ensure_ascii=False))
        terminal.complain(f"Added to {file}.")


def speakers(
    run: Path, client: str, others: Sequence[str], sampling: Sampling, system: str | None
) -> dict[str, Speaker]:
    """The model of a run's client and those beside it, by name; see `coterie chat --with`.

    Raises CoterieError if there is no such model, or one is named twice.
    """
    loader, folder = Loader(), RunFolder(run)
    found: dict[str, Speaker] = {}
    untrained: list[str] = []
    for name in (client, *others):
        if name in found:
            raise CoterieError(f"--with names {name!r} twice, or the client itself; leave it out.")
        whose, of = _whose(folder, name) if found else (folder, name)
        config = recorded(whose)
        if name == BASE and found:
            base = loader.base(config, client)
            model = Loaded(base, lambda base=base: bare(base))
        else:
            model = loader.load(whose, config, of)
            if not (config.data.chats or config.data.declared.compares):
                untrained.append(name)
        template = chat_template(model.base.tokenizer, config.data.chat_template)
        found[name] = Speaker(*model, template, sampling, system)
    if untrained:
        terminal.complain(f"Note: not trained on conversations: {', '.join(untrained)}.")
    return found


def _whose(folder: RunFolder, name: str) -> tuple[RunFolder, str]:
    """The run and the client that a name beside a run means."""
    where, colon, client = name.rpartition(":")
    if not colon:
        return folder, name
    if (Path(where) / "run.json").is_file():
        return RunFolder(Path(where)), client
    return find_beside(folder, where), client
