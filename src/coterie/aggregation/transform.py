"""Aggregation transforms: what happens to every upload, download or mean, whatever the method.

A transform is data (its settings) and hooks; whatever it must remember is in the `Memory` that the
engine hands to it, saves with the run, and takes back if an upload does not count. The run file
lists transforms under `aggregation.transforms`; they encode in that order and decode in the
reverse one. A complete transform, which sends updates in half precision::

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
"""The phase of a round in which clients train and upload; a transform may add others."""


@dataclass
class Memory:
    """What a transform keeps from one exchange to the next. Replace tensors; do not change them."""

    groups: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors, by group and name."""
    values: dict[str, Json] = field(default_factory=dict)
    """Plain data."""

    def copied(self) -> "Memory":
        """Return a copy that shares tensors."""
        return Memory(dict(self.groups), dict(self.values))

    def state(self) -> State:
        """Return the memory as part of a checkpoint."""
        return State(dict(self.groups), dict(self.values))

    @classmethod
    def of(cls, state: State) -> "Memory":
        """Return a memory from `state()`."""
        return cls(dict(state.groups), dict(state.values))


@dataclass(frozen=True)
class Context:
    """What a hook knows beside its payload."""

    client: str
    """The client at one end; the server is at the other."""
    exchange: int
    """The exchange, 0 for the first."""
    exchanges: int
    """The number of exchanges of the run in which clients train."""
    way: Way
    """`up` or `down`."""
    memory: Memory
    """What this side keeps of this client and way."""
    told: Json = None
    """On a client: what `tell` returned for this download."""
    secrets: Secrets | None = None
    """On a client: what its noise and keys are drawn from."""
    ledger: Ledger | None = None
    """On a client: what it has told of its texts so far."""

    def generator(self, purpose: str, update: Groups) -> torch.Generator:
        """Return a generator that only this client can make, for one update.

        It depends on a secret of the client and on the digest of what it protects: an upload that
        is sent again after a crash has the noise that it had, another upload has fresh noise.
        """
        assert self.secrets is not None, "only clients have secrets"
        return generator(self.secrets.of(self.exchange), purpose, digest_of(update))

    def spend(self, update: Groups, noise: float, releases: int) -> bool:
        """Return whether the client's budget allows a Gaussian release of an update; count it.

        Args:
            update: what is told under noise.
            noise: standard deviation of the noise over the sensitivity.
            releases: number of such releases in the run.
        """
        assert self.ledger is not None, "only clients have a ledger"
        release = self.generator("release", update).initial_seed()
        return self.ledger.spend(f"{release:016x}", noise, releases)


@dataclass(frozen=True)
class TransformFacts:
    """What a transform can know of a run before it begins, to refuse what it cannot do."""

    clients: tuple[str, ...]
    method: str
    schema: Schema
    """What the method may send."""
    exchanges: int


@dataclass(frozen=True)
class Contribution:
    """What one client adds to a round's mean."""

    client: str
    groups: Groups
    weight: float = 1.0


class Transform(BaseModel):
    """Something done to every upload, download or mean, whatever the method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    summary: ClassVar[str]
    """What it does, in one line."""
    reductions: ClassVar[frozenset[Reduce]] = frozenset({"mean"})
    """The reductions of the fields of uploads that it covers; none: it encodes nothing."""
    private: ClassVar[bool] = False
    """Whether it promises privacy: it then refuses a method that uploads floating-point numbers
    which it does not cover."""
    downloads: ClassVar[bool] = False
    """Whether it encodes downloads, too."""
    sealed: ClassVar[bool] = False
    """Whether one upload cannot be decoded alone, as only the mean has a meaning."""
    before: ClassVar[tuple[str, ...]] = ()
    """Phases of a round before training, each with one download and one upload of its own."""
    least: ClassVar[int] = 1
    """The least number of clients whose uploads it can reduce."""

    def covered(self, schema: Schema) -> set[str]:
        """Return the groups of floating-point tensors that the transform encodes."""
        fields = (f for f in schema.up if f.reduce in self.reductions)
        return {f.name for f in fields if f.dtype == "float32"}

    def retyped(self, schema: Schema, dtype: str) -> Schema:
        """Return a schema in which the covered groups have another dtype on the wire."""
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
        """Return what may be sent, with the fields and dtypes that the transform needs."""
        return schema

    def check(self, run: TransformFacts) -> None:
        """Raise CoterieError if the transform cannot be part of a run."""
        if len(run.clients) < self.least:
            raise CoterieError(
                f"The transform {self.name!r} needs at least {self.least} clients, and the run has "
                f"{len(run.clients)}."
            )
        if self.reductions and not self.covered(run.schema):
            raise CoterieError(
                f"The transform {self.name!r} has no effect with the method {run.method!r}, whose "
                "uploads contain nothing that it covers; remove it."
            )
        whole = ("json", "uint8", "int64")
        floats = {
            field.name: field.description for field in run.schema.up if field.dtype not in whole
        }
        open_ = sorted(floats.keys() - self.covered(run.schema))
        if self.private and open_:
            raise CoterieError(
                f"The transform {self.name!r} promises privacy, but the method {run.method!r} also "
                f"uploads {', '.join(f'{name!r} ({floats[name]})' for name in open_)}, which the "
                "transform does not cover; use another method, or remove the transform."
            )

    def described(self) -> dict[str, Any]:
        """Return the transform as a run file would give it."""
        return {"name": self.name, **self.model_dump(mode="json")}

    def budget(self, exchanges: int) -> Budget | None:
        """Return what the uploads of a run spend of a client's privacy budget, if anything."""
        return None

    def encode(self, update: Groups, context: Context) -> Groups:
        """Return what is sent in place of an update.

        Args:
            update: by covered group and name, the difference of each tensor from what the client
                last received under this name, or from zero.
            context: the client, the exchange, the way, and what this side remembers.
        """
        return update

    def decode(self, payload: Groups, context: Context) -> Groups:
        """Return the update in a payload: float32, by the groups and names that it had."""
        return payload

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        """Return what the server tells a client in a download; None: nothing."""
        return None

    def answer(self, phase: str, context: Context) -> Json:
        """Return what a client tells the server in the upload of a phase of the transform's."""
        return None

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        """Note at the server what a client answered in a phase of the transform's.

        Clients are collected in the order of names. A client whose answer raises MessageError does
        not count in the exchange.
        """

    def declare(self, tokens: int) -> Json:
        """Return what a client declares when it joins and with every upload; None: nothing.

        Args:
            tokens: number of the client's training tokens.
        """
        return None

    def join(self, client: str, hello: Message) -> Any:
        """Return whatever the server must know of a client that joins.

        Args:
            client: who joins.
            hello: the client's first message; it has what the client declares.

        Raises:
            MessageError: if the message is wrong; the client then does not join.
        """
        return None

    def measure(self, upload: Message, reference: Groups, joined: Any) -> Any:
        """Return whatever `refuse` and `figures` must know of an upload.

        Args:
            upload: the decoded upload.
            reference: by group, the parameters that the client started the round from.
            joined: what `join` returned for the client.
        """
        return None

    def refuse(self, measures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the clients whose uploads do not count in this exchange as they are.

        Args:
            measures: what `measure` returned for every upload of the exchange, by client.

        Returns:
            By client, a sentence that says why the upload does not count; or anything else that
            `bounded` gets as the upload's limit.
        """
        return {}

    def bounded(self, client: str, upload: Message, reference: Groups, limit: Any) -> Message:
        """Return an upload within the limit that `refuse` has set; called only where it has."""
        return upload

    def weight(self, client: str, upload: Message, joined: Any) -> float:
        """Return the client's weight in the mean; the weights of several transforms multiply.

        Raises:
            MessageError: if the upload must not count.
        """
        return 1.0

    def figures(self, measures: Mapping[str, Any]) -> Mapping[str, Mapping[str, Json]]:
        """Return what is recorded of the exchange's uploads: metrics by client and name."""
        return {}

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> Groups:
        """Return what takes the place of a mean.

        Args:
            mean: the reduced uploads, by group and name.
            before: the server's parameters that the mean replaces.
            memory: what the server remembers.

        Returns:
            Tensors of the names and shapes of the mean.
        """
        return mean


class Reduction(Transform):
    """A transform that makes one of many uploads in place of the weighted mean.

    A run has at most one. Contributions come in the order of names.
    """

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        """Return one tensor for each group and name that a contribution holds.

        Args:
            contributions: the uploads that count.
            clients: everybody who was asked for an upload.
            memory: what the server remembers.
        """
        raise NotImplementedError


def run_hook(
    transform: Transform, hook: str, *args: Any, error: type[CoterieError] = CoterieError
) -> Any:
    """Return what a hook of a transform returns; whatever it raises becomes one sentence."""
    try:
        return getattr(transform, hook)(*args)
    except CoterieError:
        raise
    except Exception as cause:
        raise error(failure(transform, hook, f"raised {type(cause).__name__}: {cause}")) from cause


def failure(transform: Transform, hook: str, what: str) -> str:
    """Return the sentence on what a hook has done wrong."""
    return f"The transform {transform.name!r} failed: {hook} {what}"


def encoded_schema(transform: Transform, schema: Schema) -> Schema:
    """Return what may be sent with a transform, given what may be sent without it."""
    after = run_hook(transform, "schema", schema)
    if not isinstance(after, Schema):
        what = f"returned {type(after).__name__}, not a Schema."
        raise CoterieError(failure(transform, "schema", what))
    return after


def digest_of(groups: Groups) -> str:
    """Return a hash of tensors with their names."""
    return blake2b(Message(0, groups).encode(), digest_size=16).hexdigest()


def mapped(groups: Groups, change: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return groups in which every tensor is replaced."""
    return {g: {n: change(t) for n, t in tensors.items()} for g, tensors in groups.items()}
