"""What follows a run while it works."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from coterie.messages import Json


class Watch:
    """Follows one run; the default one shows nothing."""

    def warn(self, text: str) -> None:
        """There is something to know before the run begins."""

    def trains(self, title: str, where: Sequence[str]) -> None:
        """A run is about to begin, whose adapters stand there."""

    def start(self, title: str, rounds: int, done: int, clients: int, tokens: int) -> None:
        """A run begins: `done` of its rounds are done; an update reads `tokens` tokens."""

    def seen(self, client: str | None, name: str, value: Json) -> None:
        """A figure was logged."""

    def worked(self, round: int, client: str) -> None:
        """A client finished its part of a round."""

    def round_over(self, round: int, note: str) -> None:
        """A round is complete and saved."""

    def __enter__(self) -> Self:
        """The run begins."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The run is over or has failed."""
