"""CoBo (arXiv 2409.05539): clients are drawn towards the clients whose gradients agree with theirs.

Every client i has an adapter x_i of its own. Clients minimise

    sum_i f_i(x_i) + rho / 2 sum_{i<j} w_ij ||x_i - x_j||^2,

where f_i is the loss of client i, and w_ij maximises `w_ij <grad f_i(z), grad f_j(z)>` at the
midpoint z = (x_i + x_j) / 2. In each round, some pairs of clients compute gradients at their
midpoint. The server takes a step on the weights of these pairs (algorithm 1):

    w_ij <- P(w_ij + gamma <grad f_i(z), grad f_j(z)>).

P projects a client's weights onto a simplex, as in the paper's experiment on language models
(section 4.3), or each weight onto [0, 1]. The server sends every client i the mean m_i of the other
adapters, weighted by w_ij. After each step of the optimiser with learning rate eta, the client
computes, as in the authors' code for language models,

    x_i <- x_i - eta rho sum_j w_ij (x_i - x_j) = x_i - eta rho (sum_j w_ij) (x_i - m_i),

where x_i is the adapter after the step, and x_j was uploaded in the exchange before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.adapters import trained
from coterie.bases.precision import autocast
from coterie.data.windows import sample_batch
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Message, MessageError, Schema, Shapes, Tensors, check_shapes
from coterie.messages.host import copied_to_host
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient, AdapterServer, Shared
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.tensors import closest, copied, copy, shapes_of
from coterie.methods.value import PerClient
from coterie.privacy.ledger import Budget
from coterie.seeding import generator
from coterie.training.passes import training_pass
from coterie.training.schedule import Level
from coterie.transforms.context import Row
from coterie.turn import Turn


class CoBo(FedIT):
    """CoBo: each client's LoRA pairs stay near the pairs of clients whose gradients agree.

    The default settings come from the experiment on language models in the authors' code.
    """

    name: ClassVar[str] = "cobo"
    paper: ClassVar[str] = "arXiv 2409.05539"
    summary: ClassVar[str] = "LoRA pairs stay near the pairs of clients with agreeing gradients"
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"

    proximity: float = Field(default=0.5, ge=0)
    """strength of the pull of clients towards one another (rho)"""
    weight_step: float = Field(default=0.05, gt=0)
    """step size of clients' weights (gamma) per local step; a round's step is multiplied by
    training.steps"""
    pair_share: float = Field(default=1.0, gt=0, le=1)
    """probability that a pair of clients updates its weight in a round"""
    domain: Literal["simplex", "box"] = "simplex"
    """values of a client's weights; simplex: the weights sum to 1, including the client's own,
    which begins at 0; box: each weight is between 0 and 1, and begins at 1"""

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf, 1.0, "gradients of batches of this client's training samples")

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        inherited = super().schema()
        adapter = replace(inherited.up[0], reduce="each")
        gradients = MessageField(
            "gradients",
            "gradients at the midpoints with some other clients",
            copies=lambda _, clients: clients - 1,
        )
        mean = MessageField(
            "mean", "weighted mean of the other clients' adapters", of=("adapter", "gradients")
        )
        weights = MessageField(
            "weights", "weights of the other clients in the mean", "json", of=("gradients",)
        )
        down = (mean, weights, replace(adapter, peers=True))
        return Schema(inherited.hello, (adapter, gradients), down)

    def levels(self, client: AdapterClient) -> list[Level]:
        assert isinstance(client, CoBoClient), "only CoBoClient has the peers' mean"
        [level] = super().levels(client)
        return [replace(level, pull=lambda: (self.proximity * client.weight, client.mean))]

    def client(self, context: ClientContext) -> "CoBoClient":
        return CoBoClient(self, context)

    def server(self, context: ServerContext) -> "CoBoServer":
        return CoBoServer(self, context)


class CoBoClient(AdapterClient[CoBo]):
    """A client that computes gradients at midpoints, and trains near the mean of its peers."""

    def receive(self, download: Message) -> None:
        weights, shapes = download.values.get("weights"), shapes_of(self.shared)
        if not isinstance(weights, dict) or not all(
            type(weight) is float and weight >= 0 for weight in weights.values()
        ):
            raise MessageError("The download has no valid weights of the other clients.")
        check_shapes(download["mean"], shapes if sum(weights.values()) else {})
        for peer in download.peers:
            check_shapes(download.from_peer(peer)["adapter"], shapes)
        self.mean = {n: t.to(self.shared[n].device) for n, t in download["mean"].items()}
        self.weight = sum(weights.values())
        self.peers = {peer: download.from_peer(peer)["adapter"] for peer in download.peers}
        self.context.log(TRUST, weights)

    def train(self, turn: Turn) -> None:
        own = copied(self.shared)
        self.gradients: dict[ClientId, Tensor] = {}
        for peer, other in self.peers.items():
            midpoint = {n: (x + other[n].to(x.device)) / 2 for n, x in own.items()}
            copy(midpoint, self.shared)
            self.gradients[peer] = self._gradient(peer, turn.exchange)
        copy(own, self.shared)
        super().train(turn)

    def _gradient(self, peer: ClientId, exchange: int) -> Tensor:
        """Return the gradient of the loss on a batch of training text, flattened.

        Args:
            peer: The other client of the pair at whose midpoint the gradient is computed. Its name
                also seeds the batch.
            exchange: The number of the exchange.
        """
        context, base, model = self.context, self.context.base, self.model()
        purpose = ("midpoint", peer, exchange)
        chance = generator(context.seed, "batch", context.name, *purpose)
        data, size = context.data.train, context.training.batch
        batch = sample_batch(data, size, context.window, chance).by_length()
        self.adapter.require_grad(trained)
        tensors = list(self.shared.values())
        total = torch.zeros(sum(tensor.numel() for tensor in tensors))
        for number, part in enumerate(batch.split(context.training.at_once)):
            with (
                training_pass(context, *purpose, number),
                autocast(base.precision, base.device.type),
            ):
                loss, _ = part.to(base.device).loss(model)
            gradients = torch.autograd.grad(loss * (part.terms / batch.terms), tensors)
            total += torch.cat([g.flatten() for g in copied_to_host(gradients)])
        return total

    def upload(self, turn: Turn) -> Message:
        message = super().upload(turn)
        return replace(message, groups={**message.groups, "gradients": self.gradients})


@dataclass(frozen=True, eq=False)
class Known(Shared):
    """The clients' latest adapters and weights."""

    uploads: PerClient[Tensors] = PerClient()
    """The latest adapter of each client that has uploaded one."""
    weights: PerClient[PerClient[float]] = PerClient()
    """The weights w_ij of each client whose weights have been updated. A client j that has joined
    since has the initial weight."""


class CoBoServer(AdapterServer[CoBo, Known]):
    """A server that learns which clients help one another, and averages adapters accordingly."""

    def initial(self) -> Known:
        return Known(self.start)

    def row(self, value: Known, client: ClientId) -> Row:
        """Return a client's weights, including its own.

        The client's own weight has no effect on its loss, but takes part in the projection.

        Args:
            value: The current value.
            client: The client's name.

        Returns:
            The weight of every client that has joined, in the order of the names.
        """
        simplex, others = self.method.domain == "simplex", len(value.held) - 1
        initial = 1 / max(others, 1) if simplex else 1.0
        start = {other: initial if other != client else 0.0 for other in sorted(value.held)}
        changed = value.weights.get(client, {})
        return {other: changed.get(other, weight) for other, weight in start.items()}

    def partners(self, client: ClientId, exchange: Exchange) -> list[ClientId]:
        """Return the clients with which a client computes gradients in an exchange."""

        def drawn(other: ClientId) -> bool:
            pair = sorted((client, other))
            chance = generator(self.context.seed, "pair", exchange.turn.exchange, *pair)
            return bool(torch.rand((), generator=chance) < self.method.pair_share)

        members = exchange.clients if client in exchange.clients else ()
        return [other for other in members if other != client and drawn(other)]

    def download(self, value: Known, client: ClientId, exchange: Exchange) -> Message:
        row = self.row(value, client)
        weights = {j: w for j, w in row.items() if j != client and j in value.uploads}
        mean: dict[str, Tensor] = {}
        if total := sum(weights.values()):
            for j, w in weights.items():
                for name, tensor in value.uploads[j].items():
                    part = w / total * tensor
                    mean[name] = mean[name] + part if name in mean else part
        # A client that has not uploaded yet has the initial values.
        partners = self.partners(client, exchange)
        peers = {j: {"adapter": value.uploads.get(j, self.start)} for j in partners}
        return Message(exchange.turn.exchange, {"mean": mean}, {"weights": weights}, peers)

    def expects(self, value: Known, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        size = sum(tensor.numel() for tensor in self.start.values())
        gradients = dict.fromkeys(self.partners(client, exchange), (size,))
        return {"adapter": shapes_of(self.start), "gradients": gradients}

    def reference(
        self, value: Known, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        # A client that has lost its state begins with the initial values.
        last = value.uploads.get(client, self.start)
        return {"adapter": closest(upload["adapter"], last, self.start)}

    def aggregate(self, value: Known, exchange: Exchange) -> Known:
        gradients, weights = exchange.each("gradients"), dict(value.weights)
        products: dict[ClientId, dict[ClientId, float]] = {client: {} for client in gradients}
        for i, own in gradients.items():
            for j in [j for j in own if i < j and j in gradients]:
                product = torch.dot(own[j].double(), gradients[j][i].double()).item()
                products[i][j] = products[j][i] = product
        for i, of_partners in products.items():
            if of_partners:
                step = self.method.weight_step * self.context.training.steps
                row = self.row(value, i)
                for j, product in of_partners.items():
                    row[j] += step * product
                weights[i] = PerClient(self._projected(row))
        uploads = value.uploads | exchange.each("adapter")
        return replace(value, weights=PerClient(weights), uploads=uploads)

    def _projected(self, row: Mapping[ClientId, float]) -> Row:
        """Return the nearest valid weights of a client."""
        weights = torch.tensor(list(row.values()), dtype=torch.float64)
        if self.method.domain == "simplex":
            weights -= weights.max()  # a shift changes only the rounding of the projection
            descending = weights.sort(descending=True).values
            counts = torch.arange(1, len(weights) + 1)
            excess = (descending.cumsum(0) - 1) / counts
            weights = weights - excess[descending > excess][-1]
        return dict(zip(row, weights.clamp(0, 1).tolist(), strict=True))
