"""FedAMoLE: domain experts choose their clients (arXiv 2411.19128).

A client has, on every chosen linear layer, one expert that all clients share and some of the E
domain experts. After local training, the client uploads the trained parameters and, for every
layer, two kinds of mean embeddings over a few of the client's samples: the mean of A_j x for each
of the client's experts j, and the mean of the token embedding W_t x, where x is the layer's input.
The server averages shared parameters over all clients, and each domain expert over the clients that
trained the expert. Then every expert chooses k_c clients for the next round by the expert's
relevance for the clients' tokens (reverse selection-based expert assignment, RSEA: one exact linear
programme per layer).
"""

import math
from typing import ClassVar

from coterie.adapters import Parameter
from coterie.messages import Field as MessageField
from coterie.messages import Schema
from coterie.methods.contract import ClientContext, Method, RunFacts, ServerContext
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.fedamole.server import FedAMoLEServer
from coterie.methods.fedamole.settings import FedAMoLESettings
from coterie.privacy.ledger import Budget


class FedAMoLE(Method, FedAMoLESettings):
    """FedAMoLE: domain experts choose the clients that train them."""

    name: ClassVar[str] = "fedamole"
    paper: ClassVar[str] = "arXiv 2411.19128"
    summary: ClassVar[str] = "shared expert averaged; domain experts choose clients every round"
    learns_preferences: ClassVar[bool] = True

    @property
    def budget(self) -> Budget | None:
        if not self.chooses:
            return None
        privacy = self.embeddings.privacy
        spent = (math.inf, 1.0) if privacy is None else (privacy.epsilon, privacy.delta)
        return Budget(*spent, "mean embeddings of this client's samples")

    def check(self, run: RunFacts) -> None:
        clients = len(run.clients)
        experts = self.count(clients)
        self.bounds(experts, clients, relaxed=False).refuse(experts, clients)

    def shared(self, parameter: Parameter) -> bool:
        return True

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        shared = "the shared expert and of " if self.shared_expert else ""
        description = f"LoRA pairs of {shared}the client's domain experts; routers' parameters"
        # A new client has no domain experts, and receives up to `max_experts` of them.
        most = 1 + self.max_experts
        adapter = MessageField("adapter", description, reduce="mean", copies=lambda *_: most)
        means = (
            MessageField(
                "experts",
                "mean embedding of held-out samples, for each expert of the client",
                reduce="mean",
                copies=lambda *_: 0,
            ),
            MessageField(
                "tokens",
                "mean token embedding of held-out samples, for each layer",
                copies=lambda *_: 0,
            ),
        )
        count = MessageField("count", "number of domain experts", "json")
        held = MessageField(
            "held",
            "indices of the client's domain experts on each layer",
            "json",
            of=tuple(field.name for field in means),
        )
        return Schema(up=(adapter, *(means if self.chooses else ())), down=(adapter, count, held))

    def client(self, context: ClientContext) -> FedAMoLEClient:
        return FedAMoLEClient(self, context)

    def server(self, context: ServerContext) -> FedAMoLEServer:
        return FedAMoLEServer(self, context)
