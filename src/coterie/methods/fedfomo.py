"""FedFomo (arXiv 2012.08565): each client moves towards the models that lower its loss.

In each round, client i receives the adapters of up to M other clients and compares them with its
own parameters p from before its last training. For these adapters and for its own adapter after
that training, all denoted by x_n, it computes

    s_n = (L_i(p) - L_i(x_n)) / ||x_n - p||,    w_n = max(s_n, 0) / sum_k max(s_k, 0),

where L_i is the loss on the client's validation text. The client continues from

    p + sum_n w_n (x_n - p)

and trains. If no adapter has a lower loss, it continues from p. With `baseline: after`, p are the
parameters after the client's last training.

The server sends the adapters of the clients with the highest affinities. A client's affinity for
client n is the sum of all s_n / sum_k |s_k| that the client has sent. With a probability that
decreases from round to round, an adapter of a random client is sent instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from coterie.evaluation.evaluate import mean_loss
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Message, MessageError, Schema, Tensors, check_shapes
from coterie.messages.host import on_host
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, Shared
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.methods.tensors import closest, copied, copy, shapes_of
from coterie.methods.value import PerClient
from coterie.privacy.ledger import Budget
from coterie.seeding import generator
from coterie.training.probe import probe_batch
from coterie.transforms.context import Row
from coterie.turn import Turn


class FedFomo(AdapterMethod):
    """FedFomo: each client combines the adapters that have a lower loss on its validation text."""

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "arXiv 2012.08565"
    summary: ClassVar[str] = "adapters sent to some clients, which move towards those that help"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    peers: int = Field(default=5, ge=1)
    """maximum number of other clients whose adapters a client receives in a round (M)"""
    samples: int = Field(default=64, ge=1)
    """number of validation samples on which a client compares adapters"""
    baseline: Literal["before", "after"] = "before"
    """own parameters with which a client compares adapters: before or after its last training"""
    epsilon: float = Field(default=0.3, ge=0, le=1)
    """probability that the server sends the adapter of a random client"""
    decay: float = Field(default=0.05, ge=0)
    """decrease of epsilon per round"""

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf, 1.0, "scores that depend on this client's validation samples")

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        inherited = super().schema()
        adapter = replace(inherited.up[0], reduce="each")
        scores = MessageField("scores", "how much other clients' adapters help", "json")
        down = replace(adapter, peers=True, copies=lambda _, n: min(self.peers, n - 1))
        return Schema(inherited.hello, (adapter, scores), (down,))

    def client(self, context: ClientContext) -> "FedFomoClient":
        return FedFomoClient(self, context)

    def server(self, context: ServerContext) -> "FedFomoServer":
        return FedFomoServer(self, context)


class FedFomoClient(AdapterClient[FedFomo]):
    """A client that combines other clients' adapters with its own before it trains."""

    def __init__(self, method: FedFomo, context: ClientContext) -> None:
        super().__init__(method, context)
        self.buffers["before"] = copied(self.shared)  # values before the last training
        self.judging = probe_batch(context.data.validation, context.window, method.samples)
        self.scores: Row = {}
        """s_n / sum_k |s_k| for each other client whose adapter was in the last download."""

    def receive(self, download: Message) -> None:
        peers = {peer: download.from_peer(peer)["adapter"] for peer in download.peers}
        for tensors in peers.values():
            check_shapes(tensors, shapes_of(self.shared))
        self.scores = {}
        if peers:
            name = self.context.name
            self._combine(dict(sorted({**peers, name: on_host(copied(self.shared))}.items())))

    def _combine(self, adapters: Mapping[ClientId, Tensors]) -> None:
        """Set the shared parameters to the combination of adapters, which include the client's."""
        before = self.method.baseline == "before"
        start = on_host(self.buffers["before"]) if before else adapters[self.context.name]
        loss, scores = self._loss(start), dict[ClientId, float]()
        for name, tensors in adapters.items():
            squares = [(t.double() - start[n].double()).square().sum() for n, t in tensors.items()]
            distance = math.sqrt(sum(square.item() for square in squares))
            gain = loss - self._loss(tensors) if distance else 0.0
            scores[name] = gain / distance if distance and math.isfinite(gain) else 0.0
        total = sum(abs(score) for score in scores.values()) or 1.0
        gains = {name: max(score, 0.0) for name, score in scores.items()}
        row = {name: gain / (sum(gains.values()) or 1.0) for name, gain in gains.items()}
        combined = {
            n: t + sum(weight * (adapters[name][n] - t) for name, weight in row.items() if weight)
            for n, t in start.items()
        }
        copy(combined, self.shared)
        others = scores.keys() - {self.context.name}
        self.scores = {name: scores[name] / total for name in sorted(others)}
        self.context.log(TRUST, row)

    def _loss(self, tensors: Tensors) -> float:
        """Return the loss on the validation samples, after setting the shared parameters."""
        copy(tensors, self.shared)
        context = self.context
        return mean_loss(context.base, self.model(), self.judging, context.training.at_once)

    def train(self, turn: Turn) -> None:
        copy(self.shared, self.buffers["before"])
        super().train(turn)

    def upload(self, turn: Turn) -> Message:
        return replace(super().upload(turn), values={"scores": self.scores})


@dataclass(frozen=True, eq=False)
class Known(Shared):
    """The clients' latest adapters, and their affinities for one another."""

    uploads: PerClient[Tensors] = PerClient()
    """The latest adapter of each client that has uploaded one."""
    affinities: PerClient[PerClient[float]] = PerClient()
    """The sums of all scores that each client has sent, by the client that they are about."""


class FedFomoServer(AdapterServer[FedFomo, Known]):
    """A server that sends each client the adapters of clients that have helped it."""

    needs_all: ClassVar[bool] = True

    def initial(self) -> Known:
        return Known(self.start)

    def peers(self, value: Known, client: ClientId, exchange: Exchange) -> list[ClientId]:
        """Return the clients whose adapters a client receives in an exchange."""
        number, chosen = exchange.turn.exchange, list[ClientId]()
        epsilon = self.method.epsilon - number * self.method.decay
        chance = generator(self.context.seed, "peers", client, number)
        others = sorted(value.uploads.keys() - {client})
        left = [others[place] for place in torch.randperm(len(others), generator=chance).tolist()]
        affinities = value.affinities.get(client, {})
        for explores in torch.rand(self.method.peers, generator=chance) < epsilon:
            if left:
                # The first of equal clients is a random one, because the order is random.
                best = max(left, key=lambda other: affinities.get(other, 0.0))
                chosen.append(left.pop(-1 if explores else left.index(best)))
        return chosen

    def download(self, value: Known, client: ClientId, exchange: Exchange) -> Message:
        of_peers = value.uploads.only(self.peers(value, client, exchange))
        peers = of_peers.mapped(lambda tensors: {"adapter": tensors})
        return Message(exchange.turn.exchange, peers=peers)

    def check(self, value: Known, client: ClientId, upload: Message, exchange: Exchange) -> None:
        super().check(value, client, upload, exchange)
        scores = upload.values.get("scores")
        if not isinstance(scores, dict) or not all(
            type(score) is float and -1 <= score <= 1 for score in scores.values()
        ):
            raise MessageError(f"The client {client!r} sent no valid scores of other clients.")

    def reference(
        self, value: Known, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        # The server does not know the client's combination, so it uses the nearest known adapter.
        nearest = self.start
        for name in [client, *self.peers(value, client, exchange)]:
            nearest = closest(upload["adapter"], nearest, value.uploads.get(name, self.start))
        return {"adapter": nearest}

    def aggregate(self, value: Known, exchange: Exchange) -> Known:
        affinities = dict(value.affinities)
        for client, scores in exchange.each("scores").items():
            old = affinities.get(client, {})
            new = {n: old.get(n, 0.0) + score for n, score in scores.items() if n in value.held}
            affinities[client] = PerClient({**old, **new})
        uploads = value.uploads | exchange.each("adapter")
        return replace(value, uploads=uploads, affinities=PerClient(affinities))
