"""HetLoRA (arXiv 2401.06432): ranks of the clients' own, which shrink by themselves."""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from coterie.aggregation.low_rank import PaddedMean, product_norm
from coterie.messages import Message, Shapes, Tensors, check_shapes
from coterie.messages.names import RANK
from coterie.methods.adapter import AdapterClient, shapes_of
from coterie.methods.contract import ClientContext, ClientId, Holders, ServerContext
from coterie.methods.ranks import (
    Pairs,
    RankClient,
    RankMethod,
    RankServer,
    kept,
    present_rank,
    tail,
    weighted_tails,
)
from coterie.training.schedule import Penalty


class HetLora(RankMethod):
    """Zero-padded pairs, averaged by the size of the clients' updates; ranks shrink by themselves.

    The server pads A_k and g_k B_k with zeros to the largest rank and weighs them, for every linear
    layer, by `||g_k B_k A_k||_F / sum_j ||g_j B_j A_j||_F`. With tail the rows of A and columns of
    B from floor(gamma r) on, a client adds `penalty_weight * ||B_tail||_F ||A_tail||_F`, summed
    over layers, to its loss; where that product has become smaller in a round, it drops the tail
    for good. Its gain stays that of its first rank. (Released with CoMiGS: A_k and B_k are weighed
    apart, each by its own norm, and g_k is 1 on the server.)
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"
    summary: ClassVar[str] = (
        "client-specific ranks that can shrink; zero-padded LoRA pairs averaged"
    )

    gamma: float = Field(default=0.99, gt=0, le=1)
    """fraction of the rank kept when pruning"""
    penalty_weight: float = Field(default=5e-4, ge=0)
    """weight of the pruning penalty in the loss"""

    def gain(self, client: ClientId) -> float:
        """As released, pairs are averaged as they are."""
        return 1.0 if self.form == "released" else super().gain(client)

    def weights(self, B: Tensor, A: Tensor) -> tuple[float, float]:
        """What a pair's B: (out, r) and A: (r, in) weigh in their means; never nothing."""
        if self.form == "released":
            norms = torch.linalg.norm(B).item(), torch.linalg.norm(A).item()
        else:
            norms = (product_norm(B, A),) * 2
        return max(norms[0], 1e-100), max(norms[1], 1e-100)

    def penalty(self, client: AdapterClient) -> Penalty:
        """The weighted sum of the tails."""
        return weighted_tails(client, self.gamma, self.penalty_weight)

    def client(self, context: ClientContext) -> "HetLoraClient":
        """Prunes its ranks."""
        return HetLoraClient(self, context)

    def server(self, context: ServerContext) -> "HetLoraServer":
        """Pads and weighs."""
        return HetLoraServer(self, context)


class HetLoraClient(RankClient[HetLora]):
    """Prunes a tail by setting it to zero: a row of A and a column of B that are both zero have no
    gradient, so they stay zero, and the present rank can be read off A."""

    def receive(self, download: Message) -> None:
        """Take pairs of the present rank in; a larger one, after a lost upload, is cut."""
        experts = dict(download["experts"])
        check_shapes(experts, _shrunk(experts, shapes_of(self.shared), self.pairs))
        for a, b in self.pairs.items():
            mine = self.shared[a]
            present = present_rank(mine)
            A, B = experts[a][:present], experts[b][:, :present]
            missing = len(mine) - len(A)
            experts[a], experts[b] = F.pad(A, (0, 0, 0, missing)), F.pad(B, (0, missing))
        super().receive(replace(download, groups={**download.groups, "experts": experts}))

    def train(self, exchange: int) -> None:
        """As any client, then prune."""
        before = {a: self._tail(a) for a in self.pairs}
        super().train(exchange)
        for a in self.pairs:
            if self._tail(a) < before[a]:
                self._zero_from(kept(present_rank(self.shared[a]), self.method.gamma), a)
        parameters = [self.parameters()[a] for a in self.pairs]
        ranks = {f"{p.role}.{p.expert}/{p.path}": present_rank(p.tensor) for p in parameters}
        self.context.log(RANK, ranks)

    def upload(self, exchange: int) -> Message:
        """What was pruned is not uploaded."""
        whole = super().upload(exchange)
        experts = dict(whole["experts"])
        for a, b in self.pairs.items():
            rank = present_rank(self.shared[a])
            experts[a], experts[b] = experts[a][:rank].clone(), experts[b][:, :rank].clone()
        return replace(whole, groups={**whole.groups, "experts": experts})

    def _tail(self, a: str) -> float:
        return tail(self.shared[a], self.shared[self.pairs[a]], self.method.gamma).item()

    @torch.no_grad()
    def _zero_from(self, rank: int, a: str) -> None:
        """Values and moments."""
        A, B = self.shared[a], self.shared[self.pairs[a]]
        for tensor in (A, *self.training.moments(A)):
            tensor[rank:] = 0
        for tensor in (B, *self.training.moments(B)):
            tensor[:, rank:] = 0


class HetLoraServer(RankServer[HetLora]):
    """Averages padded pairs by the norm of their update."""

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """No pair has come in yet."""
        super().start_round(exchange, participants)
        self.means: dict[str, PaddedMean] = {}
        """By the name of an A or a B."""

    def expected(self, client: ClientId, experts: Tensors) -> Shapes:
        """The first shapes, or lower ranks."""
        pairs = {a: self.pairs[a] for a in self.ranks[client]}
        return _shrunk(experts, self.held[client], pairs)

    def count(self, client: ClientId, a: str, B: Tensor, A: Tensor) -> None:
        """Add a padded and weighted pair; if all updates of a pair are zero they weigh the same."""
        tensors = {self.pairs[a]: B, a: A}
        for (name, tensor), weight in zip(tensors.items(), self.method.weights(B, A), strict=True):
            if name not in self.means:
                self.means[name] = PaddedMean(self.shared[name])
            self.means[name].add(tensor, weight)

    def end_round(self, mean: Message, held: Holders) -> None:
        """Replace what was uploaded; rows and columns that nobody sent stay."""
        super().end_round(mean, held)
        while self.means:
            name, padded = self.means.popitem()
            self.shared[name] = padded.result()


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
