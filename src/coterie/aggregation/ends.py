"""The two ends of a run's transforms: a client's and the server's, and what they remember."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.aggregation.pipeline import About, Memories, Pipeline, check_finite
from coterie.aggregation.transform import TRAIN, Contribution, Memory
from coterie.messages import Groups, Json, Message, MessageError, State
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets


class ClientTransforms:
    """A client's end of the transforms of a run."""

    def __init__(self, pipeline: Pipeline, client: str, ledger: Ledger) -> None:
        self.pipeline, self.client, self.ledger = pipeline, client, ledger
        self.secrets = Secrets()
        self.memories: Memories = {}
        self.received: Groups = {}
        """What the client last received, decoded."""
        self.told: Mapping[str, Json] = {}

    def receive(self, download: Message, exchange: int) -> Message:
        """Return a download as the server's side of the method made it."""
        if not self.pipeline.stages:
            return download
        before = self.received if self.pipeline.down else {}
        groups = self.pipeline.decode(download.groups, before, self._about(exchange, "down"))
        self.received = {g: {n: t.clone() for n, t in ts.items()} for g, ts in groups.items()}
        self.told, values = _divided(self.pipeline, download.values)
        return replace(download, groups=groups, values=values)

    def send(self, upload: Message, exchange: int) -> Message:
        """Return what is sent in place of an upload."""
        if not self.pipeline.stages:
            return upload
        about = self._about(exchange, "up")
        return replace(upload, groups=self.pipeline.encode(upload.groups, self.received, about))

    def answer(self, phase: str, exchange: int) -> Message:
        """Return the upload in a phase of a transform's own."""
        stage = self.pipeline.stage_of(phase)
        answer = stage.call("answer", phase, self._about(exchange, "up").of(stage))
        return Message(exchange, values={stage.transform.name: answer})

    def _about(self, exchange: int, way: Way) -> About:
        most = self.pipeline.exchanges
        rest = (self.memories, self.told, self.secrets, self.ledger)
        return About(self.client, exchange, most, way, *rest)

    def state(self) -> State:
        """Return what must survive a restart."""
        parts = {key: memory.state() for key, memory in self.memories.items()}
        received = {"received": State(self.received)} if self.pipeline.down else {}
        return State(values={"secrets": self.secrets.state()}, parts={**parts, **received})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        self.secrets.restore(state.values["secrets"])
        self.received = state.parts.get("received", State()).groups
        self.memories = {k: Memory.of(p) for k, p in state.parts.items() if k != "received"}


@dataclass
class Link:
    """What the server remembers of one client."""

    memories: Memories = field(default_factory=dict)
    received: Groups = field(default_factory=dict)
    """What the client last received, decoded; only where downloads are encoded."""

    def copied(self) -> Memories:
        """Return a copy of the memories."""
        return {key: memory.copied() for key, memory in self.memories.items()}


class ServerTransforms:
    """The server's end of the transforms of a run."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.memories = {stage.key: Memory() for stage in pipeline.stages}
        """What belongs to no single client, by transform."""
        self.exchange, self.phase = 0, TRAIN
        self.clients: tuple[str, ...] = ()
        self.links: dict[str, Link] = {}
        self._coming: dict[str, Link] = {}
        """What links become if the uploads of the exchange count."""
        self._sent: dict[str, Message] = {}
        self._measures: dict[str, dict[str, Any]] = {}

    def begin(self, exchange: int, phase: str, clients: Iterable[str]) -> None:
        """Begin an exchange, or begin it again."""
        self.exchange, self.phase, self.clients = exchange, phase, tuple(clients)
        self._coming, self._sent, self._measures = {}, {}, {}

    def download(self, client: str, message: Message) -> Message:
        """Return what is sent in place of a download; the same message within an exchange."""
        if not self.pipeline.stages:
            return message
        if client not in self._sent:
            old = self.links.get(client, Link())
            new = self._coming[client] = Link(old.copied())
            groups = self.pipeline.encode(
                message.groups, old.received, self._about(client, "down", new.memories)
            )
            if self.pipeline.down:  # as the client decodes it
                about = self._about(client, "down", old.copied())
                new.received = self.pipeline.decode(groups, old.received, about)
            told = {
                s.transform.name: s.call(
                    "tell", self.phase, client, self.clients, self.memories[s.key]
                )
                for s in self.pipeline.stages
            }
            values = {name: value for name, value in told.items() if value is not None}
            sent = replace(message, groups=groups, values={**message.values, **values})
            self._sent[client] = sent
        return self._sent[client]

    def upload(self, client: str, upload: Message, download: Groups) -> Message:
        """Return an upload as the client's side of the method made it.

        Args:
            client: who sent it.
            upload: what arrived.
            download: what the method sends to this client in the exchange.

        Raises:
            MessageError: if a transform cannot decode what arrived.
        """
        if not self.pipeline.stages:
            return upload
        coming, memories = self._coming[client], self.links.get(client, Link()).copied()
        reference = coming.received if self.pipeline.down else download
        about = self._about(client, "up", memories)
        groups = self.pipeline.decode(upload.groups, reference, about)
        coming.memories |= {k: m for k, m in memories.items() if k.endswith(".up")}
        return replace(upload, groups=groups)

    def collect(self, client: str, message: Message) -> None:
        """Note what a client answered in a phase of a transform's own.

        Raises:
            MessageError: if the answer is wrong.
        """
        stage = self.pipeline.stage_of(self.phase)
        answer, memory = message.values.get(stage.transform.name), self.memories[stage.key]
        stage.call("collect", self.phase, client, answer, memory, error=MessageError)

    def reduce(self, contributions: Iterable[Contribution]) -> Groups:
        """Return what the run's reduction makes of uploads."""
        stage = self.pipeline.reduction
        assert stage is not None, "the run has one"
        groups = stage.call("reduce", contributions, self.clients, self.memories[stage.key])
        check_finite(stage, "reduce", groups)
        return groups

    def measure(self, client: str, upload: Message) -> None:
        """Let transforms measure a decoded upload."""
        for stage in self.pipeline.stages:
            measures = self._measures.setdefault(stage.key, {})
            measures[client] = stage.call("measure", upload.groups)

    def refuse(self, clients: Collection[str]) -> dict[str, str]:
        """Return which of these clients' uploads transforms refuse, and why."""
        refused: dict[str, str] = {}
        for stage in self.pipeline.stages:
            measures = self._measures.get(stage.key, {})
            here = {client: measures[client] for client in sorted(clients)}
            refused |= stage.call("refuse", here)
        return refused

    def on_mean(self, mean: Groups, before: Groups) -> Groups:
        """Return what takes the place of a mean."""
        for stage in self.pipeline.stages:
            mean = stage.call("on_mean", mean, before, self.memories[stage.key])
            check_finite(stage, "on_mean", mean)
        return mean

    def commit(self, counted: Iterable[str]) -> None:
        """Make final what is remembered of the clients whose uploads count."""
        if self.pipeline.stages:
            self.links |= {client: self._coming[client] for client in counted}

    def leave(self, client: str) -> None:
        """Forget a client."""
        self.links.pop(client, None)
        memories = {k: m.state().without(client) for k, m in self.memories.items()}
        self.memories = {key: Memory.of(state) for key, state in memories.items()}

    def _about(self, client: str, way: Way, memories: Memories) -> About:
        return About(client, self.exchange, self.pipeline.exchanges, way, memories)

    def state(self) -> State:
        """Return what must survive a restart."""
        links = {
            client: State(
                link.received, parts={key: memory.state() for key, memory in link.memories.items()}
            )
            for client, link in self.links.items()
        }
        own = {key: memory.state() for key, memory in self.memories.items()}
        return State(parts={"own": State(parts=own), "clients": State(parts=links)})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        own = state.parts["own"].parts
        self.memories = {key: Memory.of(part) for key, part in own.items()}
        self.links = {
            client: Link({key: Memory.of(p) for key, p in link.parts.items()}, link.groups)
            for client, link in state.parts["clients"].parts.items()
        }


def _divided(
    pipeline: Pipeline, values: Mapping[str, Json]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Divide the values of a download into those of transforms and those of the method."""
    names = {stage.transform.name for stage in pipeline.stages}
    return (
        {name: value for name, value in values.items() if name in names},
        {name: value for name, value in values.items() if name not in names},
    )
