"""The server's part of a run, independent of the engine."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from coterie.config.run import RunConfig
from coterie.engines.runtime import TRANSFORMS, due, scored
from coterie.errors import CoterieError
from coterie.exchanges.exchange import memory_for_aggregation
from coterie.exchanges.mean import HELD, Aggregation
from coterie.federation.participants import Participant, server_context
from coterie.messages import Message, State
from coterie.messages import names as metric
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId
from coterie.turn import TRAIN, Turn


class ServerPart:
    """The server's part of a run: the method's server-side object, messages and checkpoints.

    This is the base class of round loops.

    Args:
        config: The run.
        base: The run's base without weights, on the meta device.
        clients: The names of the clients.
        own: The data of the server itself; None if the server has no model.
        folder: The run folder.
        recorder: The recorder of metrics.
    """

    def __init__(
        self,
        config: RunConfig,
        base: nn.Module,
        clients: Sequence[ClientId],
        own: Participant | None,
        folder: RunFolder,
        recorder: Recorder,
    ) -> None:
        self.config, self.own, self.folder, self.recorder = config, own, folder, recorder
        self.turn = config.turn(0)
        """The turn in progress or, between turns, the last one."""
        least_others = config.aggregation.least_others
        self.aggregation = Aggregation(
            config.method.schema(), config.every_transform, config.exchanges, least_others
        )
        self.schema = self.aggregation.schema
        log = partial(recorder.log, None)
        self.server = config.method.server(server_context(config, base, clients, own, log))

    def join(self, name: ClientId, hello: Message) -> None:
        """Add a client to the run; `ServerSide.prepare` must have been called for this client."""
        self.aggregation.transforms.join(name, hello)
        self.server.join(name, hello)

    def leave(self, name: ClientId) -> None:
        """Remove a client from the run."""
        self.server.leave(name)
        self.aggregation.transforms.leave(name)

    def open(self, turn: Turn, names: Sequence[ClientId]) -> None:
        """Start or restart a turn."""
        self.turn = turn
        self.aggregation.transforms.begin(turn.number, turn.phase, names)
        if turn.phase == TRAIN:
            self.server.start_round(turn.exchange, list(names))

    def repeat(self, names: Sequence[ClientId]) -> None:
        """Restart the aggregation of a turn, with the uploads that have already arrived."""
        self.aggregation.transforms.repeat()
        if self.turn.phase == TRAIN:
            self.server.start_round(self.turn.exchange, list(names))

    def download(self, name: ClientId) -> bytes:
        """Return the current download for a client."""
        transforms = self.aggregation.transforms
        message = self.server.download(name) if transforms.phase == TRAIN else Message()
        return self.schema.send("down", transforms.download(name, message))

    def close(self, mean: Message, counted: Collection[ClientId]) -> None:
        """Complete a turn.

        Args:
            mean: The mean of the uploads; empty in a phase that a transform added to the run.
            counted: The clients whose uploads were accepted.

        Raises:
            CoterieError: If the aggregate is not finite. In this case, nothing is saved.
        """
        transforms = self.aggregation.transforms
        if transforms.phase == TRAIN:
            self._end_round(mean)
        transforms.commit(counted)
        transforms.begin(transforms.exchange + 1, TRAIN, ())

    def _end_round(self, mean: Message) -> None:
        unusable = CoterieError(
            f"The aggregate of round {self.turn.round + 1} is not finite and was not saved; "
            "find the client that uploaded extremely large values, and continue without this "
            "client or from an earlier round."
        )
        try:
            with memory_for_aggregation():
                groups = self.aggregation.transforms.on_mean(mean.groups, self.server.replaces())
                self.server.end_round(replace(mean, groups=groups), mean.values[HELD])
                finite = all(state.is_finite() for _, state in self.states())
        except (ArithmeticError, RuntimeError) as error:  # raised by torch.linalg
            raise unusable from error
        if not finite:
            raise unusable

    def score(self, turn: Turn, *, ends: bool = False) -> None:
        """Score the server's model after a turn, if there is a model and evaluation is due.

        Args:
            turn: The turn.
            ends: Whether the run ends with this turn, for example because all clients have stopped
                early. Evaluation is then always due.
        """
        own, is_due = self.own, ends or (turn.last and due(self.config, turn.round))
        if own is None or own.base is None or not is_due:
            return
        if (model := self.server.model()) is not None:
            for score in scored(self.config, own.base, model, own).values():
                self.recorder.log(None, metric.SERVER_SCORE, score.as_dict())

    def states(self) -> Iterator[tuple[str, State]]:
        """Yield pairs of a file's name and a state of the server, for a checkpoint."""
        yield "server", self.server.state()
        if self.aggregation.transforms.memories:
            yield TRANSFORMS, self.aggregation.transforms.state()

    def restore(self) -> None:
        """Restore the server's state from the newest checkpoint."""
        self.server.restore(self.folder.load("server"))
        if self.aggregation.transforms.memories:
            self.aggregation.transforms.restore(self.folder.load(TRANSFORMS))
