"""FedLEASE (arXiv 2509.15087): one expert for each cluster of clients, and adaptive routing.

For some rounds, every client trains alone: a LoRA pair on each chosen layer, from initial values
that are equal for all clients. The server then clusters the clients by the cosine distances between
their factors B. The mean of a cluster's LoRA pairs is the initial value of the cluster's expert.
From then on, every client holds all experts, and trains only its cluster's expert and its router.
The server averages both within the cluster. adapters/lease.py describes the routing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from coterie.adapters import LeaseAdapter, Parameter
from coterie.adapters.layout import Layout
from coterie.bases.sites import QUERY_VALUE
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import (
    Groups,
    Message,
    MessageError,
    Schema,
    Shapes,
    State,
    Tensors,
    check_shapes,
)
from coterie.methods.clusters import clusters, cosine_distances
from coterie.methods.contract import ClientContext, ClientId, Method, ServerContext
from coterie.methods.settings import Attention, LoraAlpha
from coterie.methods.sides import ClientSide, Server
from coterie.methods.tensors import copied, copy, log_routing, shapes_of
from coterie.methods.value import PerClient, Value
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate
from coterie.turn import Turn


class FedLease(Method):
    """FedLEASE: clusters of clients share an expert, and clients use all experts."""

    name: ClassVar[str] = "fedlease"
    paper: ClassVar[str] = "arXiv 2509.15087"
    summary: ClassVar[str] = "one expert per cluster of clients; each client routes to all experts"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    learns_preferences: ClassVar[bool] = True

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: LoraAlpha = LoraAlpha()
    warmup: int = Field(default=5, ge=1)
    """rounds in which clients train alone, before the server clusters them"""
    max_clusters: int = Field(default=4, ge=1)
    """maximum number of clusters (M_max); 1 puts all clients in one cluster. With three or more
    clients, other values give at least 2"""

    def shared(self, parameter: Parameter) -> bool:
        return True

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = MessageField(
            "adapter",
            "LoRA pairs and router of the client's cluster",
            copies=lambda parameter, clients: self._copies(parameter, 1, clients),
        )
        adapter = replace(
            own,
            description="LoRA pairs of all experts; router of the cluster",
            copies=lambda p, n: self._copies(p, min(self.max_clusters, n), n),
        )
        experts = MessageField("experts", "number of experts", "json", of=("adapter",))
        number = MessageField("own", "number of the client's expert", "json", of=("adapter",))
        own = replace(own, when=f"every exchange, from round {self.warmup} on")
        up = (replace(own, reduce="rows"), replace(own, reduce="each"))
        later = f"every exchange, from round {self.warmup + 1} on"
        down = tuple(replace(field, when=later) for field in (adapter, experts, number))
        return Schema(up=up, down=down)

    def _copies(self, parameter: Parameter, experts: int, clients: int) -> int:
        """Count the tensors with a parameter's shape that some experts and a router fill."""
        slots = 2 * min(self.max_clusters, clients) - 1
        # A router has one row for each slot. The row is as wide as A, which has `rank` rows.
        rows = math.ceil(slots / self.attention.rank) if parameter.factor == "A" else 0
        return experts + rows

    def adapter(self, base: nn.Module, seed: int, experts: int, own: int) -> LeaseAdapter:
        """Create an adapter.

        Args:
            base: The base; it may have no weights (meta tensors).
            seed: The run's seed.
            experts: The number of experts (M).
            own: The number of the client's own expert.
        """
        layout = Layout(
            generalists=experts,
            specialists=0,
            rank=self.attention.rank,
            attention_rank=0,
            targets=self.attention.targets,
            alpha=self.lora.alpha,
            scale="rank",
            top_k=experts,
            dropout=self.lora.dropout,
        )
        return LeaseAdapter(base, layout, seed, own)

    def client(self, context: ClientContext) -> "FedLeaseClient":
        return FedLeaseClient(self, context)

    def server(self, context: ServerContext) -> "FedLeaseServer":
        return FedLeaseServer(self, context)


class FedLeaseClient(ClientSide):
    """A client that trains its own expert and its router.

    The optimiser is reset in every round, as in the code that the authors of FedLEASE released.
    """

    def __init__(self, method: FedLease, context: ClientContext) -> None:
        self.method, self.context = method, context
        self.adapter = self._adapter(1, 0)

    def _adapter(self, experts: int, own: int) -> LeaseAdapter:
        return self.method.adapter(self.context.base.model, self.context.seed, experts, own)

    def receive(self, download: Message) -> None:
        if not download.groups:  # the server has not yet assigned the client to a cluster
            return
        experts, own = download.values.get("experts"), download.values.get("own")
        if type(experts) is not int or not 1 <= experts <= self.method.max_clusters:
            raise MessageError("The download has no valid number of experts.")
        if type(own) is not int or not 0 <= own < experts:
            raise MessageError("The download has no valid index of the client's expert.")
        adapter = self._adapter(experts, own)
        check_shapes(download["adapter"], shapes_of(adapter.tensors()))
        copy(download["adapter"], adapter.tensors())
        self.adapter = adapter

    def train(self, turn: Turn) -> None:
        context, own = self.context, self.adapter.own
        rate = learning_rate(context.training, context.rounds)
        level = Level("joint", lambda p: p.expert in (None, own), "train", rate)
        LocalTraining(context, self.adapter, [level]).run(turn.exchange)
        log_routing(context, self.adapter.routing())

    def upload(self, turn: Turn) -> Message:
        if turn.exchange + 1 < self.method.warmup:
            return Message(turn.exchange)
        return Message(turn.exchange, {"adapter": copied(own_tensors(self.adapter))})

    def model(self) -> PreTrainedModel:
        return self.adapter.attach(self.context.base.model)

    def parameters(self) -> Mapping[str, Parameter]:
        return self.adapter.parameters()

    def state(self) -> State:
        values = {"experts": self.adapter.layout.experts, "own": self.adapter.own}
        return State({"adapter": copied(self.adapter.tensors())}, values)

    def restore(self, state: State) -> None:
        self.adapter = self._adapter(state.values["experts"], state.values["own"])
        copy(state["adapter"], self.adapter.tensors())


@dataclass(frozen=True, eq=False)
class Clustered(Value):
    """The clusters of the clients."""

    cluster: PerClient[int] = PerClient()
    """The number of each client's cluster, which is also the number of its expert."""
    values: tuple[Tensors, ...] = ()
    """The expert and the router of each cluster; empty until the clients are clustered.

    The routers' tensors have the same names in all clusters.
    """


class FedLeaseServer(Server[Clustered]):
    """A server that clusters the clients, and averages experts and routers within the clusters."""

    def __init__(self, method: FedLease, context: ServerContext) -> None:
        self.method, self.context = method, context

    def _adapter(self, experts: int, own: int) -> LeaseAdapter:
        return self.method.adapter(self.context.base, self.context.seed, experts, own)

    def initial(self) -> Clustered:
        return Clustered()

    def download(self, value: Clustered, client: ClientId, exchange: Exchange) -> Message:
        number = exchange.turn.exchange
        if client not in value.cluster:
            return Message(number)
        own, tensors = value.cluster[client], {}
        for values in (*value.values, value.values[own]):  # the last router is the cluster's own
            tensors |= values
        facts = {"experts": len(value.values), "own": own}
        return Message(number, {"adapter": tensors}, facts)

    def expects(
        self, value: Clustered, client: ClientId, exchange: Exchange
    ) -> Mapping[str, Shapes]:
        if exchange.turn.exchange + 1 < self.method.warmup:
            return {}
        if client in value.cluster:
            return {"adapter": shapes_of(value.values[value.cluster[client]])}
        return {"adapter": shapes_of(own_tensors(self._adapter(1, 0)))}

    def reference(
        self, value: Clustered, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        if client in value.cluster:
            return super().reference(value, client, upload, exchange)
        return {"adapter": own_tensors(self._adapter(1, 0))}  # a client trains alone from these

    def aggregate(self, value: Clustered, exchange: Exchange) -> Clustered:
        uploads = exchange.each("adapter")
        alone = uploads.only(uploads.keys() - value.cluster.keys())
        joining = self._assigned(value, alone) if alone else {}
        # The first values of experts are means over clients that have trained alone. Clients that
        # join a cluster later begin with the cluster's values.
        cluster = value.cluster if value.values else joining
        rows = {
            cluster_name(number): dict.fromkeys((c for c in cluster if cluster[c] == number), 1.0)
            for number in sorted({*cluster.values()})
        }
        means = exchange.means("adapter", rows)
        if not value.values and joining:
            values = self._first_values(max(joining.values()) + 1, means)
        else:
            old = enumerate(value.values)
            values = tuple({**tensors, **means.get(cluster_name(n), {})} for n, tensors in old)
        return Clustered(value.cluster | joining, values)

    def _assigned(self, value: Clustered, alone: PerClient[Tensors]) -> dict[ClientId, int]:
        """Assign clients that have trained alone to clusters, by the distances between their B."""
        names, parameters = sorted(alone), self._adapter(1, 0).parameters()
        uploads = alone.mapped(lambda tensors: factors(parameters, tensors, 0)).values()
        if not value.values:
            distances = cosine_distances(uploads, uploads)
            return dict(zip(names, clusters(distances, self.method.max_clusters), strict=True))
        all_parameters = self._adapter(len(value.values), 0).parameters()
        experts = [factors(all_parameters, values, n) for n, values in enumerate(value.values)]
        nearest = cosine_distances(uploads, experts).argmin(1)
        return dict(zip(names, nearest.tolist(), strict=True))

    def _first_values(self, count: int, means: Mapping[str, Tensors]) -> tuple[Tensors, ...]:
        """Return the expert and the router of each cluster after the clients' training alone."""
        single = self._adapter(1, 0).parameters()
        pairs = {(p.path, p.factor): name for name, p in single.items()}
        first: list[Tensors] = []
        for number in range(count):
            mean, adapter = means.get(cluster_name(number), {}), self._adapter(count, number)
            # The router is in no pair, and keeps its initial values.
            names = {n: pairs.get((p.path, p.factor), "") for n, p in adapter.parameters().items()}
            first.append({n: mean.get(names[n], t) for n, t in own_tensors(adapter).items()})
        return tuple(first)


def cluster_name(number: int) -> str:
    """Return the name of a cluster's mean, which cannot be the name of a client."""
    return f"cluster {number}"


def own_tensors(adapter: LeaseAdapter) -> dict[str, Tensor]:
    """Return detached views of the tensors that a client trains: its expert and its router."""
    parameters = adapter.parameters().items()
    return {n: p.tensor.detach() for n, p in parameters if p.expert in (None, adapter.own)}


def factors(parameters: Mapping[str, Parameter], tensors: Tensors, expert: int) -> Tensors:
    """Return the factors B of an expert, by the path of the layer.

    Args:
        parameters: The parameters that describe the tensors, by name.
        tensors: Tensors of the expert, and possibly others, by name.
        expert: The number of the expert.
    """
    described = ((parameters[name], tensor) for name, tensor in tensors.items())
    return {p.path: tensor for p, tensor in described if (p.factor, p.expert) == ("B", expert)}
