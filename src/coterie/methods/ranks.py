"""FlexLoRA, and what HetLoRA shares with it: clients whose experts have ranks of their own.

Ranks concern the MLPs' experts; attention's pairs have one rank and are averaged like any other, as
in CoMiGS's comparison (arXiv 2409.13931, table 2). The server holds every pair at the largest rank,
in units of the update: `g B` and A, with g the gain (alpha / sqrt(r), or alpha / r) of the client
that sent it; B is divided by the gain of the client that receives it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Generic, Literal

import torch
from torch import Tensor
from typing_extensions import TypeVar

from coterie.adapters import Parameter, pairs_of
from coterie.aggregation.low_rank import LowRankSum
from coterie.aggregation.weights import TOKENS
from coterie.errors import CoterieError
from coterie.messages import Field as Travels
from coterie.messages import Message, MessageError, Schema, Shapes, State, Tensors, check_shapes
from coterie.methods.adapter import WHAT, AdapterClient, AdapterMethod, AdapterServer
from coterie.methods.contract import ClientContext, ClientId, Holders, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.training.schedule import Penalty

RELEASED_GAMMA, RELEASED_PENALTY = 0.99, 0.01
"""What FlexLoRA's loss has there, too, although it never prunes."""
R = TypeVar("R", bound="RankMethod", default="RankMethod", covariant=True)
Pairs = dict[str, str]
"""Of the experts' pairs: the name of each A, and that of its B."""


class RankClient(AdapterClient[R], Generic[R]):
    """Takes and sends experts' pairs in a group of their own."""

    def __init__(self, method: R, context: ClientContext) -> None:
        super().__init__(method, context)
        self.pairs: Pairs = {a.name: b.name for a, b in expert_pairs(self.adapter.parameters())}

    def receive(self, download: Message) -> None:
        """Replace the shared parameters by the server's."""
        together = {**download["adapter"], **download["experts"]}
        super().receive(Message(download.round, {"adapter": together}))

    def upload(self, exchange: int) -> Message:
        """The shared parameters, by group."""
        rest = dict(super().upload(exchange)["adapter"])
        experts = {name: rest.pop(name) for pair in self.pairs.items() for name in pair}
        return Message(exchange, {"adapter": rest, "experts": experts})


class RankServer(AdapterServer[R], Generic[R]):
    """Holds pairs at the largest rank; a client gets the first rows and columns of them."""

    def __init__(self, method: R, context: ServerContext) -> None:
        super().__init__(method, context)
        self.pairs: Pairs = {a.name: b.name for a, b in expert_pairs(self.parameters)}
        self.ranks: dict[ClientId, dict[str, int]] = {}
        """The present rank of each of a client's pairs, by the name of A."""

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """The largest shape, with the client's rank for an expert's pair."""
        largest, parameter = super().shape(client, name), self.parameters[name]
        if parameter.role != "generalist":
            return largest
        rank = self.method.layout(client).rank
        return (rank, largest[1]) if parameter.factor == "A" else (largest[0], rank)

    def declared(self, client: ClientId, hello: Message) -> dict[str, tuple[int, ...]]:
        """The same; of a pair, both factors."""
        shapes = super().declared(client, hello)
        for a, b in self.pairs.items():
            if (a in shapes) != (b in shapes):
                raise MessageError(f"The client {client!r} declares one of {a!r} and {b!r} alone.")
        return shapes

    def join(self, client: ClientId, hello: Message) -> None:
        """Note the client's ranks too."""
        super().join(client, hello)
        held = self.held[client]
        self.ranks[client] = {a: held[a][0] for a in self.pairs if a in held}

    def download(self, client: ClientId) -> Message:
        """Pairs cut to the client's present ranks, in units of its gain."""
        rest, experts = dict(super().download(client)["adapter"]), {}
        for a, rank in self.ranks[client].items():
            b = self.pairs[a]
            experts[a] = rest.pop(a)[:rank]
            experts[b] = rest.pop(b)[:, :rank] / self.method.gain(client)
        return Message(self.exchange, {"adapter": rest, "experts": experts})

    def expects(self, client: ClientId) -> dict[str, Shapes]:
        """Return the shapes of all parameters except the experts' pairs."""
        held, parameters = self.held[client].items(), self.parameters
        return {"adapter": {n: s for n, s in held if parameters[n].role != "generalist"}}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count experts' pairs in, as the method has it."""
        experts = upload["experts"]
        shapes = self.expected(client, experts)
        check_shapes(experts, shapes)
        self.ranks[client] = {a: shapes[a][0] for a in self.ranks[client]}
        for a in self.ranks[client]:
            B = self.method.gain(client) * experts[self.pairs[a]].double()
            self.count(client, a, B, experts[a])

    def expected(self, client: ClientId, experts: Tensors) -> Shapes:
        """The shapes that a client's pairs must have."""
        held = self.held[client]
        return {name: held[name] for a in self.ranks[client] for name in (a, self.pairs[a])}

    def count(self, client: ClientId, a: str, B: Tensor, A: Tensor) -> None:
        """Count one client's pair in, that of the A of this name.

        B: (out, r) has the client's gain in it, A: (r, in).
        """
        raise NotImplementedError

    def state(self) -> State:
        """The shared parameters and the clients' ranks."""
        state = super().state()
        return replace(state, values={**state.values, "ranks": self.ranks})

    def restore(self, state: State) -> None:
        """Take both back."""
        super().restore(state)
        self.ranks = dict(state.values["ranks"])


class RankMethod(AdapterMethod):
    """Experts of ranks of their own."""

    mixes_ranks: ClassVar[bool] = True
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    told: ClassVar[tuple[Travels, ...]] = ()
    """What a client's hello has beside its shapes."""

    mlp: SharedSets = SharedSets(sets=1, rank=16)
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    form: Literal["paper", "released"] = "paper"
    """formulas of the paper, or of CoMiGS's released comparison"""

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Experts' pairs apart from the rest, each client's, in a group of their own."""
        rest = Travels("adapter", WHAT["dense"], reduce="mean")
        groups = rest, Travels("experts", WHAT["generalist"])
        return Schema((*super().schema().hello, *self.told), groups, groups)

    def check(self, run: RunFacts) -> None:
        """Experts are counted together by rules of their own, which a server optimiser does not
        step."""
        super().check(run)
        if run.server_optimiser and self.attention is None:
            raise CoterieError(
                f"aggregation.optimiser has no effect with the method {self.name!r} and "
                "`attention: null`: the server takes no mean; remove it."
            )

    def gain(self, client: ClientId) -> float:
        """The factor of a client's B A in what the server counts together."""
        layout = self.layout(client)
        return layout.gain(layout.rank)


class FlexLora(RankMethod):
    """The mean of the clients' full updates, cut to each client's rank by its SVD.

    With n_k training tokens and gain g_k of client k, the update is
    `W = sum_k n_k g_k B_k A_k / sum_k n_k = U S V^T`, and client k gets `B = U_r S_r / g_k`,
    `A = V_r^T`: of all updates of its rank r, `g_k B A` is the one nearest to W. (Released with
    CoMiGS: on the server g_k is alpha / r, whatever it is in training; and the clients' losses have
    HetLoRA's penalty, although nothing is pruned.)
    """

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    summary: ClassVar[str] = (
        "client-specific ranks; full updates averaged and truncated to each rank by SVD"
    )
    told: ClassVar[tuple[Travels, ...]] = (TOKENS,)

    def gain(self, client: ClientId) -> float:
        """As released, updates are alpha / r B A on the server, whatever they are in training."""
        layout = self.layout(client)
        return layout.alpha / layout.rank if self.form == "released" else super().gain(client)

    def penalty(self, client: AdapterClient) -> Penalty | None:
        """As released, HetLoRA's penalty on the last ranks."""
        if self.form == "paper":
            return None
        return weighted_tails(client, RELEASED_GAMMA, RELEASED_PENALTY)

    def client(self, context: ClientContext) -> "FlexLoraClient":
        """Trains like any other; says how much text it has."""
        return FlexLoraClient(self, context)

    def server(self, context: ServerContext) -> "FlexLoraServer":
        """Averages full updates."""
        return FlexLoraServer(self, context)


class FlexLoraClient(RankClient):
    """Its weight is its number of training tokens."""

    def hello(self) -> Message:
        """Shapes and weight."""
        tokens = len(self.context.data.train.ids)
        return Message(values={**super().hello().values, TOKENS.name: tokens})


class FlexLoraServer(RankServer):
    """Sums updates of any rank; their SVD takes the place of the pairs."""

    def __init__(self, method: FlexLora, context: ServerContext) -> None:
        super().__init__(method, context)
        self.tokens: dict[ClientId, int] = {}

    def join(self, client: ClientId, hello: Message) -> None:
        """Note the client's weight."""
        tokens = hello.values.get(TOKENS.name)
        if type(tokens) is not int or tokens < 1:
            raise MessageError(f"The client {client!r} did not send its number of training tokens.")
        super().join(client, hello)
        self.tokens[client] = tokens

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Start the sums."""
        super().start_round(exchange, participants)
        self.sums: dict[str, LowRankSum] = {}

    def count(self, client: ClientId, a: str, B: Tensor, A: Tensor) -> None:
        """Add a weighted update."""
        if a not in self.sums:
            self.sums[a] = LowRankSum()
            # If the round's updates have fewer directions than a client has ranks, A is filled up
            # with directions that are not zero, or they could never be learnt.
            self.sums[a].add(0 * self.shared[self.pairs[a]], self.shared[a])
        self.sums[a].add(self.tokens[client] * B, A)
        self.sums[a].weight += self.tokens[client]

    def end_round(self, mean: Message, held: Holders) -> None:
        """Replace what was uploaded by its mean."""
        super().end_round(mean, held)
        while self.sums:
            a, total = self.sums.popitem()
            B, A = total.factors(len(self.shared[a]))
            self.shared[a] = A.float().contiguous()
            self.shared[self.pairs[a]] = (B / total.weight).float()


def kept(rank: int, gamma: float) -> int:
    """The rank that is left when the tail is pruned."""
    return max(1, math.floor(gamma * rank))


def tail(A: Tensor, B: Tensor, gamma: float) -> Tensor:
    """`||B_tail||_F ||A_tail||_F` of a pair at its present rank: a scalar."""
    left = kept(present_rank(A), gamma)
    return torch.linalg.norm(B[:, left:]) * torch.linalg.norm(A[left:])


def weighted_tails(client: AdapterClient, gamma: float, weight: float) -> Penalty:
    """The sum of all experts' tails, weighted: HetLoRA's penalty."""
    pairs = [(a.tensor, b.tensor) for a, b in expert_pairs(client.adapter.parameters())]

    def tails() -> Tensor:
        device = client.context.base.device
        return weight * torch.stack([tail(A, B, gamma).to(device) for A, B in pairs]).sum()

    return tails


def present_rank(A: Tensor) -> int:
    """The rank of a pair of which some may be pruned: A's rows up to the last that is not zero."""
    rows = A.detach().any(dim=1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 1


def expert_pairs(parameters: Mapping[str, Parameter]) -> list[tuple[Parameter, Parameter]]:
    """A and B of every shared expert's linear layers."""
    return pairs_of({name: p for name, p in parameters.items() if p.role == "generalist"})
