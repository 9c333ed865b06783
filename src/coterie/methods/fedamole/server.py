"""FedAMoLE's server: it averages the experts and assigns them to clients (RSEA).

Shared parameters are averaged over all clients, and each domain expert over the clients that
trained the expert. Then each expert chooses k_c clients by the expert's relevance for the clients'
tokens. One exact linear programme per layer computes the choices (arXiv 2411.19128, section 4.4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from coterie.adapters import AmoleAdapter
from coterie.bases.sites import chosen_linears
from coterie.exchanges.exchange import Exchange
from coterie.messages import Message, Shapes, Tensors
from coterie.messages.names import ASSIGNMENT
from coterie.methods.contract import ClientId, Server, ServerContext
from coterie.methods.fedamole.assignment import assign_all, relevance_of_known
from coterie.methods.fedamole.experts import Held, expert_name
from coterie.methods.fedamole.settings import FedAMoLESettings
from coterie.methods.tensors import shapes_of
from coterie.methods.value import PerClient, Value, from_hello
from coterie.seeding import generator


@dataclass(frozen=True, eq=False)
class Experts(Value):
    """All experts, and the mean embeddings from which they choose clients."""

    adapter: Tensors = field(default_factory=dict)
    """The shared parameters, with all experts."""
    experts: Tensors = field(default_factory=dict)
    """A mapping from names returned by `expert_name` to the experts' latest mean embeddings."""
    tokens: PerClient[Tensors] = PerClient()
    """For each client, a mapping from layers to the client's latest mean token embeddings."""
    joined: PerClient[bool] = from_hello()
    """The clients that have joined."""
    members: PerClient[bool] = PerClient()
    """The clients that had joined when the last exchange ended."""


class FedAMoLEServer(Server[Experts]):
    """A server that holds all experts, averages them and assigns them to clients."""

    def __init__(self, settings: FedAMoLESettings, context: ServerContext) -> None:
        self.settings, self.seed, self.log = settings, context.seed, context.log
        self.count = settings.count(len(context.clients))
        """The number of experts on each layer."""
        layout = settings.layout(self.count)
        self.paths = list(chosen_linears(context.base, layout.targets))
        all_experts = dict.fromkeys(self.paths, range(self.count))
        adapter = AmoleAdapter(context.base, layout, context.seed, all_experts)
        self.parameters, self.start = adapter.parameters(), adapter.values()
        self._choices = lru_cache(maxsize=1)(self.choices)  # values are compared by identity

    def initial(self) -> Experts:
        return Experts(self.start)

    def join(self, value: Experts, client: ClientId, hello: Message) -> Experts:
        return replace(value, joined=value.joined | {client: True})

    def held(self, value: Experts, client: ClientId, exchange: Exchange) -> Held:
        """Return a mapping from layers to the experts that are assigned to a client.

        After the last exchange, experts choose among the clients that had joined when it ended. A
        client that joins later gets experts as if they chose among all clients.
        """
        members = exchange.clients or tuple(sorted(value.members or value.joined))
        if client not in members:
            members = tuple(sorted(value.joined))
        return self._choices(value, members, exchange.turn.exchange)[client]

    def download(self, value: Experts, client: ClientId, exchange: Exchange) -> Message:
        held = self.held(value, client, exchange)
        values = {"count": self.count, "held": held}
        return Message(exchange.turn.exchange, {"adapter": self._held_by(value, held)}, values)

    def expects(self, value: Experts, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        held, rank = self.held(value, client, exchange), (self.settings.attention.rank,)
        shapes = {"adapter": shapes_of(self._held_by(value, held))}
        if self.settings.chooses:
            means = {expert_name(p, j): rank for p, experts in held.items() for j in experts}
            shapes |= {"experts": means, "tokens": dict.fromkeys(self.paths, rank)}
        return shapes

    def aggregate(self, value: Experts, exchange: Exchange) -> Experts:
        assigned = self._choices(value, exchange.clients, exchange.turn.exchange)
        for path in self.paths:
            self.log(f"{ASSIGNMENT}{path}", {c: layers[path] for c, layers in assigned.items()})
        # Tensors that no client sent keep their values.
        adapter = {**value.adapter, **exchange.mean("adapter", start=value.adapter)}
        value = replace(value, adapter=adapter, members=value.joined)
        if not self.settings.chooses:
            return value
        experts = {**value.experts, **exchange.mean("experts")}
        tokens = value.tokens | exchange.each("tokens")
        return replace(value, experts=experts, tokens=tokens)

    def _held_by(self, value: Experts, held: Held) -> dict[str, Tensor]:
        """Return the shared parameters and the parameters of a client's domain experts."""
        experts = {(path, j) for path, numbers in held.items() for j in numbers}
        return {
            name: tensor
            for name, tensor in value.adapter.items()
            if (j := self.parameters[name].expert) is None
            or (self.parameters[name].path, j) in experts
        }

    def choices(
        self, value: Experts, participants: Sequence[ClientId], exchange: int
    ) -> dict[ClientId, Held]:
        """Let the experts of every layer choose among the participants.

        Args:
            value: The experts, with the embeddings on which relevance depends.
            participants: The clients among which experts choose, sorted.
            exchange: The number of the exchange for which they choose.

        Returns:
            For each client, a mapping from layers to the numbers of the client's experts.
        """
        bounds = self.settings.bounds(self.count, len(participants), relaxed=True)
        tokens = dict(value.tokens)
        scores = {
            path: self._scores(value, tokens, path, participants, exchange) for path in self.paths
        }
        chosen = assign_all(scores, bounds)
        return {
            client: {path: np.flatnonzero(D[:, i]).tolist() for path, D in chosen.items()}
            for i, client in enumerate(participants)
        }

    def _scores(
        self,
        value: Experts,
        tokens: Mapping[ClientId, Tensors],
        path: str,
        participants: Sequence[ClientId],
        exchange: int,
    ) -> np.ndarray:
        """Return the scores by which a layer's experts choose clients, shaped (experts, clients).

        A score is usually the relevance of an expert for a client's tokens. However, all scores are
        random if the setting `assignment` is "random" or "random-once", or if no participant has
        uploaded embeddings yet.
        """
        means = [tokens.get(c, {}).get(path) for c in participants]
        if self.settings.chooses and any(mean is not None for mean in means):
            experts = [value.experts.get(expert_name(path, j)) for j in range(self.count)]
            return relevance_of_known(experts, means, self.relevance_dim(path))
        round = 0 if self.settings.assignment == "random-once" else exchange
        chances = (generator(self.seed, "assign", round, path, c) for c in participants)
        draws = [torch.rand(self.count, generator=chance) for chance in chances]
        return torch.stack(draws, dim=1).numpy()

    def relevance_dim(self, path: str) -> int:
        """Return the number n such that a layer's relevance scores are divided by sqrt(n).

        Args:
            path: The path of the layer.

        Returns:
            The LoRA rank r if the setting `router.score_scale` is "rank". Otherwise, the layer's
            input width d.
        """
        rank, width = self.start[f"projection/{path}"].shape
        return rank if self.settings.router.score_scale == "rank" else width
