"""Aggregation transforms: changes of every upload, download or mean, independent of the method.

A transform consists of settings and hooks. Its state is in a `Memory`, which the engine passes to
the hooks, saves in checkpoints, and rolls back when an upload does not count. Transforms are listed
under `aggregation.transforms` in the run file. They encode in the order of the list and decode in
reverse order. For example, this complete transform sends updates in half precision::

    class Half(Transform):
        name = "half"
        summary = "updates in float16"

        def schema(self, schema):
            return self.retyped(schema, "float16")

        def encode(self, update, context):
            return mapped(update, torch.Tensor.half)

        def decode(self, payload, context):
            return mapped(payload, torch.Tensor.float)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages import Groups, Json, Message, Schema, State
from coterie.messages.schema import Reduce, Way
from coterie.privacy.ledger import Budget, Ledger
from coterie.privacy.secrets import Secrets
from coterie.seeding import generator

TRAIN = "train"
"""The phase of a round in which clients train and upload. Transforms may add other phases."""


@dataclass
class Memory:
    """The state of a transform. Hooks may replace its tensors but must not modify them in place."""

    groups: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors by group and name."""
    values: dict[str, Json] = field(default_factory=dict)
    """JSON values by name."""

    def copied(self) -> "Memory":
        """Return a shallow copy, which shares the tensors."""
        return Memory(dict(self.groups), dict(self.values))

    def state(self) -> State:
        """Return the memory as a state for checkpoints."""
        return State(dict(self.groups), dict(self.values))

    @classmethod
    def of(cls, state: State) -> "Memory":
        """Return the memory whose state was returned by `state()`."""
        return cls(dict(state.groups), dict(state.values))


@dataclass(frozen=True)
class Context:
    """The circumstances in which a hook is called."""

    client: str
    """The name of the client that sends the upload or receives the download."""
    exchange: int
    """The number of the exchange, from 0."""
    exchanges: int
    """The number of exchanges of the run in which clients train."""
    way: Way
    """The direction of the payload: `up` (client to server) or `down` (server to client)."""
    memory: Memory
    """The transform's state for this client and direction, on this side."""
    server_value: Json = None
    """The value that `tell` returned for this download. Clients only."""
    secrets: Secrets | None = None
    """The secrets from which the client's noise and keys are derived. Clients only."""
    ledger: Ledger | None = None
    """The ledger of the client's privacy budget. Clients only."""

    def generator(self, purpose: str, update: Groups) -> torch.Generator:
        """Return a random generator for one update that only this client can reproduce.

        The seed depends on a secret of the client and on the digest of the update. So an upload
        that is repeated after a crash has the same noise, and a different upload has fresh noise.

        Args:
            purpose: A name that separates this generator from others for the same update.
            update: The tensors to protect, by group and name.
        """
        assert self.secrets is not None, "only clients have secrets"
        return generator(self.secrets.of(self.exchange), purpose, digest_of(update))

    def spend(self, update: Groups, noise: float, releases: int) -> bool:
        """Spend privacy budget for the release of an update with Gaussian noise.

        The release of an identical update in this exchange spends budget only once.

        Args:
            update: The tensors to release, without noise, by group and name.
            noise: Noise multiplier: the standard deviation of the noise over the sensitivity.
            releases: The number of releases with this noise in the run.

        Returns:
            Whether the client's budget allows the release. If not, nothing is spent.
        """
        assert self.ledger is not None, "only clients have a ledger"
        release = self.generator("release", update).initial_seed()
        return self.ledger.spend(f"{release:016x}", noise, releases)


@dataclass(frozen=True)
class TransformFacts:
    """The facts about a run that `Transform.check` gets before the run starts."""

    clients: tuple[str, ...]
    """The names of the clients."""
    method: str
    """The name of the method."""
    schema: Schema
    """The fields that the method may send."""
    exchanges: int
    """The number of exchanges in which clients train."""


@dataclass(frozen=True)
class Contribution:
    """One client's upload as the reduction gets it."""

    client: str
    """The name of the client."""
    groups: Groups
    """The tensors to reduce, by group and name."""
    weight: float = 1.0
    """The client's weight in the mean."""


class Transform(BaseModel):
    """A change of every upload, download or mean, independent of the method.

    Subclasses declare `name` and `summary`, their settings as pydantic fields, and override the
    hooks that they need. An exception in a hook becomes an error that names transform and hook.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """The transform's name in run files."""
    summary: ClassVar[str]
    """A description in one line."""
    reductions: ClassVar[frozenset[Reduce]] = frozenset({"mean"})
    """The reductions whose upload fields the transform encodes. Empty: it encodes nothing."""
    private: ClassVar[bool] = False
    """Whether the transform promises privacy. If so, methods that upload floating-point fields
    which the transform does not encode are refused."""
    downloads: ClassVar[bool] = False
    """Whether the transform also encodes downloads."""
    sealed: ClassVar[bool] = False
    """Whether single uploads cannot be decoded, only their reduction."""
    before: ClassVar[tuple[str, ...]] = ()
    """The names of additional phases before training, each with one download and one upload."""
    least: ClassVar[int] = 1
    """The minimum number of clients."""

    def covered(self, schema: Schema) -> set[str]:
        """Return the names of the groups that the transform encodes."""
        fields = (f for f in schema.up if f.reduce in self.reductions)
        return {f.name for f in fields if f.dtype == "float32"}

    def retyped(self, schema: Schema, dtype: str) -> Schema:
        """Return a schema in which the encoded groups have another dtype on the wire."""
        groups, ways = self.covered(schema), ("up", "down") if self.downloads else ("up",)
        fields = {
            way: tuple(
                replace(field, dtype=dtype) if field.name in groups and not field.peers else field
                for field in getattr(schema, way)
            )
            for way in ways
        }
        return replace(schema, **fields)

    def schema(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, schema: Schema
    ) -> Schema:
        """Return the schema of payloads encoded by the transform, given that of its inputs."""
        return schema

    def check(self, run: TransformFacts) -> None:
        """Check that the transform can be used in a run.

        Raises:
            CoterieError: If it cannot. The message says what to change.
        """
        if len(run.clients) < self.least:
            raise CoterieError(
                f"The transform {self.name!r} needs at least {self.least} clients, and the run has "
                f"{len(run.clients)}."
            )
        if self.reductions and not self.covered(run.schema):
            raise CoterieError(
                f"The transform {self.name!r} has no effect with the method {run.method!r}, whose "
                "uploads contain no field that it encodes; remove it."
            )
        exact = ("json", "uint8", "int64")
        floats = {
            field.name: field.description for field in run.schema.up if field.dtype not in exact
        }
        uncovered = sorted(floats.keys() - self.covered(run.schema))
        if self.private and uncovered:
            raise CoterieError(
                f"The transform {self.name!r} promises privacy, but the method {run.method!r} also "
                f"uploads {', '.join(f'{name!r} ({floats[name]})' for name in uncovered)}, which "
                "the transform does not protect; use another method, or remove the transform."
            )

    def described(self) -> dict[str, Any]:
        """Return the transform as an entry of a run file."""
        return {"name": self.name, **self.model_dump(mode="json")}

    def budget(self, exchanges: int) -> Budget | None:
        """Return the privacy budget that a client spends in a run; None: nothing is spent.

        Args:
            exchanges: The number of exchanges in which clients train.
        """
        return None

    def encode(self, update: Groups, context: Context) -> Groups:
        """Encode an update before it is sent.

        Args:
            update: Float32 tensors by group and name: each tensor minus the tensor of this name
                that the client last received, if any. A sealed transform gets the tensors
                themselves.
            context: The circumstances of the call.

        Returns:
            Tensors by group and name, as `schema` declares them.
        """
        return update

    def decode(self, payload: Groups, context: Context) -> Groups:
        """Decode a received payload.

        Args:
            payload: The tensors that `encode` returned, by group and name.
            context: The circumstances of the call.

        Returns:
            The update: float32 tensors with the groups, names and shapes that `encode` got.

        Raises:
            MessageError: If the payload is invalid. The upload then does not count.
        """
        return payload

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        """Return a value for a client that is sent with the download; None: nothing is sent.

        Runs on the server. The client's hooks get the value as `context.server_value`.

        Args:
            phase: The phase of the round: `train`, or one of the transform's `before`.
            client: The client that receives the download.
            clients: All clients of the exchange.
            memory: The transform's state on the server.
        """
        return None

    def answer(self, phase: str, context: Context) -> Json:
        """Return a client's upload in one of the phases in `before`.

        Runs on the client. The server passes the value to `collect`.
        """
        return None

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        """Process on the server a client's upload in one of the phases in `before`.

        Called once per client, in the order of names.

        Args:
            phase: The phase of the round.
            client: The client that sent the upload.
            answer: The value that `answer` returned on the client.
            memory: The transform's state on the server.

        Raises:
            MessageError: If the answer is invalid. The client is then excluded from the exchange.
        """

    def declare(self, tokens: int) -> Json:
        """Return a value to send when the client joins and with each upload; None: nothing.

        Runs on the client.

        Args:
            tokens: The number of the client's training tokens.
        """
        return None

    def join(self, client: str, hello: Message) -> Any:
        """Return what the transform needs to know about a joining client.

        The result is passed to `measure` and `weight`. It is not saved: after a restart, the
        server calls `join` again with the saved message.

        Args:
            client: The client's name.
            hello: The client's first message, which contains the value that it declared.

        Raises:
            MessageError: If the message is invalid. The client then does not join.
        """
        return None

    def measure(self, upload: Message, reference: Groups, joined: Any) -> Any:
        """Return what `refuse` and `figures` need to know about an upload.

        Args:
            upload: The decoded upload.
            reference: The parameters with which the client started the round, by group and name.
            joined: The value that `join` returned for the client.
        """
        return None

    def refuse(self, measures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Determine which uploads of an exchange are excluded or limited.

        Args:
            measures: The value that `measure` returned for each upload, by client.

        Returns:
            Decisions by client. A string excludes the upload and gives the reason. Any other value
            is passed to `bounded` as the upload's limit. Other uploads count unchanged.
        """
        return {}

    def bounded(self, client: str, upload: Message, reference: Groups, limit: Any) -> Message:
        """Return an upload changed to comply with the limit that `refuse` returned for it."""
        return upload

    def weight(self, client: str, upload: Message, joined: Any) -> float:
        """Return the client's weight in the mean: positive and finite.

        The weights of several transforms are multiplied.

        Raises:
            MessageError: If the upload is invalid. It then does not count.
        """
        return 1.0

    def figures(self, measures: Mapping[str, Any]) -> Mapping[str, Mapping[str, Json]]:
        """Return metrics to record for an exchange's uploads, by client and metric name.

        Args:
            measures: The value that `measure` returned for each upload, by client.
        """
        return {}

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> Groups:
        """Return tensors that replace the mean, with its groups, names and shapes.

        Args:
            mean: The reduced uploads, by group and name.
            before: The server's parameters that the mean will replace, by group and name.
            memory: The transform's state on the server.
        """
        return mean


class Reduction(Transform):
    """A transform that reduces uploads in place of the weighted mean. A run has at most one."""

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        """Reduce uploads to one tensor for each group and name in any contribution.

        Args:
            contributions: The uploads that count, in the order of client names.
            clients: All clients of the exchange, whether or not their uploads count.
            memory: The transform's state on the server.
        """
        raise NotImplementedError


def digest_of(groups: Groups) -> str:
    """Return a hash of tensors and their names."""
    return blake2b(Message(0, groups).encode(), digest_size=16).hexdigest()


def mapped(groups: Groups, change: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return groups with a function applied to every tensor."""
    return {g: {n: change(t) for n, t in tensors.items()} for g, tensors in groups.items()}
