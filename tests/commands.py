"""Commands that tests run in their own process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.data.chat import chat_template
from coterie.evaluation.generation import Sampling
from coterie.inference.finished import Loader, recorded
from coterie.inference.speaking import Speaker
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder


@dataclass(frozen=True)
class Said:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]
Refuses = Callable[..., str]


def speaker_of(run: Path, client: str | None, others: str, how: Sampling) -> Callable[[], Speaker]:
    """Return a function that begins a chat with one model.

    Args:
        run: The folder of a finished run.
        client: The client whose model answers, or None for the base without an adapter.
        others: A client on the same base.
        how: How answers are sampled.
    """
    folder, loader = RunFolder(run), Loader()
    config = recorded(folder)
    base = loader.base(config, client or others)
    model = (lambda: bare(base)) if client is None else loader.load(folder, config, client).model
    return lambda: Speaker(base, model, chat_template(base.tokenizer, None), how)
