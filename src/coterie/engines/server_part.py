"""The server's part of a run, independent of the engine."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from coterie.aggregation.mean import HELD, Aggregation
from coterie.aggregation.transform import TRAIN, Contribution
from coterie.config.run import RunConfig
from coterie.engines.memory import memory_for_aggregation
from coterie.engines.runtime import TRANSFORMS, due, scored
from coterie.errors import CoterieError
from coterie.federation.participants import Participant, server_context
from coterie.messages import Message, State
from coterie.messages import names as metric
from coterie.methods.contract import ServerSide
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId


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
        self.aggregation = config.aggregating()
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

    def open(self, exchange: int, names: Sequence[ClientId]) -> None:
        """Start or restart an exchange."""
        round, phase = self.config.turn(exchange)
        self.aggregation.transforms.begin(exchange, phase, names)
        if phase == TRAIN:
            self.server.start_round(round, list(names))

    def download(self, name: ClientId) -> bytes:
        """Return the current download for a client."""
        transforms = self.aggregation.transforms
        message = self.server.download(name) if transforms.phase == TRAIN else Message()
        return self.schema.send("down", transforms.download(name, message))

    def close(self, mean: Message, counted: Collection[ClientId]) -> None:
        """Complete an exchange.

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
            f"The aggregate of round {self.server.exchange + 1} is not finite and was not saved; "
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

    def score(self, round: int, *, last: bool = False) -> None:
        """Score the server's model after an exchange, if there is a model and evaluation is due.

        Args:
            round: The number of the exchange in the run; the first is 0. It is not the number of
                the round if a round consists of several exchanges.
            last: Whether the run ends with this exchange, for example because all clients have
                stopped early. Evaluation is then always due.
        """
        round, _ = self.config.turn(round)
        own = self.own
        if own is None or own.base is None or not (last or due(self.config, round)):
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


def aggregate(
    server: ServerSide,
    aggregation: Aggregation,
    round: int,
    contributions: Callable[[bool], Iterable[Contribution]],
) -> Message:
    """Return the aggregate of an exchange: the mean, and the means that `rows` requests.

    Args:
        server: The method's server-side object.
        aggregation: The run's aggregation.
        round: The number of the exchange.
        contributions: Function that yields the clients' contributions. It is called once for each
            pass over the uploads, and passes its argument to `contribution` as `first`.
    """
    mean = aggregation.mean(round, contributions(True))
    rows = server.rows()
    return aggregation.with_rows(mean, contributions(False), rows) if rows else mean


def contribution(
    server: ServerSide, aggregation: Aggregation, name: str, upload: Message, *, first: bool = True
) -> Contribution:
    """Return the part of an upload that is averaged over clients.

    Args:
        server: The method's server-side object.
        aggregation: The run's aggregation.
        name: The client that sent the upload.
        upload: The received upload, which has not been decoded yet.
        first: Whether to call `server.receive` with the groups whose reduction is `each`. True
            only for the first call with an upload.

    Raises:
        MessageError: If the upload is invalid.
    """
    upload = decoded(server, aggregation, name, upload)
    reference = partial(server.reference, name, upload)
    upload = aggregation.transforms.bounded(name, upload, reference)
    result = aggregation.contribution(name, upload, server.expects(name))
    if first:
        server.receive(name, aggregation.each(upload))
    return result


def decoded(server: ServerSide, aggregation: Aggregation, name: str, upload: Message) -> Message:
    """Return an upload after the run's transforms have decoded it."""
    if not aggregation.pipeline.active:
        return upload
    return aggregation.transforms.upload(name, upload, server.download(name))
