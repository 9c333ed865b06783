"""Clusters of clients by the losses of the clusters' models: IFCA and CLoVE.

The server has K models, and averages each model over the clients of its cluster. In IFCA (arXiv
2006.04088), a client receives all K models, joins the cluster whose model has the lowest loss on
its text, and trains this model.

In CLoVE (arXiv 2506.22427), clients send the vectors of their K losses, and the server clusters the
clients by these vectors. It then assigns the clusters to models such that the sum of all clients'
losses is the lowest. Therefore, a round takes two exchanges: in the first one, clients send their
losses, and in the second one, they receive and train the model of their cluster.

At the start of a run, all LoRA pairs have B = 0, so the K models are equal, and the clients' first
clusters are random.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from typing_extensions import TypeIs

from coterie.evaluation.evaluate import mean_loss
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Message, MessageError, Schema, Shapes, Tensors, check_shapes
from coterie.messages.message import Json
from coterie.messages.names import CLUSTER
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, Shared
from coterie.methods.clusters import silhouette
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.methods.tensors import copy, shapes_of
from coterie.methods.value import PerClient
from coterie.privacy.ledger import Budget
from coterie.seeding import generator
from coterie.training.probe import probe_batch
from coterie.turn import Turn

LARGEST_LOSS = 1e6
"""The limit of a loss; the loss of a model that gives no finite loss has this value."""
Losses = Mapping[ClientId, list[float]]
"""A mapping from clients to their losses, one for each model."""


class IFCA(AdapterMethod):
    """IFCA: each client trains, with its cluster, the model that has the lowest loss."""

    name: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "arXiv 2006.04088"
    summary: ClassVar[str] = "averaged within clusters; each client joins that of the lowest loss"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    exchanges_per_round: ClassVar[int] = 1

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    clusters: int = Field(default=2, ge=1)
    """number of clusters (K)"""
    samples: int = Field(default=64, ge=1)
    """number of samples on which a client computes the losses of the clusters' models"""
    text: Literal["validation", "train"] = "validation"
    """text of these samples; train: training text, as in the paper"""

    @property
    def groups(self) -> list[str]:
        """The groups of a download that contain the clusters' models."""
        return [f"cluster-{number}" for number in range(self.clusters)]

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf, 1.0, f"a choice that depends on this client's {self.text} samples")

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        inherited = super().schema()
        adapter = replace(inherited.up[0], reduce="rows")
        models = tuple(replace(adapter, name=name, of=("adapter",)) for name in self.groups)
        return Schema(inherited.hello, (adapter, self._chosen()), models)

    def _chosen(self) -> MessageField:
        return MessageField("cluster", "number of the client's cluster", "json")

    def measures(self, exchange: int) -> bool:
        """Return whether clients receive all models, and compute their losses, in an exchange."""
        return exchange % self.exchanges_per_round == 0

    def trains(self, exchange: int) -> bool:
        """Return whether clients train in an exchange."""
        return (exchange + 1) % self.exchanges_per_round == 0

    def exchanges(self, rounds: int) -> int:
        return rounds * self.exchanges_per_round

    def client(self, context: ClientContext) -> "ClusterClient":
        return ClusterClient(self, context)

    def server(self, context: ServerContext) -> "IFCAServer":
        return IFCAServer(self, context)


class CLoVE(IFCA):
    """CLoVE: the server clusters clients by their losses of all clusters' models."""

    name: ClassVar[str] = "clove"
    paper: ClassVar[str] = "arXiv 2506.22427"
    summary: ClassVar[str] = "averaged within clusters of clients with similar losses of all models"
    exchanges_per_round: ClassVar[int] = 2

    choose: bool = False
    """choose the number of clusters in each round, from 2 to `clusters`, by the mean silhouette"""

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf, 1.0, f"losses on this client's {self.text} samples")

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        inherited = super().schema()
        adapter, losses = inherited.up
        adapter = replace(adapter, when="the second exchange of every round")
        models = (replace(model, of=("adapter", "losses")) for model in inherited.down)
        own = MessageField("cluster", "number of the client's cluster", "json", of=("losses",))
        return replace(inherited, up=(adapter, losses), down=(*models, own))

    def _chosen(self) -> MessageField:
        description, when = "losses of the clusters' models", "the first exchange of every round"
        return MessageField("losses", description, "json", when=when)

    def assigned(self, losses: Losses) -> dict[ClientId, int]:
        """Return the number of each client's model, for at least one client."""
        vectors = np.array([*losses.values()], dtype=float)
        labels = self._labels(vectors)
        used = np.unique(labels)
        costs = np.stack([vectors[labels == label].sum(0) for label in used])
        models = dict(zip(used, linear_sum_assignment(costs)[1], strict=True))
        return {client: int(models[label]) for client, label in zip(losses, labels, strict=True)}

    def _labels(self, vectors: np.ndarray) -> np.ndarray:
        """Return the label of each client's cluster."""
        if len(vectors) == 1:
            return np.zeros(1, dtype=int)
        tree = linkage(vectors, "ward")
        if not self.choose:
            return fcluster(tree, self.clusters, "maxclust")
        counts = range(2, min(self.clusters, len(vectors) - 1) + 1)
        candidates = [fcluster(tree, count, "maxclust") for count in counts]
        distances, together = cdist(vectors, vectors), np.zeros(len(vectors), dtype=int)
        return max(candidates, key=lambda c: silhouette(distances, c), default=together)

    def server(self, context: ServerContext) -> "CLoVEServer":
        return CLoVEServer(self, context)


class ClusterClient(AdapterClient[IFCA]):
    """A client that computes the losses of all clusters' models, and trains one of them."""

    def __init__(self, method: IFCA, context: ClientContext) -> None:
        super().__init__(method, context)
        text = context.data.validation if method.text == "validation" else context.data.train
        self.measured = probe_batch(text, context.window, method.samples)
        self.losses: list[float] = []
        """The loss of each model that was in the last download with all models."""
        self.cluster = 0
        """The number of the model that the client has received."""

    def receive(self, download: Message) -> None:
        groups, given = self.method.groups, download.values.get("cluster")
        number = given if is_cluster(given, len(groups)) else None
        measures = self.method.measures(download.exchange)
        if number is None and not (measures and given is None):
            raise MessageError("The download has no valid number of the client's cluster.")
        for group in groups if number is None or measures else [groups[number]]:
            check_shapes(download[group], shapes_of(self.shared))
        if measures:
            self.losses = [self._loss(download[group]) for group in groups]
        self.cluster = self._lowest(download.exchange) if number is None else number
        copy(download[groups[self.cluster]], self.shared)

    def _lowest(self, exchange: int) -> int:
        """Return the number of the model with the lowest loss, or of a random one of several."""
        chance = generator(self.context.seed, "cluster", self.context.name, exchange)
        order = torch.randperm(len(self.losses), generator=chance).tolist()
        return min(order, key=self.losses.__getitem__)

    def _loss(self, model: Tensors) -> float:
        """Return the loss of a cluster's model, after setting the shared parameters to it."""
        copy(model, self.shared)
        at_once = self.context.training.at_once
        loss = mean_loss(self.context.base, self.model(), self.measured, at_once)
        return loss if loss < LARGEST_LOSS else LARGEST_LOSS  # it may be NaN

    def train(self, turn: Turn) -> None:
        if self.method.trains(turn.exchange):
            self.context.log(CLUSTER, self.cluster)
            super().train(replace(turn, exchange=turn.round))

    def upload(self, turn: Turn) -> Message:
        method = self.method
        message = super().upload(turn) if method.trains(turn.exchange) else Message(turn.exchange)
        if not method.measures(turn.exchange):
            return message
        both: dict[str, Json] = {"cluster": self.cluster, "losses": self.losses}
        name = next(field.name for field in method.schema().up if field.dtype == "json")
        return replace(message, values={name: both[name]})


@dataclass(frozen=True, eq=False)
class Clusters(Shared):
    """The clusters' models, and the clients' clusters."""

    models: tuple[Tensors, ...] = ()
    """The model of each cluster."""
    members: PerClient[int] = PerClient()
    """The number of each client's cluster."""


class IFCAServer(AdapterServer[IFCA, Clusters]):
    """A server that averages each model over the clients that have chosen it."""

    needs_all: ClassVar[bool] = True

    def initial(self) -> Clusters:
        return Clusters(models=(self.start,) * self.method.clusters)

    def download(self, value: Clusters, client: ClientId, exchange: Exchange) -> Message:
        models = dict(zip(self.method.groups, value.models, strict=True))
        return Message(exchange.turn.exchange, models)

    def check(self, value: Clusters, client: ClientId, upload: Message, exchange: Exchange) -> None:
        super().check(value, client, upload, exchange)
        if not self._is_valid(upload.values, exchange):
            raise MessageError(f"A valid cluster, or losses, are missing in {client!r}'s upload.")

    def _is_valid(self, values: Mapping[str, Json], exchange: Exchange) -> bool:
        return is_cluster(values.get("cluster"), self.method.clusters)

    def reference(
        self, value: Clusters, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        number: Any = upload.values["cluster"]
        return {"adapter": value.models[number]}

    def aggregate(self, value: Clusters, exchange: Exchange) -> Clusters:
        return self.averaged_models(value, exchange.each("cluster"), exchange)

    def averaged_models(
        self, value: Clusters, members: Mapping[ClientId, int], exchange: Exchange
    ) -> Clusters:
        """Return the value with the mean of each cluster's uploads as the cluster's model.

        A model that no client has trained does not change.
        """
        rows = {
            f"cluster {number}": {c: 1.0 for c in exchange.counted if members[c] == number}
            for number in range(self.method.clusters)
        }
        means = exchange.means("adapter", rows)
        models = zip(rows, value.models, strict=True)
        return replace(value, models=tuple({**old, **means.get(name, {})} for name, old in models))


class CLoVEServer(IFCAServer):
    """A server that clusters clients by their losses."""

    method: CLoVE

    def _members(self, value: Clusters, clients: Collection[ClientId]) -> dict[ClientId, int]:
        """Return the clusters of clients; clients that have sent no losses have random clusters."""

        def drawn(client: ClientId) -> int:
            chance = generator(self.context.seed, "cluster", client)
            return int(torch.randint(self.method.clusters, (), generator=chance))

        return {c: value.members[c] if c in value.members else drawn(c) for c in clients}

    def download(self, value: Clusters, client: ClientId, exchange: Exchange) -> Message:
        message, group = super().download(value, client, exchange), self.method.groups
        if self.method.measures(exchange.turn.exchange):
            own = {"cluster": value.members[client]} if client in value.members else {}
            return replace(message, values=own)
        number = self._members(value, [client])[client]
        groups = {group[number]: value.models[number]}
        return replace(message, groups=groups, values={"cluster": number})

    def expects(
        self, value: Clusters, client: ClientId, exchange: Exchange
    ) -> Mapping[str, Shapes]:
        trains = self.method.trains(exchange.turn.exchange)
        return super().expects(value, client, exchange) if trains else {}

    def _is_valid(self, values: Mapping[str, Json], exchange: Exchange) -> bool:
        losses = values.get("losses", [])
        count = self.method.clusters if self.method.measures(exchange.turn.exchange) else 0
        return (
            isinstance(losses, list)
            and len(losses) == count
            and all(type(loss) is float and 0 <= loss <= LARGEST_LOSS for loss in losses)
        )

    def reference(
        self, value: Clusters, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        return {"adapter": value.models[self._members(value, [client])[client]]}

    def aggregate(self, value: Clusters, exchange: Exchange) -> Clusters:
        turn = exchange.turn
        if self.method.trains(turn.exchange):
            members = self._members(value, exchange.counted)
            return self.averaged_models(value, members, exchange)
        losses: Losses = exchange.each("losses")
        if not losses:
            return value
        if turn.round == 0:  # all models are equal
            chance, number = generator(self.context.seed, "clusters"), self.method.clusters
            order = torch.randperm(len(losses), generator=chance).tolist()
            members = {c: place % number for c, place in zip(losses, order, strict=True)}
        else:
            members = self.method.assigned(losses)
        return replace(value, members=value.members | members)


def is_cluster(value: Json, clusters: int) -> TypeIs[int]:
    """Return whether a value is the number of a cluster."""
    return type(value) is int and 0 <= value < clusters
