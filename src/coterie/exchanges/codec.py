"""Encoding and decoding of messages on a client and on the server, with transforms' states."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coterie.exchanges.pipeline import (
    Contexts,
    Memories,
    Pipeline,
    check_finite,
    check_groups,
    check_same_shapes,
    shapes_of,
)
from coterie.messages import Groups, Json, Message, MessageError, State
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets
from coterie.runs.store import Store, Stored
from coterie.transforms.context import Context, Contribution, Memory
from coterie.transforms.hooks import failure
from coterie.turn import FIRST, TRAIN, Turn

EXCHANGE = "exchange"
"""The key of the state that bounds and the server optimiser carry over between exchanges."""


class ClientTransforms:
    """The transforms of a run on a client.

    Args:
        pipeline: The pipeline of the run.
        client: The client's name.
        ledger: The ledger of the client's privacy budget.
    """

    def __init__(self, pipeline: Pipeline, client: str, ledger: Ledger) -> None:
        self.pipeline, self.client, self.ledger = pipeline, client, ledger
        self.secrets = Secrets()
        self.memories: Memories = {}
        self.received: Groups = {}
        """The decoded tensors that the client last received, keyed by group and name."""
        self.server_values: Mapping[str, Json] = {}
        """The values that `tell` added to the last download, keyed by transform."""
        self.remembers = any(stage.has("encode", "decode", "answer") for stage in pipeline.stages)
        """Whether the transforms have a state to save."""

    def receive(self, download: Message, turn: Turn) -> Message:
        """Decode a download, so that the method's client-side object can apply it."""
        if not self.pipeline.active:
            return download
        groups = download.groups
        if turn.phase == TRAIN:
            before = self.received if self.pipeline.down else {}
            groups = self.pipeline.decode(groups, before, "down", self._contexts(turn, "down"))
            self.received = {g: {n: t.clone() for n, t in ts.items()} for g, ts in groups.items()}
        values = dict(download.values)
        names = [s.transform.name for s in self.pipeline.stages if s.has("tell")]
        self.server_values = {name: values.pop(name) for name in names if name in values}
        return replace(download, groups=groups, values=values)

    def send(self, upload: Message, turn: Turn) -> Message:
        """Encode an upload of the method's client-side object. The caller sends the result."""
        if not self.pipeline.active:
            return upload
        contexts = self._contexts(turn, "up")
        groups = self.pipeline.encode(upload.groups, self.received, "up", contexts)
        return replace(upload, groups=groups)

    def answer(self, turn: Turn) -> Message:
        """Return the client's upload for an additional phase declared by a transform."""
        stage = self.pipeline.stage_of(turn.phase)
        answer = stage.call("answer", turn.phase, self._contexts(turn, "up")(stage))
        return Message(turn.number, values={stage.transform.name: answer})

    def _contexts(self, turn: Turn, way: Way) -> Contexts:
        return lambda stage: Context(
            stage.transform.name,
            self.client,
            turn,
            self.pipeline.exchanges,
            way,
            self.memories.setdefault(f"{stage.key}.{way}", Memory()),
            self.server_values.get(stage.transform.name),
            self.secrets,
            self.ledger,
        )

    def state(self) -> State:
        """Return the transforms' state for checkpoints."""
        parts = {key: memory.state() for key, memory in self.memories.items()}
        received = {"received": State(self.received)} if self.pipeline.down else {}
        return State(values={"secrets": self.secrets.state()}, parts={**parts, **received})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        self.secrets.restore(state.values["secrets"])
        self.received = state.parts.get("received", State()).groups
        self.memories = {k: Memory.of(p) for k, p in state.parts.items() if k != "received"}


@dataclass
class ClientMemory:
    """The transforms' state on the server for one client."""

    memories: Memories = field(default_factory=dict)
    received: Groups = field(default_factory=dict)
    """The decoded tensors that the client last received. Empty if downloads are not encoded."""


class ServerTransforms:
    """The transforms of a run on the server.

    Args:
        pipeline: The pipeline of the run.
        store: The storage of downloads.
    """

    def __init__(self, pipeline: Pipeline, store: Store) -> None:
        self.pipeline, self.store = pipeline, store
        self.memories = {key: Memory() for key in (EXCHANGE, *(s.key for s in pipeline.stages))}
        """The states that belong to no client: of the exchange, and of each transform."""
        self._final = self._begun = self.memories
        """The values of `memories` after the last completed turn, and after `tell` in this turn."""
        self.turn, self.clients = FIRST, tuple[str, ...]()
        self.client_memories: dict[str, ClientMemory] = {}
        self._pending: dict[str, ClientMemory] = {}
        """New states, keyed by client. In `commit`, the states of clients whose uploads are
        accepted become permanent."""
        self._sent: dict[str, tuple[Stored | None, dict[str, Json]]] = {}
        """The encoded tensors of each client's download (None if tensors are not encoded), and the
        values that transforms added to it."""

    def begin(self, turn: Turn, clients: Iterable[str]) -> None:
        """Start or restart a turn, and discard states that `commit` has not yet accepted."""
        self.turn, self.clients = turn, tuple(clients)
        self._pending, self._sent = {}, {}
        self._begun = _copied(self._final)
        self.repeat()

    def repeat(self) -> None:
        """Restart the aggregation of uploads, which are already decoded."""
        self.memories = _copied(self._begun)

    def download(self, client: str, message: Message) -> Message:
        """Encode a download.

        If this function is called again for a client in the same turn, it returns the message of
        the first call.
        """
        if not self.pipeline.active:
            return message
        self._prepare(client, message)
        stored, values = self._sent[client]
        groups = message.groups if stored is None else stored.load().groups
        return replace(message, groups=groups, values={**message.values, **values})

    def _prepare(self, client: str, message: Message) -> None:
        """Encode a download, unless the client has one in this turn."""
        if client in self._sent:
            return
        old = self.client_memories.get(client, ClientMemory())
        new = self._pending[client] = ClientMemory(_copied(old.memories), old.received)
        encodes = self.pipeline.down and self.turn.phase == TRAIN
        stored = self.store.put(self._encoded(client, message, old, new)) if encodes else None
        server_values = {
            s.transform.name: s.call(
                "tell", self.turn.phase, client, self.clients, self._begun[s.key]
            )
            for s in self.pipeline.stages
        }
        self.repeat()
        values = {name: value for name, value in server_values.items() if value is not None}
        self._sent[client] = stored, values

    def _encoded(
        self, client: str, message: Message, old: ClientMemory, new: ClientMemory
    ) -> State:
        """Encode the tensors of a download, and decode them as the client will."""
        contexts = self._contexts(client, "down", new.memories)
        encoded = self.pipeline.encode(message.groups, old.received, "down", contexts)
        contexts = self._contexts(client, "down", _copied(old.memories))
        new.received = self.pipeline.decode(encoded, old.received, "down", contexts)
        stages = self.pipeline.stages_encoding("down")
        names = ", ".join(repr(stage.transform.name) for stage in stages)
        prefix = f"The transforms {names} failed: a decoded download has"
        check_same_shapes(prefix, new.received, shapes_of(message.groups))
        return State(encoded)

    def upload(self, client: str, upload: Message, download: Message) -> Message:
        """Decode an upload.

        Args:
            client: The client that sent the upload.
            upload: The upload as it was received.
            download: The method's download for this client in the exchange.

        Raises:
            MessageError: If a transform cannot decode the upload.
        """
        if not self.pipeline.active:
            return upload
        self._prepare(client, download)  # not sent yet if the exchange was restarted
        pending = self._pending[client]
        memories = _copied(self.client_memories.get(client, ClientMemory()).memories)
        reference = pending.received if self.pipeline.down else download.groups
        contexts = self._contexts(client, "up", memories)
        groups = self.pipeline.decode(upload.groups, reference, "up", contexts)
        pending.memories |= {k: m for k, m in memories.items() if k.endswith(".up")}
        return replace(upload, groups=groups)

    def collect(self, client: str, message: Message) -> None:
        """Process a client's upload in an additional phase declared by a transform.

        Raises:
            MessageError: If the upload is invalid.
        """
        self._prepare(client, Message())  # not sent yet if the exchange was restarted
        phase = self.turn.phase
        stage = self.pipeline.stage_of(phase)
        answer, memory = message.values.get(stage.transform.name), self.memories[stage.key]
        stage.call("collect", phase, client, answer, memory, error=MessageError)

    def reduce(self, contributions: Iterable[Contribution], clients: Sequence[str]) -> Groups:
        """Aggregate uploads with the run's reduction, which replaces the weighted mean.

        Args:
            contributions: The accepted uploads, in the order of client names.
            clients: All clients of the exchange, including clients whose uploads were rejected.
        """
        stage = self.pipeline.reduction
        assert stage is not None, "the run has a reduction"
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}

        def with_shapes() -> Iterator[Contribution]:
            for contribution in contributions:
                for group, sizes in shapes_of(contribution.groups).items():
                    shapes.setdefault(group, {}).update(sizes)
                yield contribution

        stream = with_shapes()
        groups = stage.call("reduce", stream, clients, self.memories[stage.key])
        deque(stream, maxlen=0)  # the reduction may not have read all uploads
        check_finite(stage, "reduce", groups)
        check_same_shapes(failure(stage.transform, "reduce", "returned"), groups, shapes)
        return groups

    def on_mean(self, mean: Groups, before: Groups) -> Groups:
        """Let the transforms change the mean of a group, and return the changed mean.

        This function is called once per exchange for each group that a method averages.

        Args:
            mean: The reduced uploads, keyed by group and name.
            before: The server's parameters before the mean replaces them, keyed by group and name.
        """
        for stage in self.pipeline.stages:
            after = stage.call("on_mean", mean, before, self.memories[stage.key])
            check_groups(stage, "on_mean", after)
            prefix = failure(stage.transform, "on_mean", "returned")
            check_same_shapes(prefix, after, shapes_of(mean))
            mean = after
        return mean

    def commit(self, counted: Iterable[str]) -> None:
        """Replace the transforms' permanent states with their states after the current turn.

        Args:
            counted: The clients whose uploads are accepted. For every client that is not in
                `counted`, transforms keep the state from before the exchange.
        """
        self._final = self.memories
        if self.pipeline.active:
            self.client_memories |= {client: self._pending[client] for client in counted}

    def leave(self, client: str) -> None:
        """Remove a client and the states that transforms have for this client."""
        self.client_memories.pop(client, None)
        states = {key: memory.state() for key, memory in self._final.items()}
        self._final = {key: Memory.of(s.without(client)) for key, s in states.items()}
        self.memories = _copied(self._final)

    def _contexts(self, client: str, way: Way, memories: Memories) -> Contexts:
        return lambda stage: Context(
            stage.transform.name,
            client,
            self.turn,
            self.pipeline.exchanges,
            way,
            memories.setdefault(f"{stage.key}.{way}", Memory()),
        )

    def state(self) -> State:
        """Return the transforms' state for checkpoints."""
        clients = {
            client: State(stored.received, parts={k: m.state() for k, m in stored.memories.items()})
            for client, stored in self.client_memories.items()
        }
        own = {key: memory.state() for key, memory in self._final.items()}
        return State(parts={"own": State(parts=own), "clients": State(parts=clients)})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        own = state.parts["own"].parts
        self.memories = self._final = {key: Memory.of(part) for key, part in own.items()}
        self.client_memories = {
            client: ClientMemory({k: Memory.of(p) for k, p in stored.parts.items()}, stored.groups)
            for client, stored in state.parts["clients"].parts.items()
        }


def _copied(memories: Mapping[str, Memory]) -> Memories:
    return {key: memory.copied() for key, memory in memories.items()}
