"""Variants of `auto` that replace one of its parts, for recipes/small/auto-settings.yaml."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from coterie.adapters import Parameter
from coterie.messages import Tensors
from coterie.methods.auto.client import AutoClient
from coterie.methods.auto.method import Auto
from coterie.methods.auto.server import AutoServer, Chosen
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.seeding import generator
from coterie.transforms.context import Row

LARGEST_FACTOR = 1e4


def divergence(row: Row, shares: Row) -> float:
    """Return KL(row || shares), in nats."""
    return sum(w * math.log(w / shares[c]) for c, w in row.items() if w)


def tilted(shares: Row, scores: Row, distance: float) -> dict[ClientId, float]:
    """Return weights p_j exp(k s_j) whose divergence from the shares p is `distance`, if possible.

    Args:
        shares: A mapping from clients to shares with a sum of 1.
        scores: The score s_j of each client.
        distance: The divergence that the weights should have. It determines k >= 0.
    """
    logs = torch.tensor([math.log(share) for share in shares.values()], dtype=torch.float64)
    tilt = torch.tensor([scores[c] for c in shares], dtype=torch.float64)

    def weights(factor: float) -> dict[ClientId, float]:
        row = torch.softmax(logs + factor * tilt, 0).tolist()
        return dict(zip(shares, row, strict=True))

    low, high = 0.0, LARGEST_FACTOR
    for _ in range(100):
        middle = (low + high) / 2
        if divergence(weights(middle), shares) < distance:
            low = middle
        else:
            high = middle
    return weights(high)


class CosineClient(AutoClient):
    """A client that weights others by the cosine similarity of their changes to its own."""

    def weights(self, shares: Row, pairs: Mapping[ClientId, Tensors]) -> dict[ClientId, float]:
        changes = {
            client: torch.cat([(t[n] - start).flatten() for n, start in self.initial.items()])
            for client, t in pairs.items()
        }
        own = changes[self.context.name]
        scores = {
            client: torch.nn.functional.cosine_similarity(own, change, dim=0).item()
            for client, change in changes.items()
        }
        unknown = sum(scores.values()) / len(scores)
        scores = {client: scores.get(client, unknown) for client in shares}
        return tilted(shares, scores, divergence(super().weights(shares, pairs), shares))


class PermutedClient(AutoClient):
    """A client that gives its weights for others to other clients, drawn at random."""

    def weights(self, shares: Row, pairs: Mapping[ClientId, Tensors]) -> dict[ClientId, float]:
        row, name = super().weights(shares, pairs), self.context.name
        others = sorted(shares.keys() - {name})
        chance = generator(self.context.seed, "permuted", name)
        order = torch.randperm(len(others), generator=chance).tolist()
        drawn = {c: row.get(others[i], 0.0) for c, i in zip(others, order, strict=True)}
        return {c: w for c, w in {**drawn, name: row.get(name, 0.0)}.items() if w}


class OneTrialServer(AutoServer):
    """A server with a trial after the first round only."""

    def _due(self, value: Chosen, client: ClientId, exchange: int) -> bool:
        return client not in value.tried and super()._due(value, client, exchange)


class AutoCosine(Auto):
    """Auto with weights by cosine similarity, as far from the shares as its own ones."""

    name: ClassVar[str] = "auto-cosine"
    summary: ClassVar[str] = "auto with weights by the cosine similarity of changes"

    def client(self, context: ClientContext) -> CosineClient:
        return CosineClient(self, context)


class AutoPermuted(Auto):
    """Auto with its own weights, given to other clients."""

    name: ClassVar[str] = "auto-permuted"
    summary: ClassVar[str] = "auto with the weights of other clients permuted"

    def client(self, context: ClientContext) -> PermutedClient:
        return PermutedClient(self, context)


class AutoOnce(Auto):
    """Auto with one trial."""

    name: ClassVar[str] = "auto-once"
    summary: ClassVar[str] = "auto with a trial after the first round only"

    def server(self, context: ServerContext) -> OneTrialServer:
        return OneTrialServer(self, context)


class AutoExperts(Auto):
    """Auto whose trials compare the first expert, too."""

    name: ClassVar[str] = "auto-experts"
    summary: ClassVar[str] = "auto that judges attention pairs and the first expert"

    def judges(self, parameter: Parameter) -> bool:
        return super().judges(parameter) or parameter.expert == 0
