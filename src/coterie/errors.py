"""The errors that a user is meant to read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class CoterieError(Exception):
    """Something the user can mend: the message is one clear sentence, shown without a traceback."""


class Unwritable(CoterieError):
    """A file could not be written; when there is room on the disk, another try may succeed."""


class Diverged(CoterieError):
    """Training came to a loss, parameters or an upload that are not finite."""


def no_client_left(round: int, why: object) -> Diverged:
    """Return the error for a round (0 is the first) in which every client has diverged.

    why: a sentence about one of them, or about all.
    """
    sentence = str(why)
    return Diverged(f"No client is left in round {round + 1}: {sentence[0].lower()}{sentence[1:]}")


NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""How PyTorch says it on Linux, on Windows, and on some devices."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or PyTorch on a CPU or a GPU, could have no more memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: "1 upload", "2 uploads"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def enough_memory(what: str, helps: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Raise CoterieError where memory runs out within the block: for `what`, and what helps.

    helps: settings, the best first, of which two are named.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        where = "GPU" if type(error).__name__ == "OutOfMemoryError" else "machine"
        raise CoterieError(
            f"The {where} has too little memory for {what}; set {' or '.join(helps()[:2])}."
        ) from error
