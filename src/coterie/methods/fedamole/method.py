"""FedAMoLE: domain experts choose their clients (arXiv 2411.19128).

On every chosen linear layer stand one expert that all clients share and some of E domain experts.
After local training a client sends what it trained, and for every layer two kinds of means over a
few of its samples: of each expert's embedding A_j x and of its tokens' embedding W_t x. The server
averages shared parameters over all clients, each domain expert over those that hold it, and lets
every expert choose its k_c clients anew, by the relevance of the clients' tokens (RSEA; one exact
linear programme per layer).
"""

import math
from typing import ClassVar

from coterie.adapters import Parameter
from coterie.messages import Field as Travels
from coterie.messages import Schema
from coterie.methods.contract import ClientContext, Method, RunFacts, ServerContext
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.fedamole.server import FedAMoLEServer
from coterie.methods.fedamole.settings import FedAMoLESettings
from coterie.privacy.ledger import Budget


class FedAMoLE(Method, FedAMoLESettings):
    """Domain experts that choose their clients."""

    name: ClassVar[str] = "fedamole"
    paper: ClassVar[str] = "arXiv 2411.19128"
    summary: ClassVar[str] = "shared expert averaged; domain experts choose clients every round"
    learns_preferences: ClassVar[bool] = True

    @property
    def budget(self) -> Budget | None:
        """Return the budget of the mean embeddings."""
        if not self.chooses:
            return None
        privacy = self.embeddings.privacy
        spent = (math.inf, 1.0) if privacy is None else (privacy.epsilon, privacy.delta)
        return Budget(*spent, "mean embeddings of this client's samples")

    def check(self, run: RunFacts) -> None:
        """There is an assignment within the bounds."""
        clients = len(run.clients)
        experts = self.count(clients)
        self.bounds(experts, clients, relaxed=False).refuse(experts, clients)

    def shared(self, parameter: Parameter) -> bool:
        """All that is trained."""
        return True

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is trained both ways, means of embeddings up."""
        shared = "the shared expert's and " if self.shared_expert else ""
        what = f"LoRA pairs: {shared}those of the domain experts held; router weights"
        adapter = Travels("adapter", what, reduce="mean")
        means = (
            Travels("experts", "mean embedding of a few samples, per expert held", reduce="mean"),
            Travels("tokens", "mean token embedding of the same samples"),
        )
        count = Travels("count", "number of domain experts", "json")
        held = Travels("held", "domain experts that the client holds, by layer", "json")
        return Schema(up=(adapter, *(means if self.chooses else ())), down=(adapter, count, held))

    def client(self, context: ClientContext) -> FedAMoLEClient:
        """Trains what it is handed."""
        return FedAMoLEClient(self, context)

    def server(self, context: ServerContext) -> FedAMoLEServer:
        """Averages, and assigns."""
        return FedAMoLEServer(self, context)
