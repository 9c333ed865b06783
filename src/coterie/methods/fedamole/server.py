"""FedAMoLE's server: it averages the experts, and lets them choose their clients (RSEA).

Shared parameters are averaged over all clients, a domain expert over those that hold it. Then every
layer's experts choose k_c clients each, by the relevance of the clients' tokens; one exact linear
programme per layer. arXiv 2411.19128, section 4.4.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.adapters import AmoleAdapter
from coterie.aggregation.assignment import assign_all, relevance_of_known
from coterie.bases.sites import chosen_linears
from coterie.messages import Message, Shapes, State, Tensors, check_shapes
from coterie.messages.names import ASSIGNMENT
from coterie.methods.adapter import shapes_of
from coterie.methods.contract import ClientId, Holders, ServerContext, ServerSide
from coterie.methods.fedamole.experts import Held, expert_name, values_of
from coterie.methods.fedamole.settings import FedAMoLESettings
from coterie.seeding import generator


class FedAMoLEServer(ServerSide):
    """Holds all experts, takes their means in, and lets them choose."""

    def __init__(self, settings: FedAMoLESettings, context: ServerContext) -> None:
        self.settings, self.seed, self.log = settings, context.seed, context.log
        self.experts = settings.count(len(context.clients))
        layout = settings.layout(self.experts)
        self.paths = list(chosen_linears(context.base, layout.targets))
        everything = dict.fromkeys(self.paths, range(self.experts))
        adapter = AmoleAdapter(context.base, layout, context.seed, everything)
        self.parameters, self.values = adapter.parameters(), values_of(adapter)
        self.expert_means: dict[str, Tensor] = {}
        """The last mean embeddings, by layer and expert."""
        self.token_means: dict[ClientId, Tensors] = {}
        """The last mean token embeddings of each client, by layer."""
        self.coming: dict[ClientId, Tensors] = {}
        """The same, of the round in progress."""
        self.joined: set[ClientId] = set()
        self.assigned: dict[ClientId, Held] = {}
        self.assigned_for: tuple[int, Sequence[ClientId]] = -1, ()
        """The round, and who takes part in it."""

    def join(self, client: ClientId, hello: Message) -> None:
        """Experts can choose it from the next round on."""
        self.joined.add(client)

    def leave(self, client: ClientId) -> None:
        """Experts do not choose it any more."""
        self.joined.discard(client)
        super().leave(client)

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Assign experts to those who take part."""
        super().start_round(exchange, participants)
        self.coming = {}
        if self.assigned_for != (exchange, participants):  # else they are those of `close`
            self._assign(participants)
        for path in self.paths:
            of = {client: layers[path] for client, layers in self.assigned.items()}
            self.log(f"{ASSIGNMENT}{path}", of)

    def download(self, client: ClientId) -> Message:
        """The shared parameters, and the client's experts."""
        if client not in self.assigned:  # it came when all the others had theirs
            late = self._choices(sorted(self.joined))[client]
            self.assigned = self.assigned | {client: late}
        told = {"count": self.experts, "held": self.assigned[client]}
        return Message(self.exchange, {"adapter": self._held_by(client)}, told)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """The client's experts back, and a mean embedding of each."""
        means = {
            expert_name(p, j): (self.settings.attention.rank,) for p, j in self._experts_of(client)
        }
        shapes = {"adapter": shapes_of(self._held_by(client))}
        return {**shapes, "experts": means} if self.settings.chooses else shapes

    def replaces(self) -> dict[str, Tensors]:
        """All experts, and routers."""
        return {"adapter": self.values}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Keep the client's token embeddings until the end of the round."""
        paths = self.paths if self.settings.chooses else ()
        check_shapes(upload["tokens"], dict.fromkeys(paths, (self.settings.attention.rank,)))
        self.coming[client] = upload["tokens"]

    def end_round(self, mean: Message, held: Holders) -> None:
        """Take the means in, and assign for the next round; what nobody sent stays as it was."""
        self.values.update(mean["adapter"])
        self.expert_means.update(mean["experts"])
        self.token_means.update(self.coming)
        super().end_round(mean, held)
        self._assign(sorted(self.joined))

    def _experts_of(self, client: ClientId) -> set[tuple[str, int]]:
        return {(path, j) for path, held in self.assigned[client].items() for j in held}

    def _held_by(self, client: ClientId) -> dict[str, Tensor]:
        """Of all tensors, those that a client holds."""
        mine, parameters = self._experts_of(client), self.parameters
        return {
            name: tensor
            for name, tensor in self.values.items()
            if (j := parameters[name].expert) is None or (parameters[name].path, j) in mine
        }

    def _assign(self, participants: Sequence[ClientId]) -> None:
        self.assigned_for = self.exchange, participants
        self.assigned = self._choices(participants)

    def _choices(self, participants: Sequence[ClientId]) -> dict[ClientId, Held]:
        """Every layer's experts choose among these clients; depends on the round and them alone."""
        bounds = self.settings.bounds(self.experts, len(participants), relaxed=True)
        scores = {path: self._scores(path, participants) for path in self.paths}
        chosen = assign_all(scores, bounds)
        return {
            client: {path: np.flatnonzero(of[:, i]).tolist() for path, of in chosen.items()}
            for i, client in enumerate(participants)
        }

    def _scores(self, path: str, participants: Sequence[ClientId]) -> np.ndarray:
        """How much each expert of a layer prefers each client: (experts, clients); at random before
        anything is known."""
        tokens = [self.token_means.get(c, {}).get(path) for c in participants]
        if self.settings.chooses and any(mean is not None for mean in tokens):
            experts = [self.expert_means.get(expert_name(path, j)) for j in range(self.experts)]
            return relevance_of_known(experts, tokens, self.relevance_dim(path))
        round = 0 if self.settings.assignment == "random-once" else self.exchange
        chances = (generator(self.seed, "assign", round, path, c) for c in participants)
        draws = [torch.rand(self.experts, generator=chance) for chance in chances]
        return torch.stack(draws, dim=1).numpy()

    def relevance_dim(self, path: str) -> int:
        """What scores of a layer are divided by the root of: r, or the layer's width (d)."""
        rank, width = self.values[f"projection/{path}"].shape
        return rank if self.settings.router.score_scale == "rank" else width

    def state(self) -> State:
        """All experts, and what is known of them and of clients."""
        groups = {"adapter": self.values, "experts": self.expert_means}
        clients = {client: State({"tokens": means}) for client, means in self.token_means.items()}
        return State(groups, {"round": self.exchange}, clients)

    def restore(self, state: State) -> None:
        """Take all back, and assign again for the round to come."""
        super().restore(state)
        self.values = {name: state["adapter"][name] for name in self.values}
        self.expert_means = dict(state["experts"])
        self.token_means = {client: inner["tokens"] for client, inner in state.parts.items()}
        self._assign(sorted(self.joined))
