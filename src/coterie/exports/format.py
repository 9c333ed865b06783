"""The description of a format in which a model can be exported."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from coterie.exports.source import Source


class Outputs(NamedTuple):
    """The outputs of an exported model that another tool has loaded."""

    tool: str
    """The tool that computed the logits."""
    logits: Tensor
    """A tensor of shape (tokens, vocabulary) in float32."""


def run_python(arguments: Sequence[object], folder: str | Path) -> tuple[bool, str]:
    """Run Python in another process, with the packages of this process.

    Args:
        arguments: The arguments of the command `python`.
        folder: The current folder of the process.

    Returns:
        Whether the process succeeded, and the last line of its errors.
    """
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    return not process.returncode, (process.stderr.strip().splitlines() or ["it was killed"])[-1]


NO_GATE = (
    "The export has no gate: it answers all requests itself, while in Coterie, the base answers "
    "those that are unlike the client's text. With training.replay, it forgets less."
)
"""The sentence about an export of a model that has a gate in Coterie."""


@dataclass(frozen=True)
class Format:
    """A format in which a model can be exported.

    Args:
        name: The name in the option `--format`.
        content: A phrase that says what the folder contains, for messages and the model card.
        library: The name of the library that loads the folder, as the hub knows it.
        refusal: Function that returns a phrase that says why the format cannot represent a model
            exactly, or None if it can.
        write: Function that writes a model's files into a folder, without tokenizer and model card.
            It may change the model in memory.
        usage: Function that returns the Python code that loads a folder as `model` and `tokenizer`.
            The arguments are the source, the folder, and the place of the base.
        notes: Function that returns sentences for the user and the model card.
        alone: Whether the folder is loaded without Coterie.
        outputs: Function that computes the logits of a folder for token ids, or returns None if no
            installed tool can; if it is None, the code of `usage` loads the folder instead.
    """

    name: str
    content: str
    library: str
    refusal: Callable[[Source], str | None]
    write: Callable[[Source, Path], None]
    usage: Callable[[Source, str, str], str]
    notes: Callable[[Source], list[str]]
    alone: bool = True
    outputs: Callable[[Path, Sequence[int]], Outputs | None] | None = None

    def remarks(self, source: Source) -> tuple[str, ...]:
        """Return all sentences for the user and the model card."""
        remarks = tuple(self.notes(source))
        if self.alone and source.gate is not None:
            return (*remarks, NO_GATE)
        return remarks
