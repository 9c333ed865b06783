"""FlexLoRA, and the code that it shares with HetLoRA: experts with client-specific ranks.

Only the experts on MLPs have client-specific ranks. LoRA pairs on attention have one rank and are
averaged as usual, as in CoMiGS's comparison (arXiv 2409.13931, table 2). The server stores every
expert pair at the highest rank of any client. The server's B includes the gain g (alpha / sqrt(r),
or alpha / r): the server multiplies an uploaded B by the gain of the client that sent it, and
divides B by the gain of the receiving client before a download.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Literal

import torch
from torch import Tensor
from typing_extensions import TypeVar

from coterie.adapters import ROLES, Parameter, pairs_of
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.weights import TOKENS
from coterie.messages import Field as MessageField
from coterie.messages import Message, MessageError, Schema, Shapes, Tensors
from coterie.messages.host import on_host
from coterie.methods.adapter import (
    AdapterClient,
    AdapterMethod,
    AdapterServer,
    Shared,
)
from coterie.methods.contract import ClientContext, ClientId, RunFacts, ServerContext
from coterie.methods.low_rank import LowRankSum
from coterie.methods.settings import Attention, Lora, SharedSets
from coterie.methods.value import PerClient, from_hello
from coterie.training.schedule import Penalty
from coterie.turn import Turn

RELEASED_GAMMA, RELEASED_PENALTY = 0.99, 0.01
"""HetLoRA's gamma and penalty weight in FlexLoRA's `form: released`; FlexLoRA never prunes."""
R = TypeVar("R", bound="RankMethod", default="RankMethod", covariant=True)
Pairs = dict[str, str]
"""A mapping from the name of A to the name of B, for the LoRA pairs of the experts."""


class RankClient(AdapterClient[R], Generic[R]):
    """A client whose messages have a separate group for the LoRA pairs of experts.

    Clients have different ranks, so the shapes of their experts' pairs differ and a mean is not
    defined. The server therefore receives this group, `experts`, from every client individually.
    The group `adapter`, which contains all other shared tensors, is averaged over clients.
    """

    def __init__(self, method: R, context: ClientContext) -> None:
        super().__init__(method, context)
        self.pairs: Pairs = {a.name: b.name for a, b in expert_pairs(self.adapter.parameters())}
        self.ranks = self.present_ranks()
        """The rank of each pair at the start of local training, by the name of the pair's A."""

    def train(self, turn: Turn) -> None:
        self.ranks = self.present_ranks()
        super().train(turn)

    def present_ranks(self) -> dict[str, int]:
        """Return the current rank of each pair, by the name of the pair's A."""
        As = on_host({a: self.shared[a] for a in self.pairs})
        return {name: present_rank(A) for name, A in As.items()}

    def tails(self, gamma: float) -> Tensor:
        """Return the size of each pair's tail (see `tail`), shaped (pairs,), with a gradient."""
        device, sizes = self.context.base.device, []
        for a, rank in self.ranks.items():
            size = tail(self.shared[a], self.shared[self.pairs[a]], pruned_rank(rank, gamma))
            sizes.append(size.to(device))
        return torch.stack(sizes)

    def receive(self, download: Message) -> None:
        shared = {**download["adapter"], **download["experts"]}
        super().receive(Message(download.exchange, {"adapter": shared}))

    def upload(self, turn: Turn) -> Message:
        rest = dict(super().upload(turn)["adapter"])
        experts = {name: rest.pop(name) for pair in self.pairs.items() for name in pair}
        return Message(turn.exchange, {"adapter": rest, "experts": experts})


Pair = tuple[ClientId, str, Tensor, Tensor]
"""A client, the name of a pair's A, the pair's B, shaped (out, r), float64, multiplied by the
client's gain, and the pair's A, shaped (r, in)."""


@dataclass(frozen=True, eq=False)
class Ranked(Shared):
    """The shared parameters, with pairs of the highest rank, and the clients' ranks."""

    ranks: PerClient[dict[str, int]] = PerClient()
    """The current rank of each client's pairs, by the client's name and the name of A."""
    tokens: PerClient[int] = from_hello()
    """The number of each client's training tokens, if the method uses it."""


class RankServer(AdapterServer[R, Ranked], Generic[R]):
    """A server that stores pairs at the highest rank and truncates them to each client's rank."""

    def __init__(self, method: R, context: ServerContext) -> None:
        super().__init__(method, context)
        self.pairs: Pairs = {a.name: b.name for a, b in expert_pairs(self.parameters)}

    def initial(self) -> Ranked:
        return Ranked(self.start)

    def shape(self, client: ClientId, name: str) -> tuple[int, ...]:
        largest, parameter = super().shape(client, name), self.parameters[name]
        if parameter.role != "generalist":
            return largest
        rank = self.method.layout(client).rank
        return (rank, largest[1]) if parameter.factor == "A" else (largest[0], rank)

    def declared(self, client: ClientId, hello: Message) -> Shapes:
        shapes = super().declared(client, hello)
        for a, b in self.pairs.items():
            if (a in shapes) != (b in shapes):
                raise MessageError(
                    f"The client {client!r} declares only one of the tensors {a!r} and {b!r}; "
                    "it must declare both or neither."
                )
        return shapes

    def join(self, value: Ranked, client: ClientId, hello: Message) -> Ranked:
        value = super().join(value, client, hello)
        held = value.held[client]
        ranks = {a: held[a][0] for a in self.pairs if a in held}
        return replace(value, ranks=value.ranks | {client: ranks})

    def download(self, value: Ranked, client: ClientId, exchange: Exchange) -> Message:
        message = super().download(value, client, exchange)
        rest, experts = dict(message["adapter"]), {}
        for a, rank in value.ranks[client].items():
            b = self.pairs[a]
            experts[a] = rest.pop(a)[:rank]
            experts[b] = rest.pop(b)[:, :rank] / self.method.gain(client)
        return replace(message, groups={"adapter": rest, "experts": experts})

    def expects(self, value: Ranked, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        held, experts = value.held[client], {*self.pairs, *self.pairs.values()}
        return {
            "adapter": {name: shape for name, shape in held.items() if name not in experts},
            "experts": {name: shape for name, shape in held.items() if name in experts},
        }

    def aggregate(self, value: Ranked, exchange: Exchange) -> Ranked:
        value, ranks = super().aggregate(value, exchange), dict(value.ranks)

        def pairs() -> Iterator[Pair]:
            for client, experts in exchange.each("experts").items():
                ranks[client] = {a: len(experts[a]) for a in ranks[client]}
                for a in ranks[client]:
                    B = self.method.gain(client) * experts[self.pairs[a]].double()
                    yield client, a, B, experts[a]

        adapter = {**value.adapter, **self.pairs_after(value, pairs())}
        return replace(value, adapter=adapter, ranks=PerClient(ranks))

    def pairs_after(self, value: Ranked, pairs: Iterator[Pair]) -> Tensors:
        """Return the new A and B of the pairs that clients uploaded, under their names.

        Args:
            value: The value, whose experts are those before the exchange.
            pairs: The clients' pairs, in the order of the clients' names.
        """
        raise NotImplementedError


class RankMethod(AdapterMethod):
    """A method whose experts have client-specific ranks."""

    mixes_ranks: ClassVar[bool] = True
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    hello_fields: ClassVar[tuple[MessageField, ...]] = ()
    """The fields of a client's hello, other than the shapes of the shared tensors."""

    mlp: SharedSets = SharedSets(sets=1, rank=16)
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    form: Literal["paper", "released"] = "paper"
    """formulas of the paper, or of the code that CoMiGS's authors released for their comparison"""

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        rest = MessageField(
            "adapter",
            ROLES.get("dense").summary,
            reduce="mean",
            copies=lambda parameter, _: int(parameter.role == "dense"),
        )
        experts = MessageField(
            "experts",
            ROLES.get("generalist").summary,
            copies=lambda parameter, _: int(parameter.role == "generalist"),
        )
        groups = rest, experts
        return Schema((*super().schema().hello, *self.hello_fields), groups, groups)

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.server_optimiser and self.attention is None:
            raise CoterieError(
                f"aggregation.optimiser has no effect with the method {self.name!r} and "
                "`attention: null`, because no parameter is replaced by a mean; remove "
                "aggregation.optimiser."
            )

    def gain(self, client: ClientId) -> float:
        """Return the factor by which the server multiplies a client's B.

        Args:
            client: The client's name.

        Returns:
            By default, the gain of the client's adapter (alpha / sqrt(r), or alpha / r).
        """
        layout = self.layout(client)
        return layout.gain(layout.rank)


class FlexLora(RankMethod):
    """The mean of the clients' full updates, truncated to each client's rank by SVD.

    Let client k have n_k training tokens and the gain g_k. The mean update is
    `W = sum_k n_k g_k B_k A_k / sum_k n_k = U S V^T`, and client k receives `B = U_r S_r / g_k` and
    `A = V_r^T`, so that `g_k B A` is the best approximation of W with the client's rank r.

    With `form: released`, as in the code that the authors of CoMiGS used for their comparison, the
    server always uses g_k = alpha / r, even when the clients train with another scale. The clients'
    losses then include HetLoRA's penalty, but no pair is pruned.
    """

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    summary: ClassVar[str] = (
        "client-specific ranks; full updates averaged and truncated to each rank by SVD"
    )
    hello_fields: ClassVar[tuple[MessageField, ...]] = (TOKENS,)

    def gain(self, client: ClientId) -> float:
        layout = self.layout(client)
        return layout.alpha / layout.rank if self.form == "released" else super().gain(client)

    def penalty(self, client: AdapterClient) -> Penalty | None:
        if self.form == "paper":
            return None
        return weighted_tails(client, RELEASED_GAMMA, RELEASED_PENALTY)

    def client(self, context: ClientContext) -> "FlexLoraClient":
        return FlexLoraClient(self, context)

    def server(self, context: ServerContext) -> "FlexLoraServer":
        return FlexLoraServer(self, context)


class FlexLoraClient(RankClient):
    """A client whose weight in the mean is its number of training tokens."""

    def hello(self) -> Message:
        tokens = len(self.context.data.train.ids)
        return Message(values={**super().hello().values, TOKENS.name: tokens})


class FlexLoraServer(RankServer):
    """A server that averages updates of all ranks and factorises the mean by SVD into new pairs."""

    def join(self, value: Ranked, client: ClientId, hello: Message) -> Ranked:
        tokens = hello.values.get(TOKENS.name)
        if type(tokens) is not int or tokens < 1:
            raise MessageError(f"The client {client!r} did not send its number of training tokens.")
        value = super().join(value, client, hello)
        return replace(value, tokens=value.tokens | {client: tokens})

    def pairs_after(self, value: Ranked, pairs: Iterator[Pair]) -> Tensors:
        sums: dict[str, LowRankSum] = {}
        for client, a, B, A in pairs:
            if a not in sums:
                sums[a] = LowRankSum()
                # If the rank of the sum is lower than a client's rank, the SVD still needs non-zero
                # directions for the remaining rows of A; rows of zeros could never be learnt.
                sums[a].add(0 * value.adapter[self.pairs[a]], value.adapter[a])
            sums[a].add(value.tokens[client] * B, A)
            sums[a].weight += value.tokens[client]
        mean: dict[str, Tensor] = {}
        while sums:
            a, total = sums.popitem()
            B, A = total.factors(len(value.adapter[a]))
            mean[a] = A.float().contiguous()
            mean[self.pairs[a]] = (B / total.weight).float()
        return mean


def pruned_rank(rank: int, gamma: float) -> int:
    """Return max(1, floor(gamma * rank)), the rank of a LoRA pair after pruning."""
    return max(1, math.floor(gamma * rank))


def tail(A: Tensor, B: Tensor, rank: int) -> Tensor:
    """Compute `||B_tail||_F ||A_tail||_F`, the size of a LoRA pair's tail.

    The tail consists of the rows of A and the columns of B with an index of at least `rank`. If the
    pair has already been pruned, pruned rows remain in A as zeros.

    Args:
        A: The pair's A, shaped (r, in).
        B: The pair's B, shaped (out, r).
        rank: The rank of the pair without its tail.

    Returns:
        A scalar.
    """
    return torch.linalg.norm(B[:, rank:]) * torch.linalg.norm(A[rank:])


def weighted_tails(client: AdapterClient, gamma: float, weight: float) -> Penalty:
    """Return a function that computes HetLoRA's penalty.

    The penalty is `weight` times the sum of the tails of all LoRA pairs of the client's shared
    experts.
    """
    assert isinstance(client, RankClient), "only RankClient knows the ranks of its pairs"
    return lambda: weight * client.tails(gamma).sum()


def present_rank(A: Tensor) -> int:
    """Return a pruned pair's current rank.

    The rank is the number of rows of A up to and including the last non-zero row. If all rows are
    zero, the rank is 1.
    """
    rows = A.detach().any(dim=1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 1


def expert_pairs(parameters: Mapping[str, Parameter]) -> list[tuple[Parameter, Parameter]]:
    """Return the A and B of every LoRA pair of the shared experts."""
    return pairs_of({name: p for name, p in parameters.items() if p.role == "generalist"})
