"""FlexLoRA and HetLoRA: clients whose low-rank experts have ranks of their own.

Ranks concern the MLPs' experts; attention's pairs have one rank and are averaged like any other, as
in CoMiGS's comparison (arXiv 2409.13931, table 2). The server holds every pair at the largest rank,
in units of the update: `g B` and A, with g the gain (alpha / sqrt(r), or alpha / r) of the client
that sent it; B is divided by the gain of the client that receives it.
"""

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from coterie.adapters import Part, Trainable, pairs_of
from coterie.aggregation.low_rank import LowRankSum, PaddedMean, product_norm
from coterie.aggregation.mean import TOKENS
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, Shapes, State, Tensors, check_shapes
from coterie.methods.adapter import WHAT, AdapterClient, AdapterMethod, AdapterServer, shapes_of
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.training.schedule import Penalty

REPORTS = Literal["trained", "aggregated"]
Pairs = dict[str, str]
"""Of the experts' pairs: the name of each A, and that of its B."""


def ranked(schema: Schema, *hello: Travels) -> Schema:
    """What travels: experts' pairs apart from the rest, each client's, in a group of their own."""
    rest = Travels("adapter", WHAT["dense"], reduce="mean")
    experts = Travels("experts", WHAT["generalist"])
    return Schema((*schema.hello, *hello), (rest, experts), (rest, experts))


class RankClient(AdapterClient):
    """Takes and sends experts' pairs in a group of their own."""

    def __init__(self, method: AdapterMethod, context: ClientContext) -> None:
        super().__init__(method, context)
        self.pairs: Pairs = {a.name: b.name for a, b in _expert_pairs(self.adapter)}

    def take(self, download: Message) -> None:
        """Replace the shared parameters by the server's."""
        together = {**download["adapter"], **download["experts"]}
        super().take(Message(download.round, {"adapter": together}))

    def upload(self, round: int) -> Message:
        """The shared parameters, by group."""
        whole = super().upload(round)["adapter"]
        experts = {*self.pairs, *self.pairs.values()}
        rest = {name: tensor for name, tensor in whole.items() if name not in experts}
        return Message(round, {"adapter": rest, "experts": {n: whole[n] for n in sorted(experts)}})


class RankServer(AdapterServer):
    """Holds pairs at the largest rank; a client gets the first rows and columns of them."""

    def __init__(self, method: AdapterMethod, context: ServerContext) -> None:
        super().__init__(method, context)
        experts = {name: p for name, p in self.parts.items() if p.role == "generalist"}
        self.pairs: Pairs = {a.name: b.name for a, b in pairs_of(experts)}
        self.ranks: dict[ClientId, dict[str, int]] = {}
        """The present rank of each of a client's pairs, by the name of A."""

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """The largest shape, with the client's rank for an expert's pair."""
        largest, part = super().shape(client, name), self.parts[name]
        if part.role != "generalist":
            return largest
        rank = self.method.layout(client).rank
        return (rank, largest[1]) if part.factor == "A" else (largest[0], rank)

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
            experts[b] = rest.pop(b)[:, :rank] / self._gain(client)
        return Message(self.round, {"adapter": rest, "experts": experts})

    def expects(self, client: ClientId) -> dict[str, Shapes]:
        """All but experts' pairs."""
        held = self.held[client]
        rest = {n: shape for n, shape in held.items() if self.parts[n].role != "generalist"}
        return {"adapter": rest}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count experts' pairs in, as the method has it."""
        experts = upload["experts"]
        shapes = self.expected(client, experts)
        check_shapes(experts, shapes)
        self.ranks[client] = {a: shapes[a][0] for a in self.ranks[client]}
        for a in self.ranks[client]:
            B = self._gain(client) * experts[self.pairs[a]].double()
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

    def _gain(self, client: ClientId) -> float:
        layout = self.method.layout(client)
        return layout.gain(layout.rank)


class FlexLora(AdapterMethod):
    """The mean of the clients' full updates, cut to each client's rank by its SVD.

    With n_k training tokens and gain g_k of client k, the update is
    `W = sum_k n_k g_k B_k A_k / sum_k n_k = U S V^T`, and client k gets `B = U_r S_r / g_k`,
    `A = V_r^T`: of all updates of its rank r, `g_k B A` is the one nearest to W.
    """

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    summary: ClassVar[str] = (
        "client-specific ranks; full updates averaged and truncated to each rank by SVD"
    )
    reports: ClassVar[REPORTS] = "aggregated"
    mixes_ranks: ClassVar[bool] = True

    mlp: SharedSets = SharedSets(sets=1, rank=16)
    attention: Attention | None = Attention()
    lora: Lora = Lora()

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pairs of each, and the number of training tokens."""
        return ranked(super().schema(), TOKENS)

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
        self.sums: dict[str, LowRankSum] = {}
        self.weights: dict[str, int] = {}

    def join(self, client: ClientId, hello: Message) -> None:
        """Note the client's weight."""
        tokens = hello.values.get(TOKENS.name)
        if type(tokens) is not int or tokens < 1:
            raise MessageError(f"The client {client!r} did not send its number of training tokens.")
        super().join(client, hello)
        self.tokens[client] = tokens

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Start the sums."""
        super().open(round, participants)
        self.sums, self.weights = {}, {}

    def count(self, client: ClientId, a: str, B: Tensor, A: Tensor) -> None:
        """Add a weighted update."""
        if a not in self.sums:
            self.sums[a] = LowRankSum()
            # If the round's updates have fewer directions than a client has ranks, A is filled up
            # with directions that are not zero, or they could never be learnt.
            self.sums[a].add(0 * self.shared[self.pairs[a]], self.shared[a])
        weight = self.tokens[client]
        self.sums[a].add(weight * B, A)
        self.weights[a] = self.weights.get(a, 0) + weight

    def close(self, mean: Message) -> None:
        """Replace what was uploaded by its mean."""
        super().close(mean)
        for a in list(self.sums):
            B, A = self.sums.pop(a).factors(len(self.shared[a]))
            self.shared[a] = A.float().contiguous()
            self.shared[self.pairs[a]] = (B / self.weights[a]).float()


class HetLora(AdapterMethod):
    """Zero-padded pairs, averaged by the size of the clients' updates; ranks shrink by themselves.

    The server pads A_k and g_k B_k with zeros to the largest rank and weighs them, for every linear
    layer, by `||g_k B_k A_k||_F / sum_j ||g_j B_j A_j||_F`. With tail the rows of A and columns of
    B from floor(gamma r) on, a client adds `penalty_weight * ||B_tail||_F ||A_tail||_F`, summed
    over layers, to its loss; where that product has become smaller in a round, it drops the tail
    for good. Its gain stays that of its first rank.
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"
    summary: ClassVar[str] = (
        "client-specific ranks that can shrink; zero-padded LoRA pairs averaged"
    )
    reports: ClassVar[REPORTS] = "aggregated"
    mixes_ranks: ClassVar[bool] = True

    mlp: SharedSets = SharedSets(sets=1, rank=16)
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    gamma: float = Field(
        default=0.99, gt=0, le=1, description="fraction of the rank kept when pruning"
    )
    penalty_weight: float = Field(
        default=5e-4, ge=0, description="weight of the pruning penalty in the loss"
    )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pairs of each."""
        return ranked(super().schema())

    def kept(self, rank: int) -> int:
        """The rank that is left when the tail is pruned."""
        return max(1, math.floor(self.gamma * rank))

    def tail(self, A: Tensor, B: Tensor) -> Tensor:
        """`||B_tail||_F ||A_tail||_F` of a pair at its present rank: a scalar."""
        kept = self.kept(present_rank(A))
        return torch.linalg.norm(B[:, kept:]) * torch.linalg.norm(A[kept:])

    def penalty(self, client: AdapterClient) -> Penalty:
        """The weighted sum of the tails."""
        pairs = [(a.parameter, b.parameter) for a, b in _expert_pairs(client.adapter)]

        def tails() -> Tensor:
            products = [self.tail(A, B) for A, B in pairs]
            return self.penalty_weight * torch.stack(products).sum()

        return tails

    def client(self, context: ClientContext) -> "HetLoraClient":
        """Prunes its ranks."""
        return HetLoraClient(self, context)

    def server(self, context: ServerContext) -> "HetLoraServer":
        """Pads and weighs."""
        return HetLoraServer(self, context)


class HetLoraClient(RankClient):
    """Prunes a tail by setting it to zero: a row of A and a column of B that are both zero have no
    gradient, so they stay zero, and the present rank can be read off A."""

    method: HetLora

    def take(self, download: Message) -> None:
        """Take pairs of the present rank in; a larger one, after a lost upload, is cut."""
        experts = dict(download["experts"])
        check_shapes(experts, _shrunk(experts, shapes_of(self.shared), self.pairs))
        for a, b in self.pairs.items():
            mine = self.shared[a]
            present = present_rank(mine)
            A, B = experts[a][:present], experts[b][:, :present]
            missing = len(mine) - len(A)
            experts[a], experts[b] = F.pad(A, (0, 0, 0, missing)), F.pad(B, (0, missing))
        super().take(replace(download, groups={**download.groups, "experts": experts}))

    def train(self, round: int) -> None:
        """As any client, then prune."""
        before = {a: self._tail(a) for a in self.pairs}
        super().train(round)
        for a in self.pairs:
            if self._tail(a) < before[a]:
                self._zero_from(self.method.kept(present_rank(self.shared[a])), a)
        parts = [self.parts()[a] for a in self.pairs]
        ranks = {f"{p.role}.{p.expert}/{p.path}": present_rank(p.parameter) for p in parts}
        self.context.log("rank", ranks)

    def upload(self, round: int) -> Message:
        """What was pruned is not uploaded."""
        whole = super().upload(round)
        experts = dict(whole["experts"])
        for a, b in self.pairs.items():
            rank = present_rank(self.shared[a])
            experts[a], experts[b] = experts[a][:rank].clone(), experts[b][:, :rank].clone()
        return replace(whole, groups={**whole.groups, "experts": experts})

    def _tail(self, a: str) -> float:
        return self.method.tail(self.shared[a], self.shared[self.pairs[a]]).item()

    @torch.no_grad()
    def _zero_from(self, rank: int, a: str) -> None:
        """Values and moments."""
        A, B = self.shared[a], self.shared[self.pairs[a]]
        for tensor in (A, *self.training.moments(A)):
            tensor[rank:] = 0
        for tensor in (B, *self.training.moments(B)):
            tensor[:, rank:] = 0


class HetLoraServer(RankServer):
    """Averages padded pairs by the norm of their update."""

    def open(self, round: int, participants: list[ClientId]) -> None:
        """No pair has come in yet."""
        super().open(round, participants)
        self.means: dict[str, PaddedMean] = {}

    def expected(self, client: ClientId, experts: Tensors) -> Shapes:
        """The first shapes, or lower ranks."""
        held = [a for a in self.pairs if a in self.held[client]]
        return _shrunk(experts, self.held[client], {a: self.pairs[a] for a in held})

    def count(self, client: ClientId, a: str, B: Tensor, A: Tensor) -> None:
        """Add a padded and weighted pair; if all updates of a pair are zero they weigh the same."""
        mean = self.means.setdefault(a, PaddedMean(len(self.shared[a])))
        mean.add(B, A, max(product_norm(B, A), 1e-100))

    def close(self, mean: Message) -> None:
        """Replace what was uploaded; rows and columns that nobody sent stay."""
        super().close(mean)
        for a, padded in self.means.items():
            b, rank, (B, A) = self.pairs[a], padded.largest, padded.result()
            self.shared[a] = torch.cat([A[:rank], self.shared[a][rank:]])
            self.shared[b] = torch.cat([B[:, :rank], self.shared[b][:, rank:]], dim=1)


def present_rank(A: Tensor) -> int:
    """The rank of a pair of which some may be pruned: A's rows up to the last that is not zero."""
    rows = A.detach().any(dim=1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 1


def _expert_pairs(adapter: Trainable) -> list[tuple[Part, Part]]:
    """A and B of every shared expert's linear layers."""
    return pairs_of({n: p for n, p in adapter.parts().items() if p.role == "generalist"})


def _shrunk(experts: Tensors, whole: Shapes, pairs: Pairs) -> Shapes:
    """The shapes to expect of pairs that may have lower ranks, but not rank zero."""
    shapes: dict[str, tuple[int, ...]] = {}
    for a, b in pairs.items():
        (rank, columns), (rows, _) = whole[a], whole[b]
        A = experts.get(a)
        if A is not None and A.dim() == 2 and 1 <= len(A) <= rank:
            rank = len(A)
        shapes[a], shapes[b] = (rank, columns), (rows, rank)
    return shapes
