"""Errors whose messages are written for the user."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten


class CoterieError(Exception):
    """An error that the user can correct; its message is shown without a traceback."""


class Unwritable(CoterieError):
    """A file could not be written; a retry may succeed when the disk has free space."""


class Diverged(CoterieError):
    """Training produced a loss, a parameter or an upload that is not finite."""


def no_client_left(round: int, reason: object) -> Diverged:
    """Return the error for a round in which every client has diverged.

    Args:
        round: The number of the round, counted from 0.
        reason: A sentence or an error that describes the divergence.
    """
    sentence = str(reason)
    return Diverged(f"No client is left in round {round + 1}: {sentence[0].lower()}{sentence[1:]}")


NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Phrases in PyTorch's out-of-memory messages on Linux, on Windows, and on some devices."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the machine or a GPU has run out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def reason_of(error: BaseException) -> str:
    """Format the message of a library's exception as a part of an error message."""
    if isinstance(error, KeyError):  # its message is the key alone
        return f"it lacks {error}"
    return shorten(str(error), 300) or type(error).__name__


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 upload", "2 uploads"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def enough_memory(task: str, remedies: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Raise CoterieError if the body of the `with` statement runs out of memory.

    Args:
        task: A name of the task for the error message.
        remedies: Function that returns settings that reduce the use of memory. The most effective
            setting comes first. The error message suggests the first two settings.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        where = "GPU" if type(error).__name__ == "OutOfMemoryError" else "machine"
        raise CoterieError(
            f"The {where} has too little memory for {task}; set {' or '.join(remedies()[:2])}."
        ) from error


@contextmanager
def imports_for(purpose: str, extra: str) -> Iterator[None]:
    """Raise CoterieError if an import inside the with block fails because a package is missing.

    Args:
        purpose: The beginning of the error message, such as "A deployment".
        extra: The extra of Coterie that installs the package.
    """
    try:
        yield
    except ImportError as error:
        name = error.name or ""
        if not isinstance(error, ModuleNotFoundError) or name.split(".")[0] in ("", "coterie"):
            raise
        raise CoterieError(
            f"{purpose} needs the package {name}; install the extra: pip install "
            f"'coterie[{extra}]'."
        ) from None
