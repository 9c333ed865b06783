"""FlexLoRA and HetLoRA: clients whose low-rank experts have ranks of their own.

Ranks concern the MLPs' experts; attention's pairs have one rank and are averaged uniformly, as in
CoMiGS's comparison (arXiv 2409.13931, table 2). The server holds every pair at the largest rank,
in units of the update: `g B` and A, with g the gain (alpha / sqrt(r), or alpha / r) of the client
that sent it; B is divided by the gain of the client that receives it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from coterie.adapters import Adapter
from coterie.aggregation import LowRankSum, product_norm
from coterie.exchange import Field as Travels
from coterie.exchange import Message, MessageError, Schema, Shapes, State, check_shapes
from coterie.methods.adapter import AdapterClient, AdapterServer
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.lora import LoraMethod, PerClient
from coterie.training.schedule import Penalty


class RankMethod(LoraMethod):
    """One LoRA set on every MLP, with a rank for each client; everything is trained."""

    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    mixes_ranks: ClassVar[bool] = True

    generalists: PerClient = Field(default=1, description="LoRA sets whose outputs are averaged")
    rank: PerClient = Field(default=16, description="r of the MLPs' pairs, each client's own")


class RankServer(AdapterServer):
    """Holds pairs at the largest rank; a client gets the first rows and columns of them."""

    method: RankMethod

    def __init__(self, method: RankMethod, context: ServerContext) -> None:
        super().__init__(method, context)
        self.ranks: dict[ClientId, dict[str, int]] = {}
        """The present rank of each of a client's pairs."""

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        """The largest shape, with the client's rank for an expert's pair."""
        largest = super().shape(client, name)
        if self.roles[name] != "generalist":
            return largest
        rank = self.method.layout(client).rank
        return (rank, largest[1]) if name.endswith(".A") else (largest[0], rank)

    def join(self, client: ClientId, hello: Message) -> None:
        """Note the client's ranks too."""
        super().join(client, hello)
        self.ranks[client] = self._ranks(self.held[client])

    def download(self, client: ClientId) -> Message:
        """Pairs cut to the client's present ranks, in units of its gain."""
        message = super().download(client)
        tensors = dict(message.tensors)
        for pair, rank in self.ranks[client].items():
            tensors[f"{pair}.A"] = tensors[f"{pair}.A"][:rank]
            tensors[f"{pair}.B"] = tensors[f"{pair}.B"][:, :rank] / self._gain(client)
        return Message(message.round, tensors)

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count an upload in: experts' pairs as the method has it, the rest uniformly."""
        shapes = self.expected(client, upload)
        check_shapes(upload, shapes)
        self.ranks[client] = self._ranks(shapes)
        rest = dict(upload.tensors)
        for pair in self.ranks[client]:
            A, B = rest.pop(f"{pair}.A"), rest.pop(f"{pair}.B")
            self.count(client, pair, self._gain(client) * B.double(), A)
        self.mean.add(rest)

    def expected(self, client: ClientId, upload: Message) -> Shapes:
        """The shapes that an upload must have."""
        return self.held[client]

    def count(self, client: ClientId, pair: str, B: Tensor, A: Tensor) -> None:
        """Count one client's pair in; B: (out, r) has the client's gain in it, A: (r, in)."""
        raise NotImplementedError

    def state(self) -> State:
        """The shared parameters and the clients' ranks."""
        state = super().state()
        return State(state.tensors, {**state.values, "ranks": self.ranks})

    def restore(self, state: State) -> None:
        """Take both back."""
        super().restore(state)
        self.ranks = dict(state.values["ranks"])

    def _gain(self, client: ClientId) -> float:
        layout = self.method.layout(client)
        return layout.gain(layout.rank)

    def _ranks(self, shapes: Shapes) -> dict[str, int]:
        return {
            name.removesuffix(".A"): shape[0]
            for name, shape in shapes.items()
            if self.roles[name] == "generalist" and name.endswith(".A")
        }


class FlexLora(RankMethod):
    """The mean of the clients' full updates, cut to each client's rank by its SVD.

    With n_k training tokens and gain g_k of client k, the update is
    `W = sum_k n_k g_k B_k A_k / sum_k n_k = U S V^T`, and client k gets `B = U_r S_r / g_k`,
    `A = V_r^T`: of all updates of its rank r, `g_k B A` is the one nearest to W.
    """

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    summary: ClassVar[str] = "a rank per client; full updates are averaged and cut to it by SVD"

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As the family's, and the number of training tokens."""
        schema = super().schema()
        tokens = Travels("tokens", "how many training tokens the client has: its weight", "json")
        return Schema(hello=(*schema.hello, tokens), up=schema.up, down=schema.down)

    def client(self, context: ClientContext) -> "FlexLoraClient":
        """Trains like any other; says how much text it has."""
        return FlexLoraClient(self, context)

    def server(self, context: ServerContext) -> "FlexLoraServer":
        """Averages full updates."""
        return FlexLoraServer(self, context)


class FlexLoraClient(AdapterClient):
    """Its weight is its number of training tokens."""

    def hello(self) -> Message:
        """Shapes and weight."""
        tokens = len(self.context.data.train.ids)
        return Message(values={**super().hello().values, "tokens": tokens})


class FlexLoraServer(RankServer):
    """Sums updates of any rank; their SVD takes the place of the pairs."""

    def __init__(self, method: FlexLora, context: ServerContext) -> None:
        super().__init__(method, context)
        self.tokens: dict[ClientId, int] = {}
        self.sums: dict[str, LowRankSum] = {}
        self.weights: dict[str, int] = {}

    def join(self, client: ClientId, hello: Message) -> None:
        """Note the client's weight."""
        tokens = hello.values.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise MessageError(f"The client {client!r} gives no number of training tokens.")
        super().join(client, hello)
        self.tokens[client] = tokens

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Start the sums."""
        super().open(round, participants)
        self.sums, self.weights = {}, {}

    def count(self, client: ClientId, pair: str, B: Tensor, A: Tensor) -> None:
        """Add a weighted update."""
        if pair not in self.sums:
            self.sums[pair] = LowRankSum()
            # If the round's updates have fewer directions than a client has ranks, A is filled up
            # with directions that are not zero, or they could never be learnt.
            first = self.shared[f"{pair}.A"], self.shared[f"{pair}.B"]
            self.sums[pair].add(0 * first[1], first[0])
        weight = self.tokens[client]
        self.sums[pair].add(weight * B, A)
        self.weights[pair] = self.weights.get(pair, 0) + weight

    def close(self) -> None:
        """Replace what was uploaded by its mean."""
        super().close()
        for pair in list(self.sums):
            B, A = self.sums.pop(pair).factors(len(self.shared[f"{pair}.A"]))
            self.shared[f"{pair}.A"] = A.float().contiguous()
            self.shared[f"{pair}.B"] = (B / self.weights[pair]).float()


class HetLora(RankMethod):
    """Zero-padded pairs, averaged by the size of the clients' updates; ranks shrink by themselves.

    The server pads A_k and g_k B_k with zeros to the largest rank and weighs them, for every linear
    layer, by `||g_k B_k A_k||_F / sum_j ||g_j B_j A_j||_F`. With tail the rows of A and columns of
    B from floor(gamma r) on, a client adds `penalty_weight * ||B_tail||_F ||A_tail||_F`, summed
    over layers, to its loss; where that product has become smaller in a round, it drops the tail
    for good. Its gain stays that of its first rank.
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"
    summary: ClassVar[str] = "a rank per client that can shrink; zero-padded pairs are averaged"

    gamma: float = Field(default=0.99, gt=0, le=1, description="share of the rank that is kept")
    penalty_weight: float = Field(
        default=5e-4, ge=0, description="weight of the tails' norms in the loss"
    )

    def kept(self, rank: int) -> int:
        """The rank that is left when the tail is pruned."""
        return max(1, math.floor(self.gamma * rank))

    def tail(self, A: Tensor, B: Tensor) -> Tensor:
        """`||B_tail||_F ||A_tail||_F` of a pair at its present rank: a scalar."""
        kept = self.kept(present_rank(A))
        return torch.linalg.norm(B[:, kept:]) * torch.linalg.norm(A[kept:])

    def penalty(self, adapter: Adapter) -> Penalty:
        """The weighted sum of the tails."""

        def tails(start: Mapping[str, Tensor]) -> Tensor:
            products = [self.tail(A, B) for A, B in _pairs(adapter).values()]
            return self.penalty_weight * torch.stack(products).sum()

        return tails

    def client(self, context: ClientContext) -> "HetLoraClient":
        """Prunes its ranks."""
        return HetLoraClient(self, context)

    def server(self, context: ServerContext) -> "HetLoraServer":
        """Pads and weighs."""
        return HetLoraServer(self, context)


class HetLoraClient(AdapterClient):
    """Prunes a tail by setting it to zero: a row of A and a column of B that are both zero have no
    gradient, so they stay zero, and the present rank can be read off A."""

    method: HetLora
    adapter: Adapter

    def __init__(self, method: HetLora, context: ClientContext) -> None:
        super().__init__(method, context)
        self.pairs = _pairs(self.adapter)
        self.tails: dict[str, float] = {}
        """Of every pair, at the start of the round."""

    def step(self, download: Message) -> Message:
        """As any client, then prune; what was pruned is not uploaded."""
        tensors, ranks = dict(super().step(download).tensors), {}
        for pair, (A, B) in self.pairs.items():
            rank = present_rank(A)
            if self.method.tail(A, B).item() < self.tails[pair]:
                rank = self.method.kept(rank)
                self._zero_from(rank, pair)
            tensors[f"{pair}.A"] = A.detach()[:rank].clone()
            tensors[f"{pair}.B"] = B.detach()[:, :rank].clone()
            ranks[pair] = rank
        self.context.log("rank", ranks)
        return Message(download.round, tensors)

    def finish(self, download: Message) -> None:
        """Take pairs of the present rank in; a larger one, after a lost upload, is cut."""
        whole = {name: tuple(p.shape) for name, p in self.shared.items()}
        check_shapes(download, _shrunk(download, whole, list(self.pairs)))
        tensors = dict(download.tensors)
        for pair, (mine, _) in self.pairs.items():
            present = present_rank(mine)
            A, B = tensors[f"{pair}.A"][:present], tensors[f"{pair}.B"][:, :present]
            missing = len(mine) - len(A)
            tensors[f"{pair}.A"] = F.pad(A, (0, 0, 0, missing))
            tensors[f"{pair}.B"] = F.pad(B, (0, missing))
        super().finish(Message(download.round, tensors))
        self.tails = {pair: self.method.tail(A, B).item() for pair, (A, B) in self.pairs.items()}

    @torch.no_grad()
    def _zero_from(self, rank: int, pair: str) -> None:
        """Values and moments."""
        for name, tensor in (self.shared | self.training.tensors()).items():
            if name.endswith(f"{pair}.A") and tensor.dim():
                tensor[rank:] = 0
            elif name.endswith(f"{pair}.B") and tensor.dim():
                tensor[:, rank:] = 0


class HetLoraServer(RankServer):
    """Averages padded pairs by the norm of their update."""

    def open(self, round: int, participants: list[ClientId]) -> None:
        """No pair has come in yet."""
        super().open(round, participants)
        self.largest: dict[str, int] = {}

    def expected(self, client: ClientId, upload: Message) -> Shapes:
        """The first shapes, or lower ranks."""
        held = self.held[client]
        return _shrunk(upload, held, list(self._ranks(held)))

    def count(self, client: ClientId, pair: str, B: Tensor, A: Tensor) -> None:
        """Add a padded and weighted pair; if all updates of a pair are zero they weigh the same."""
        missing = len(self.shared[f"{pair}.A"]) - len(A)
        padded = {f"{pair}.A": F.pad(A, (0, 0, 0, missing)), f"{pair}.B": F.pad(B, (0, missing))}
        self.mean.add(padded, max(product_norm(B, A), 1e-100))
        self.largest[pair] = max(len(A), self.largest.get(pair, 0))

    def close(self) -> None:
        """Replace what was uploaded; rows and columns that nobody sent stay."""
        before = dict(self.shared)
        super().close()
        for pair, rank in self.largest.items():
            a, b = f"{pair}.A", f"{pair}.B"
            self.shared[a] = torch.cat([self.shared[a][:rank], before[a][rank:]])
            self.shared[b] = torch.cat([self.shared[b][:, :rank], before[b][:, rank:]], dim=1)


def present_rank(A: Tensor) -> int:
    """The rank of a pair of which some may be pruned: A's rows up to the last that is not zero."""
    rows = A.detach().any(dim=1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 1


def _pairs(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every shared expert's linear layers."""
    found = adapter.parameters("generalist")
    pairs = [name.removesuffix(".A") for name in found if name.endswith(".A")]
    return {pair: (found[f"{pair}.A"], found[f"{pair}.B"]) for pair in pairs}


def _shrunk(message: Message, whole: Shapes, pairs: Sequence[str]) -> Shapes:
    """The shapes to expect of a message whose pairs may have lower ranks, but not rank zero."""
    shapes = dict(whole)
    for pair in pairs:
        (rank, columns), (rows, _) = whole[f"{pair}.A"], whole[f"{pair}.B"]
        A = message.tensors.get(f"{pair}.A")
        if A is not None and A.dim() == 2 and 1 <= len(A) <= rank:
            rank = len(A)
        shapes[f"{pair}.A"], shapes[f"{pair}.B"] = (rank, columns), (rows, rank)
    return shapes
