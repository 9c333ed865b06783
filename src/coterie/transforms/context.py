"""Arguments of transforms' hooks: state, context, facts about the run, and contributions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from torch import Tensor

from coterie.messages import Groups, Json, Message, Schema, State
from coterie.messages.schema import Way
from coterie.privacy.ledger import Ledger
from coterie.privacy.secrets import Secrets
from coterie.privacy.stream import Stream
from coterie.turn import Turn

Row = dict[str, float]
"""One client's weights of all clients' uploads in a mean, by the clients' names."""
Rows = Mapping[str, Mapping[str, float]]
"""A matrix of weights: each row contains the clients' weights in one mean, by the mean's name.

A method's server passes these weights to `Exchange.means`."""


@dataclass
class Memory:
    """The state of a transform. Hooks may replace tensors, but must not modify tensors in place."""

    groups: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors keyed by group and name."""
    values: dict[str, Json] = field(default_factory=dict)
    """JSON values keyed by name."""

    def copied(self) -> "Memory":
        """Return a shallow copy that shares the tensors with the original."""
        return Memory(dict(self.groups), dict(self.values))

    def state(self) -> State:
        """Return the tensors and values as a `State`, which checkpoints can contain."""
        return State(dict(self.groups), dict(self.values))

    @classmethod
    def of(cls, state: State) -> "Memory":
        """Create a memory from a state returned by `state()`."""
        return cls(dict(state.groups), dict(state.values))


@dataclass(frozen=True)
class Context:
    """The circumstances in which a hook is called."""

    transform: str
    """The name of the transform whose hook is called."""
    client: str
    """The name of the client that sends the upload or receives the download."""
    turn: Turn
    """The numbers of the exchange and the round. Each phase of an exchange has a number of its own,
    `turn.number`, from which the client's secrets are derived."""
    exchanges: int
    """The number of exchanges of the run in which clients train."""
    way: Way
    """The direction of the payload: `up` (client to server) or `down` (server to client)."""
    memory: Memory
    """The transform's state for this client and direction, on the machine that calls the hook."""
    server_value: Json = None
    """The value that `tell` returned for this download; None on the server."""
    secrets: Secrets | None = None
    """The secrets from which the client's noise and keys are derived; None on the server."""
    ledger: Ledger | None = None
    """The ledger of the client's privacy budget; None on the server."""

    def stream(self, purpose: str, update: Groups) -> Stream:
        """Return a stream of secret random numbers for an update.

        Only the client can compute these numbers. They depend on a secret key of the client and on
        the digest of the update. If an upload is repeated after a crash, it therefore has the same
        noise as before. A different upload has new noise.

        Args:
            purpose: A name that distinguishes this stream from other streams for the update.
            update: The tensors to protect, keyed by group and name.
        """
        assert self.secrets is not None, "only clients have secrets"
        key = self.secrets.of(self.turn.number)
        return Stream(key, self.transform, purpose, digest_of(update))

    def spend(self, update: Groups, noise: float, releases: int) -> bool:
        """Spend privacy budget for the release of an update with Gaussian noise.

        If the same update is released again in the same exchange, no further budget is spent.

        Args:
            update: The tensors to release, before noise is added, keyed by group and name.
            noise: Noise multiplier: the noise's standard deviation divided by the sensitivity.
            releases: The number of releases with this noise in the run.

        Returns:
            Whether the client's budget allows the release. If not, no budget is spent.
        """
        assert self.ledger is not None, "only clients have a ledger"
        release = self.stream("release", update).bytes(16).hex()
        return self.ledger.spend(f"{self.transform}:{release}", noise, releases)

    def masks_once(self, nonce: str, update: Groups) -> bool:
        """Record which update the masks hide; return False if they have hidden another one.

        Call this method before an update is masked. The record is permanent, even if the exchange
        is repeated: with the same masks, two uploads would reveal their difference.

        Args:
            nonce: A value from which the masks are derived, and which identifies them.
            update: The tensors to mask, keyed by group and name.
        """
        assert self.ledger is not None, "only clients have a ledger"
        digest = digest_of(update, self.server_value)
        return self.ledger.use(f"{self.transform}:{nonce}", digest)


@dataclass(frozen=True)
class TransformFacts:
    """Facts about a run, which are passed to `Transform.check` before the run starts."""

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
    """One client's upload in the form in which it is passed to the reduction."""

    client: str
    """The name of the client."""
    groups: Groups
    """The tensors to reduce, keyed by group and name."""
    weight: float = 1.0
    """The client's weight in the mean."""


def digest_of(groups: Groups, value: Json = None) -> str:
    """Return a hash of tensors, their names, and a JSON value."""
    return blake2b(Message(0, groups, {"value": value}).encode(), digest_size=32).hexdigest()
