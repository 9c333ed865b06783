"""HetLoRA (arXiv 2401.06432): client-specific ranks that shrink during training."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from coterie.exchanges.exchange import Exchange
from coterie.messages import Message, Shapes, Tensors, check_shapes
from coterie.messages.names import RANK
from coterie.methods.adapter import AdapterClient
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.low_rank import PaddedMean, product_norm
from coterie.methods.ranks import (
    Pair,
    Pairs,
    RankClient,
    Ranked,
    RankMethod,
    RankServer,
    pruned_rank,
    weighted_tails,
)
from coterie.methods.tensors import shapes_of
from coterie.training.schedule import Penalty
from coterie.turn import Turn


class HetLora(RankMethod):
    """HetLoRA: a weighted mean of zero-padded LoRA pairs. Clients prune the ranks of their pairs.

    The LoRA pair of client k on a linear layer changes the layer's weight by `g_k B_k A_k`, where
    g_k is the client's gain. For every layer, the server pads A_k and g_k B_k with zeros to the
    highest rank of any client, and averages them over clients with the weights
    `||g_k B_k A_k||_F / sum_j ||g_j B_j A_j||_F`.

    The tail of a pair of rank r consists of the rows of A and the columns of B with an index of at
    least floor(gamma r). A client adds `penalty_weight * ||B_tail||_F ||A_tail||_F`, summed over
    layers, to its loss. If `||B_tail||_F ||A_tail||_F` of a pair decreases during a round, the
    client removes the pair's tail permanently. The gain of a pruned pair does not change: it is
    computed from the pair's initial rank.

    With `form: released`, as in the code that the authors of CoMiGS used for their comparison, A_k
    is weighted by the norm of A_k, B_k by the norm of B_k, and the server uses g_k = 1.
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"
    summary: ClassVar[str] = (
        "client-specific ranks that can shrink; zero-padded LoRA pairs averaged"
    )

    gamma: float = Field(default=0.99, gt=0, le=1)
    """fraction of the rank that remains after pruning"""
    penalty_weight: float = Field(default=5e-4, ge=0)
    """weight of the pruning penalty in the loss"""

    def gain(self, client: ClientId) -> float:
        return 1.0 if self.form == "released" else super().gain(client)

    def weights(self, B: Tensor, A: Tensor) -> tuple[float, float]:
        """Return the weights of a client's B and A in the means over clients.

        Args:
            B: The client's B, shaped (out, r) and already multiplied by the client's gain.
            A: The client's A, shaped (r, in).

        Returns:
            The weight of B and the weight of A. Both are positive, even if B or A is zero, so that
            the weights of all clients never sum to 0.
        """
        if self.form == "released":
            norms = torch.linalg.norm(B).item(), torch.linalg.norm(A).item()
        else:
            norms = (product_norm(B, A),) * 2
        return max(norms[0], 1e-100), max(norms[1], 1e-100)

    def penalty(self, client: AdapterClient) -> Penalty:
        return weighted_tails(client, self.gamma, self.penalty_weight)

    def client(self, context: ClientContext) -> "HetLoraClient":
        return HetLoraClient(self, context)

    def server(self, context: ServerContext) -> "HetLoraServer":
        return HetLoraServer(self, context)


class HetLoraClient(RankClient[HetLora]):
    """A client that prunes the tail of a LoRA pair by setting the tail to zero.

    If a row of A and the corresponding column of B are both zero, the gradients of this row and
    column are zero, so both stay zero. The current rank of a pair can therefore be derived from A.
    """

    def receive(self, download: Message) -> None:
        experts = dict(download["experts"])
        check_shapes(experts, _shrunk(experts, shapes_of(self.shared), self.pairs))
        for a, rank in self.present_ranks().items():
            b = self.pairs[a]
            # If an upload was lost, the server may still send the rank from before the pruning.
            A, B = experts[a][:rank], experts[b][:, :rank]
            missing = len(self.shared[a]) - len(A)
            experts[a], experts[b] = F.pad(A, (0, 0, 0, missing)), F.pad(B, (0, missing))
        super().receive(replace(download, groups={**download.groups, "experts": experts}))

    def train(self, turn: Turn) -> None:
        gamma, self.ranks = self.method.gamma, self.present_ranks()
        before = self.tails(gamma).tolist()
        super().train(turn)
        after = self.tails(gamma).tolist()
        for (a, rank), old, new in zip(self.ranks.items(), before, after, strict=True):
            if new < old:
                self._zero_from(pruned_rank(rank, gamma), a)
        parameters = self.parameters()
        described = {a: f"{p.role}.{p.expert}/{p.path}" for a, p in parameters.items()}
        self.context.log(RANK, {described[a]: r for a, r in self.present_ranks().items()})

    def upload(self, turn: Turn) -> Message:
        upload = super().upload(turn)
        experts = dict(upload["experts"])
        for a, rank in self.present_ranks().items():
            b = self.pairs[a]
            experts[a], experts[b] = experts[a][:rank].clone(), experts[b][:, :rank].clone()
        return replace(upload, groups={**upload.groups, "experts": experts})

    @torch.no_grad()
    def _zero_from(self, rank: int, a: str) -> None:
        """Set a pair's values and optimiser moments to zero at every rank index >= `rank`."""
        A, B = self.shared[a], self.shared[self.pairs[a]]
        for tensor in (A, *self.training.moments(A)):
            tensor[rank:] = 0
        for tensor in (B, *self.training.moments(B)):
            tensor[:, rank:] = 0


class HetLoraServer(RankServer[HetLora]):
    """A server that averages zero-padded LoRA pairs, weighted by norms of the pairs."""

    def check(self, value: Ranked, client: ClientId, upload: Message, exchange: Exchange) -> None:
        expected, pairs = self.expects(value, client, exchange), value.ranks[client]
        check_shapes(upload["adapter"], expected["adapter"])
        experts = upload["experts"]
        shapes = _shrunk(experts, expected["experts"], {a: self.pairs[a] for a in pairs})
        check_shapes(experts, shapes)

    def pairs_after(self, value: Ranked, pairs: Iterator[Pair]) -> Tensors:
        means: dict[str, PaddedMean] = {}
        for _, a, B, A in pairs:
            tensors, weights = {self.pairs[a]: B, a: A}, self.method.weights(B, A)
            for (name, tensor), weight in zip(tensors.items(), weights, strict=True):
                if name not in means:
                    means[name] = PaddedMean(value.adapter[name])
                means[name].add(tensor, weight)
        return {name: mean.result() for name, mean in means.items()}


def _shrunk(experts: Tensors, initial: Shapes, pairs: Pairs) -> Shapes:
    """Return the shapes that the tensors of pruned LoRA pairs must have in a message.

    Args:
        experts: The tensors of the message's group `experts`, which are the A and B of all LoRA
            pairs. A pair may have any rank from 1 to its initial rank.
        initial: A mapping from the name of each tensor to the tensor's shape before any pruning.
        pairs: A mapping from the name of each pair's A to the name of the pair's B.

    Returns:
        A mapping from the name of each tensor to the tensor's shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for a, b in pairs.items():
        (rank, columns), (rows, _) = initial[a], initial[b]
        A = experts.get(a)
        if A is not None and A.dim() == 2 and 1 <= len(A) <= rank:
            rank = len(A)
        shapes[a], shapes[b] = (rank, columns), (rows, rank)
    return shapes
