"""FedAMoLE's server: it averages the experts and assigns them to clients (RSEA).

Shared parameters are averaged over all clients, and each domain expert over the clients that
trained the expert. Then each expert chooses k_c clients by the expert's relevance for the clients'
tokens. One exact linear programme per layer computes the choices (arXiv 2411.19128, section 4.4).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.adapters import AmoleAdapter
from coterie.bases.sites import chosen_linears
from coterie.messages import Message, Shapes, State, Tensors, check_shapes
from coterie.messages.names import ASSIGNMENT
from coterie.methods.contract import ClientId, ServerContext, ServerSide
from coterie.methods.fedamole.assignment import assign_all, relevance_of_known
from coterie.methods.fedamole.experts import Held, expert_name, values_of
from coterie.methods.fedamole.settings import FedAMoLESettings
from coterie.methods.sides import Holders
from coterie.methods.tensors import shapes_of
from coterie.seeding import generator


class FedAMoLEServer(ServerSide):
    """A server that holds all experts, averages them and assigns them to clients."""

    def __init__(self, settings: FedAMoLESettings, context: ServerContext) -> None:
        self.settings, self.seed, self.log = settings, context.seed, context.log
        self.experts = settings.count(len(context.clients))
        layout = settings.layout(self.experts)
        self.paths = list(chosen_linears(context.base, layout.targets))
        all_experts = dict.fromkeys(self.paths, range(self.experts))
        adapter = AmoleAdapter(context.base, layout, context.seed, all_experts)
        self.parameters, self.values = adapter.parameters(), values_of(adapter)
        self.expert_means: dict[str, Tensor] = {}
        """A mapping from names returned by `expert_name` to the experts' latest mean embeddings."""
        self.token_means: dict[ClientId, Tensors] = {}
        """For each client, a mapping from layers to the client's latest mean token embeddings."""
        self.received_means: dict[ClientId, Tensors] = {}
        """The mean token embeddings that were uploaded in the round in progress."""
        self.joined: set[ClientId] = set()
        """The clients that experts can choose."""
        self.assigned: dict[ClientId, Held] = {}
        """For each client, a mapping from layers to the experts assigned to the client."""
        self.assigned_for: tuple[int, Sequence[ClientId]] = -1, ()
        """The exchange and participants of the latest assignment; -1 and () if there is none."""

    def join(self, client: ClientId, hello: Message) -> None:
        self.joined.add(client)

    def leave(self, client: ClientId) -> None:
        self.joined.discard(client)
        super().leave(client)

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        super().start_round(exchange, participants)
        self.received_means = {}
        if self.assigned_for != (exchange, participants):  # else end_round assigned them
            self._assign(participants)
        for path in self.paths:
            experts = {client: layers[path] for client, layers in self.assigned.items()}
            self.log(f"{ASSIGNMENT}{path}", experts)

    def download(self, client: ClientId) -> Message:
        if client not in self.assigned:  # the client joined after the assignment
            experts = self._choices(sorted(self.joined))[client]
            self.assigned = self.assigned | {client: experts}
        values = {"count": self.experts, "held": self.assigned[client]}
        return Message(self.exchange, {"adapter": self._held_by(client)}, values)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        means = {
            expert_name(p, j): (self.settings.attention.rank,) for p, j in self._experts_of(client)
        }
        shapes = {"adapter": shapes_of(self._held_by(client))}
        return {**shapes, "experts": means} if self.settings.chooses else shapes

    def replaces(self) -> dict[str, Tensors]:
        return {"adapter": self.values}

    def receive(self, client: ClientId, upload: Message) -> None:
        paths = self.paths if self.settings.chooses else ()
        check_shapes(upload["tokens"], dict.fromkeys(paths, (self.settings.attention.rank,)))
        self.received_means[client] = upload["tokens"]

    def end_round(self, mean: Message, held: Holders) -> None:
        self.values.update(mean["adapter"])  # tensors that no client sent keep their values
        self.expert_means.update(mean["experts"])
        self.token_means.update(self.received_means)
        super().end_round(mean, held)
        self._assign(sorted(self.joined))

    def _experts_of(self, client: ClientId) -> set[tuple[str, int]]:
        return {(path, j) for path, held in self.assigned[client].items() for j in held}

    def _held_by(self, client: ClientId) -> dict[str, Tensor]:
        """Return the shared parameters and the parameters of a client's domain experts."""
        experts, parameters = self._experts_of(client), self.parameters
        return {
            name: tensor
            for name, tensor in self.values.items()
            if (j := parameters[name].expert) is None or (parameters[name].path, j) in experts
        }

    def _assign(self, participants: Sequence[ClientId]) -> None:
        self.assigned_for = self.exchange, participants
        self.assigned = self._choices(participants)

    def _choices(self, participants: Sequence[ClientId]) -> dict[ClientId, Held]:
        """Let the experts of every layer choose among the participants.

        Within a run, the result depends only on the exchange, the participants and the embeddings.
        """
        bounds = self.settings.bounds(self.experts, len(participants), relaxed=True)
        scores = {path: self._scores(path, participants) for path in self.paths}
        chosen = assign_all(scores, bounds)
        return {
            client: {path: np.flatnonzero(D[:, i]).tolist() for path, D in chosen.items()}
            for i, client in enumerate(participants)
        }

    def _scores(self, path: str, participants: Sequence[ClientId]) -> np.ndarray:
        """Return the scores by which a layer's experts choose clients, shaped (experts, clients).

        A score is usually the relevance of an expert for a client's tokens. However, all scores are
        random if the setting `assignment` is "random" or "random-once", or if no participant has
        uploaded embeddings yet.
        """
        tokens = [self.token_means.get(c, {}).get(path) for c in participants]
        if self.settings.chooses and any(mean is not None for mean in tokens):
            experts = [self.expert_means.get(expert_name(path, j)) for j in range(self.experts)]
            return relevance_of_known(experts, tokens, self.relevance_dim(path))
        round = 0 if self.settings.assignment == "random-once" else self.exchange
        chances = (generator(self.seed, "assign", round, path, c) for c in participants)
        draws = [torch.rand(self.experts, generator=chance) for chance in chances]
        return torch.stack(draws, dim=1).numpy()

    def relevance_dim(self, path: str) -> int:
        """Return the number n such that a layer's relevance scores are divided by sqrt(n).

        Args:
            path: The path of the layer.

        Returns:
            The LoRA rank r if the setting `router.score_scale` is "rank". Otherwise, the layer's
            input width d.
        """
        rank, width = self.values[f"projection/{path}"].shape
        return rank if self.settings.router.score_scale == "rank" else width

    def state(self) -> State:
        groups = {"adapter": self.values, "experts": self.expert_means}
        clients = {client: State({"tokens": means}) for client, means in self.token_means.items()}
        return State(groups, {"round": self.exchange}, clients)

    def restore(self, state: State) -> None:
        super().restore(state)
        self.values = {name: state["adapter"][name] for name in self.values}
        self.expert_means = dict(state["experts"])
        self.token_means = {client: inner["tokens"] for client, inner in state.parts.items()}
        self._assign(sorted(self.joined))
