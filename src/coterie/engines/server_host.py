"""The server's part of a run, independent of the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.linalg import LinAlgError  # pyright: ignore

from coterie.config.run import RunConfig
from coterie.engines.client_host import TRANSFORMS, due, scored
from coterie.errors import CoterieError, Unwritable
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.lazy import PART, server_state, unread
from coterie.exchanges.mean import memory_for_aggregation
from coterie.exchanges.waiting import restored_waiting, waiting_state
from coterie.federation.participants import Participant, server_context
from coterie.federation.pipeline import pipeline_of
from coterie.inference.general import with_general
from coterie.messages import Message, State
from coterie.messages import names as metric
from coterie.methods.value import Value
from coterie.runs import Recorder, RunFolder
from coterie.runs.store import Stored
from coterie.training.context import ClientId
from coterie.turn import TRAIN, Turn


class ServerHost:
    """The server's part of a run: the method's server, its value, messages and checkpoints.

    This is the base class of round loops.

    Args:
        config: The run.
        base: The run's base without weights, on the meta device.
        clients: The names of the clients.
        own: The data of the server itself; None if the server has no model.
        folder: The run folder.
        recorder: The recorder of metrics.
        strict: Whether an invalid upload raises an error instead of being excluded.
    """

    def __init__(
        self,
        config: RunConfig,
        base: nn.Module,
        clients: Sequence[ClientId],
        own: Participant | None,
        folder: RunFolder,
        recorder: Recorder,
        *,
        strict: bool = False,
    ) -> None:
        if own is not None and own.base is not None:
            own = with_general(config, own.base, own)
        self.config, self.own, self.folder, self.recorder = config, own, folder, recorder
        self.turn = config.turn(0)
        """The turn in progress or, between turns, the last one."""
        method = config.method
        pipeline = pipeline_of(config)
        self.schema = pipeline.schema
        """The fields that may be sent, after transforms have encoded them."""
        log = partial(recorder.log, None)
        self.server = method.server(server_context(config, base, clients, own, log))
        self.value: Any = self.server.initial()
        """The value of the method's server after the last complete exchange."""
        self.exchange = Exchange(
            folder.path, pipeline, method.schema(), config.aggregation, strict=strict
        )
        self.transforms = self.exchange.transforms

    def join(self, name: ClientId, hello: Message) -> None:
        """Add a client to the run; `Server.prepare` must have been called for this client."""
        self.exchange.join(name, hello)
        self.value = self.server.join(self.value, name, hello)

    def leave(self, name: ClientId) -> None:
        """Remove a client from the run. No exchange may be in progress."""
        self.value = self.value.without(name)
        self.exchange.leave(name)

    def open(self, turn: Turn, names: Sequence[ClientId]) -> None:
        """Start or restart a turn."""
        self.turn = turn
        self.exchange.open(turn, names)

    def download(self, name: ClientId) -> bytes:
        """Return the current download for a client."""
        message = self.message(name) if self.exchange.turn.phase == TRAIN else Message()
        return self.schema.send("down", self.transforms.download(name, message))

    def message(self, name: ClientId) -> Message:
        """Return the download for a client before transforms encode it."""
        return self.server.download(self.value, name, self.exchange)

    def take(self, name: ClientId, body: bytes) -> None:
        """Decode, check and store a client's upload, or exclude it.

        Raises:
            Unwritable: The upload cannot be stored.
        """
        exchange, transforms = self.exchange, self.transforms
        exchange.drop(name)
        try:
            message = self.schema.receive("up", body)
            if exchange.turn.phase == TRAIN:
                if transforms.pipeline.active:
                    message = transforms.upload(name, message, self.message(name))
                self.server.check(self.value, name, message, exchange)
            exchange.put(name, message, partial(self.server.reference, self.value, name))
        except Unwritable:  # the client may send the upload again
            raise
        except Exception as error:  # one invalid upload must not stop the round
            exchange.refuse(name, error)

    def close(self) -> None:
        """Complete a turn with the uploads that are not excluded.

        The last turn of an exchange aggregates the uploads of its training.

        Raises:
            CoterieError: The new value of the server is not finite, or the run's server optimiser
                has no effect. In this case, nothing changes.
        """
        exchange, turn, counted = self.exchange, self.turn, self.exchange.counted
        if turn.phase == TRAIN and not turn.closes:
            exchange.wait()
        if turn.after and turn.closes:
            exchange.resume()
        if turn.closes:
            self.value = self._aggregated()
        self.transforms.commit(counted)
        self._await(turn.number + 1)

    def _aggregated(self) -> Value:
        unusable = CoterieError(
            f"The aggregate of round {self.turn.round + 1} is not finite and was not saved; "
            "find the client that uploaded extremely large values, and continue without this "
            "client or from an earlier round."
        )
        try:
            with memory_for_aggregation():
                value = self.server.aggregate(self.value, self.exchange)
                value = value.stored(self.exchange.store)
                memories = self.transforms.memories.values()
                states = (replace(value.state(), parts={}), *(m.state() for m in memories))
                finite = all(state.is_finite() for state in states)
        except (LinAlgError, OverflowError) as error:
            raise unusable from error
        if not finite:
            raise unusable
        if self.config.aggregation.optimiser and self.exchange.replaces is False:
            raise CoterieError(
                "aggregation.optimiser has no effect, because the server replaces none of its "
                "parameters with a mean of uploads; remove the key."
            )
        return value

    def score(self, turn: Turn, *, ends: bool = False) -> None:
        """Score the server's model after a turn, if there is a model and evaluation is due.

        Args:
            turn: The turn.
            ends: Whether the run ends with this turn, for example because all clients have stopped
                early. Evaluation is then always due.
        """
        own, is_due = self.own, ends or (turn.ends_round and due(self.config, turn.round))
        if own is None or own.base is None or not is_due:
            return
        if (model := self.server.model(self.value)) is not None:
            for score in scored(self.config, own.base, model, own).values():
                self.recorder.log(None, metric.SERVER_SCORE, score.as_dict())

    def states(self) -> Iterator[tuple[str, State | Stored]]:
        """Yield pairs of a file's name and a state of the server, for a checkpoint."""
        self.value = self.value.stored(self.exchange.store)
        state, waiting = self.value.state(), waiting_state(self.exchange.waiting)
        yield "server", State(state.groups, {**state.values, **waiting.values})
        parts = {**unread(state.parts), **unread(waiting.parts)}
        yield from ((f"{PART}{name}", part) for name, part in parts.items())
        yield TRANSFORMS, self.transforms.state()

    def restore(self) -> None:
        """Restore the server's state from the newest checkpoint."""
        state, store = server_state(self.folder), self.exchange.store
        self.value = self.value.restored(state).stored(store)
        waiting, expelled = restored_waiting(state, store), self.folder.expelled()
        self.exchange.waiting = {n: held for n, held in waiting.items() if n not in expelled}
        self.transforms.restore(self.folder.load(TRANSFORMS))
        self._await(self.folder.turns())

    def _await(self, number: int) -> None:
        """Prepare the downloads between turns, which contain the result of all turns so far.

        Args:
            number: The number of the next turn.
        """
        self.exchange.open(replace(self.config.turn(number), phase=TRAIN), ())
