"""The server's part of a run, wherever it works."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from coterie.aggregation.mean import HELD, Aggregation
from coterie.aggregation.transform import TRAIN, Contribution
from coterie.config.run import RunConfig
from coterie.engines.runtime import TRANSFORMS, due, scored
from coterie.errors import CoterieError
from coterie.federation.participants import Participant, server_context
from coterie.messages import Message, State
from coterie.messages import names as metric
from coterie.methods.contract import ServerSide
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId


class ServerPart:
    """The server's side of the method, its messages' bytes and checks, and its checkpoints.

    Whoever leads the rounds of a run is one.

    Args:
        config: the run.
        base: the run's base, perhaps without weights.
        clients: the names of the clients.
        own: what a server with a model of its own holds.
        folder: the run's folder.
        recorder: records figures.
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
        self.aggregation = config.aggregating()
        self.schema = self.aggregation.schema
        log = partial(recorder.log, None)
        self.server = config.method.server(server_context(config, base, clients, own, log))

    def join(self, name: ClientId, hello: Message) -> None:
        """Let a client take part for which the server's side is prepared."""
        self.aggregation.transforms.join(name, hello)
        self.server.join(name, hello)

    def leave(self, name: ClientId) -> None:
        """Forget a client."""
        self.server.leave(name)
        self.aggregation.transforms.leave(name)

    def open(self, exchange: int, names: Sequence[ClientId]) -> None:
        """Begin an exchange, or begin it again."""
        round, phase = self.config.turn(exchange)
        self.aggregation.transforms.begin(exchange, phase, names)
        if phase == TRAIN:
            self.server.start_round(round, list(names))

    def download(self, name: ClientId) -> bytes:
        """Return what the server sends to a client now."""
        transforms = self.aggregation.transforms
        own = self.server.download(name) if transforms.phase == TRAIN else Message()
        return self.schema.send("down", transforms.download(name, own))

    def close(self, mean: Message, counted: Collection[ClientId]) -> None:
        """End an exchange that counts.

        Args:
            mean: the mean of its uploads; nothing in a phase of a transform's own.
            counted: the clients whose uploads count.

        Raises:
            CoterieError: before anything is saved, if the aggregate is not finite.
        """
        transforms = self.aggregation.transforms
        if transforms.phase == TRAIN:
            self._end_round(mean)
        transforms.commit(counted)
        transforms.begin(transforms.exchange + 1, TRAIN, ())

    def _end_round(self, mean: Message) -> None:
        unusable = CoterieError(
            f"The aggregate of round {self.server.exchange + 1} is not finite, and has not been "
            "saved; see which client's upload is too large, and continue without it, or from an "
            "earlier round."
        )
        try:
            groups = self.aggregation.transforms.on_mean(mean.groups, self.server.replaces())
            self.server.end_round(replace(mean, groups=groups), mean.values[HELD])
            finite = all(state.is_finite() for _, state in self.states())
        except (ArithmeticError, RuntimeError) as error:  # torch's linear algebra raises such
            raise unusable from error
        if not finite:
            raise unusable

    def score(self, round: int, *, last: bool = False) -> None:
        """Score the server's own model after a round (0 is the first), if it has one and it is due.

        last: whether the run ends with the round, maybe early.
        """
        round, _ = self.config.turn(round)
        own = self.own
        if own is None or own.base is None or not (last or due(self.config, round)):
            return
        if (model := self.server.model()) is not None:
            for score in scored(self.config, own.base, model, own).values():
                self.recorder.log(None, metric.SERVER_SCORE, score.as_dict())

    def states(self) -> Iterator[tuple[str, State]]:
        """Yield what the server must keep of a round, by the names in a checkpoint."""
        yield "server", self.server.state()
        if self.aggregation.transforms.memories:
            yield TRANSFORMS, self.aggregation.transforms.state()

    def restore(self) -> None:
        """Take the server back to the newest checkpoint."""
        self.server.restore(self.folder.load("server"))
        if self.aggregation.transforms.memories:
            self.aggregation.transforms.restore(self.folder.load(TRANSFORMS))


def contribution(
    server: ServerSide, aggregation: Aggregation, name: str, upload: Message
) -> Contribution:
    """What an upload adds to the mean, once the server's side has taken the rest of it.

    Raises MessageError if it is not what it should be.
    """
    upload = decoded(server, aggregation, name, upload)
    upload = aggregation.transforms.bounded(name, upload, server.reference)
    found = aggregation.contribution(name, upload, server.expects(name))
    server.receive(name, aggregation.each(upload))
    return found


def decoded(server: ServerSide, aggregation: Aggregation, name: str, upload: Message) -> Message:
    """Return an upload as the client's side of the method made it."""
    if not aggregation.pipeline.active:
        return upload
    return aggregation.transforms.upload(name, upload, server.download(name))
