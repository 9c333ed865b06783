"""The two ends of a run's transforms: a client's and the server's, and what they remember."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.aggregation.pipeline import (
    ON_CLIENT,
    ON_SERVER,
    About,
    Memories,
    Pipeline,
    check_alike,
    check_finite,
    check_groups,
    shapes_of,
)
from coterie.aggregation.transform import TRAIN, Contribution, Memory, failure
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
        self.remembers = bool(pipeline.having(*ON_CLIENT))
        """Whether there is a state to keep."""

    def declared(self, message: Message, tokens: int) -> Message:
        """Return a hello or an upload with what transforms declare.

        Args:
            message: the message as the method makes it.
            tokens: number of the client's training tokens.
        """
        told = {
            s.transform.name: s.call("declare", tokens) for s in self.pipeline.having("declare")
        }
        values = {name: value for name, value in told.items() if value is not None}
        return replace(message, values={**message.values, **values}) if values else message

    def receive(self, download: Message, exchange: int) -> Message:
        """Return a download as the server's side of the method made it."""
        if not self.pipeline.active:
            return download
        before = self.received if self.pipeline.down else {}
        groups = self.pipeline.decode(download.groups, before, self._about(exchange, "down"))
        self.received = {g: {n: t.clone() for n, t in ts.items()} for g, ts in groups.items()}
        self.told, values = _divided(self.pipeline, download.values)
        return replace(download, groups=groups, values=values)

    def send(self, upload: Message, exchange: int) -> Message:
        """Return what is sent in place of an upload."""
        if not self.pipeline.active:
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
        return _copied(self.memories)


class ServerTransforms:
    """The server's end of the transforms of a run."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.memories = {stage.key: Memory() for stage in pipeline.having(*ON_SERVER)}
        """What belongs to no single client, by transform; if empty, there is no state to keep."""
        self._final = self.memories
        """The memories as the last exchange that counted has left them."""
        self.exchange, self.phase = 0, TRAIN
        self.clients: tuple[str, ...] = ()
        self.links: dict[str, Link] = {}
        self._coming: dict[str, Link] = {}
        """What links become if the uploads of the exchange count."""
        self._sent: dict[str, Message] = {}
        self._joined: dict[str, dict[str, Any]] = {}
        """What transforms know of clients that have joined, by transform and client."""
        self._limits: dict[str, dict[str, Any]] = {}
        """The limits of uploads of the exchange, by client and transform."""

    def join(self, client: str, hello: Message) -> None:
        """Let a client take part.

        Raises:
            MessageError: if a transform refuses the client's first message.
        """
        for stage in self.pipeline.having("join"):
            known = stage.call("join", client, hello, error=MessageError)
            self._joined.setdefault(stage.key, {})[client] = known

    def begin(self, exchange: int, phase: str, clients: Iterable[str]) -> None:
        """Begin an exchange, or begin it again."""
        self.exchange, self.phase, self.clients = exchange, phase, tuple(clients)
        self._coming, self._sent, self._limits = {}, {}, {}
        self.memories = _copied(self._final)

    def download(self, client: str, message: Message) -> Message:
        """Return what is sent in place of a download; the same message within an exchange."""
        if not self.pipeline.active:
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
                names = ", ".join(repr(s.transform.name) for s in self.pipeline.acting("down"))
                failing = f"The transforms {names} failed: a decoded download has"
                check_alike(failing, new.received, shapes_of(message.groups))
            told = {
                s.transform.name: s.call(
                    "tell", self.phase, client, self.clients, self.memories[s.key]
                )
                for s in self.pipeline.having("tell")
            }
            values = {name: value for name, value in told.items() if value is not None}
            sent = replace(message, groups=groups, values={**message.values, **values})
            self._sent[client] = sent
        return self._sent[client]

    def upload(self, client: str, upload: Message, download: Message) -> Message:
        """Return an upload as the client's side of the method made it.

        Args:
            client: who sent it.
            upload: what arrived.
            download: what the method sends to this client in the exchange.

        Raises:
            MessageError: if a transform cannot decode what arrived.
        """
        if not self.pipeline.active:
            return upload
        self.download(client, download)  # an exchange that began again has sent nothing yet
        coming, memories = self._coming[client], self.links.get(client, Link()).copied()
        reference = coming.received if self.pipeline.down else download.groups
        about = self._about(client, "up", memories)
        groups = self.pipeline.decode(upload.groups, reference, about)
        coming.memories |= {k: m for k, m in memories.items() if k.endswith(".up")}
        return replace(upload, groups=groups)

    def collect(self, client: str, message: Message) -> None:
        """Note what a client answered in a phase of a transform's own.

        Raises:
            MessageError: if the answer is wrong.
        """
        self.download(client, Message())  # an exchange that began again has sent nothing yet
        stage = self.pipeline.stage_of(self.phase)
        answer, memory = message.values.get(stage.transform.name), self.memories[stage.key]
        stage.call("collect", self.phase, client, answer, memory, error=MessageError)

    def reduce(self, contributions: Iterable[Contribution]) -> Groups:
        """Return what the run's reduction makes of uploads."""
        stage = self.pipeline.reduction
        assert stage is not None, "the run has one"
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}

        def seen() -> Iterator[Contribution]:
            for contribution in contributions:
                for group, own in shapes_of(contribution.groups).items():
                    shapes.setdefault(group, {}).update(own)
                yield contribution

        stream = seen()
        groups = stage.call("reduce", stream, self.clients, self.memories[stage.key])
        deque(stream, maxlen=0)  # every upload counts, whether it was looked at or not
        check_finite(stage, "reduce", groups)
        check_alike(failure(stage.transform, "reduce", "returned"), groups, shapes)
        return groups

    def measure(self, client: str, upload: Message, reference: Groups) -> dict[str, Any]:
        """Return what transforms must know of a decoded upload, by transform.

        Args:
            client: who sent it.
            upload: the decoded upload.
            reference: by group, the parameters that the client started the round from.
        """
        return {
            stage.key: stage.call("measure", upload, reference, self._known(stage.key, client))
            for stage in self.pipeline.having("measure", "refuse", "figures")
        }

    def refuse(self, measures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Set the limits of an exchange's uploads; return the clients that are excluded, and why.

        Args:
            measures: what `measure` returned, by client.
        """
        refused: dict[str, str] = {}
        self._limits = {}
        for stage in self.pipeline.having("refuse"):
            verdicts = stage.call_for(Mapping, "refuse", _of(stage.key, measures))
            for client, verdict in verdicts.items():
                if isinstance(verdict, str):
                    refused[client] = verdict
                else:
                    self._limits.setdefault(client, {})[stage.key] = verdict
        return refused

    def bounded(self, client: str, upload: Message, reference: Callable[[str], Groups]) -> Message:
        """Return an upload within the limits of the exchange.

        Args:
            client: who sent it.
            upload: the decoded upload.
            reference: returns the parameters that a client started the round from, by group.
        """
        if limits := self._limits.get(client):
            start = reference(client)
            for stage in self.pipeline.stages:
                if stage.key in limits:
                    limit = limits[stage.key]
                    upload = stage.call_for(Message, "bounded", client, upload, start, limit)
        return upload

    def weight(self, client: str, upload: Message) -> float:
        """Return a client's weight in the mean.

        Raises:
            MessageError: if a transform refuses it.
        """
        weight = 1.0
        for stage in self.pipeline.having("weight"):
            known = self._known(stage.key, client)
            own = stage.call_for(float, "weight", client, upload, known)
            if not 0 < own < math.inf:
                raise stage.failure("weight", f"returned {own}, which is not positive and finite.")
            weight *= own
        return weight

    def figures(self, measures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Json]]:
        """Yield what is recorded of an exchange's uploads: the client, the metric and its value."""
        for stage in self.pipeline.having("figures"):
            figures = stage.call_for(Mapping, "figures", _of(stage.key, measures))
            for client, metrics in figures.items():
                for name, value in metrics.items():
                    yield client, name, value

    def on_mean(self, mean: Groups, before: Groups) -> Groups:
        """Return what takes the place of a mean. Call it once for a round that counts."""
        for stage in self.pipeline.having("on_mean"):
            after = stage.call("on_mean", mean, before, self.memories[stage.key])
            check_groups(stage, "on_mean", after)
            failing = failure(stage.transform, "on_mean", "returned")
            check_alike(failing, after, shapes_of(mean))
            mean = after
        return mean

    def commit(self, counted: Iterable[str]) -> None:
        """Make final what is remembered, and for each client whose upload counts."""
        self._final = self.memories
        if self.pipeline.active:
            self.links |= {client: self._coming[client] for client in counted}

    def leave(self, client: str) -> None:
        """Forget a client."""
        self.links.pop(client, None)
        for clients in self._joined.values():
            clients.pop(client, None)
        memories = {k: m.state().without(client) for k, m in self._final.items()}
        self._final = {key: Memory.of(state) for key, state in memories.items()}
        self.memories = _copied(self._final)

    def _known(self, stage: str, client: str) -> Any:
        return self._joined.get(stage, {}).get(client)

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
        self.memories = self._final = {key: Memory.of(part) for key, part in own.items()}
        self.links = {
            client: Link({key: Memory.of(p) for key, p in link.parts.items()}, link.groups)
            for client, link in state.parts["clients"].parts.items()
        }


def _divided(
    pipeline: Pipeline, values: Mapping[str, Json]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Divide the values of a download into those of transforms and those of the method."""
    names = {stage.transform.name for stage in pipeline.having("tell")}
    return (
        {name: value for name, value in values.items() if name in names},
        {name: value for name, value in values.items() if name not in names},
    )


def _of(stage: str, measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one transform measured, by client."""
    return {client: measures[client][stage] for client in sorted(measures)}


def _copied(memories: Mapping[str, Memory]) -> Memories:
    return {key: memory.copied() for key, memory in memories.items()}
