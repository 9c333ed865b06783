"""PCL: each client averages all clients' LoRA updates with its own trust weights.

Personalised collaborative fine-tuning (arXiv 2404.09753). Clients train alone for `warmup` rounds.
Then, at intervals of `every` rounds, clients exchange adapters through the server, which only
forwards them. Each client i scores all clients' models locally, converts the scores to trust
weights w_ij (row i of the trust matrix), and mixes: theta_i <- theta_i + sum_j w_ij Delta_j
(algorithm 1). Here theta_i is the adapter of client i after the previous exchange, and Delta_j is
the change of client j's adapter since then. In the authors' code (`form: released`), clients
average adapters instead of updates and draw their own initial A, and strategies use other scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from coterie.adapters import Adapter, Trainable
from coterie.data.split import AnyBatch
from coterie.errors import plural
from coterie.evaluation.evaluate import mean_loss
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import (
    Groups,
    Message,
    Schema,
    Shapes,
    Tensors,
    check_shapes,
)
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, Shared
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.settings import Attention, Lora, PhasedRouter, SharedSets
from coterie.methods.tensors import copied, copy, shapes_of
from coterie.methods.value import PerClient
from coterie.training.spec import TrainingSpec
from coterie.transforms.context import Row
from coterie.turn import Turn

Uploads = Mapping[ClientId, Message]


class PCL(AdapterMethod):
    """The base class of PCL's strategies, which differ in how clients compute trust weights.

    The defaults of `mlp`, `attention`, `warmup` and `every` follow the CoMiGS paper's PCL baseline.
    """

    paper: ClassVar[str] = "arXiv 2404.09753"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shared_roles: ClassVar[tuple[str, ...]] = ("dense", "generalist", "router")
    evidence_fields: ClassVar[tuple[MessageField, ...]] = ()
    """The uploaded fields, other than adapters and updates, from which scores are computed."""
    scores_weights: ClassVar[bool] = True
    """Whether scores are computed from adapters. If so, clients upload adapters and updates."""

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    router: PhasedRouter | None = None
    warmup: int = Field(default=5, ge=1)
    """rounds before the first exchange"""
    every: int = Field(default=2, ge=1)
    """rounds between exchanges"""
    mix: bool = True
    """mix models by trust weights; false: only compute and record trust weights"""
    form: Literal["paper", "released"] = "paper"
    """formulas of the paper, or of the code that the paper's authors released"""

    def due(self, rounds: int) -> bool:
        """Return whether clients exchange their adapters after `rounds` completed rounds."""
        return rounds >= self.warmup and (rounds - self.warmup) % self.every == 0

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        inherited = super().schema()
        update = MessageField("update", "change of the adapter since the last exchange")
        groups = {"adapter": replace(inherited.up[0], reduce="each"), "update": update}
        when = f"at intervals of {plural(self.every, 'round')}, from round {self.warmup} on"
        fields = (*(groups[name] for name in self.groups), *self.evidence_fields)
        up = tuple(replace(field, when=when) for field in fields)
        return Schema(inherited.hello, up, tuple(replace(field, peers=True) for field in up))

    @property
    def groups(self) -> tuple[str, ...]:
        """The uploaded groups that clients mix or score ("adapter", "update" or both)."""
        if self.form == "released":
            return ("adapter",)
        return ("adapter", "update") if self.scores_weights else ("update",)

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        if self.form == "paper":
            return super().adapter(base, seed, client)
        return Adapter(base, self.layout(client), seed, client, lambda p: p.factor != "A")

    def client(self, context: ClientContext) -> "PCLClient":
        return PCLClient(self, context)

    def server(self, context: ServerContext) -> "PCLServer":
        return PCLServer(self, context)

    def row(self, client: "PCLClient", rounds: int, uploads: Uploads) -> Row:
        """Return a client's row of the trust matrix.

        Args:
            client: The client whose row is computed.
            rounds: The number of completed rounds.
            uploads: A mapping from clients, including `client`, to their uploads of this exchange.

        Returns:
            The trust weight of every client in `uploads`. The weights sum to 1.
        """
        raise NotImplementedError

    def evidence(self, context: ClientContext, rounds: int) -> Groups:
        """Compute tensors, such as predictions, that a client uploads for computing trust scores.

        The client's adapter must be attached to the base.
        """
        return {}

    def evidence_shapes(self, training: TrainingSpec) -> Mapping[str, Shapes]:
        """Return, for each group returned by `evidence`, the shapes of the group's tensors."""
        return {}


class PCLClient(AdapterClient[PCL]):
    """A client that trains, uploads when an exchange is due, and mixes all clients' uploads."""

    def __init__(self, method: PCL, context: ClientContext) -> None:
        super().__init__(method, context)
        self.buffers["start"] = copied(self.shared)  # values after the previous exchange

    def receive(self, download: Message) -> None:
        if not download.peers:
            if self.method.due(download.exchange):  # no other client took part in the last exchange
                self.buffers["start"] = copied(self.shared)
            return
        name, rounds = self.context.name, download.exchange
        peers = {peer: download.from_peer(peer) for peer in download.peers}
        own = self._exchanged(rounds).on_host()
        uploads = dict(sorted({name: own, **peers}.items()))
        for upload in uploads.values():
            for group in {*upload.groups, *own.groups}:
                check_shapes(upload[group], shapes_of(own[group]))
        row = self.method.row(self, rounds, uploads)
        self.context.log(TRUST, row)
        if self.method.mix:
            self._mix(row, uploads)

    def upload(self, turn: Turn) -> Message:
        due = self.method.due(turn.exchange + 1)
        return self._exchanged(turn.exchange + 1) if due else Message(turn.exchange)

    def _exchanged(self, rounds: int) -> Message:
        """Return the client's upload for the exchange that follows `rounds` completed rounds."""
        start = self.buffers["start"]
        update = {n: p.detach() - start[n] for n, p in self.shared.items()}
        groups: dict[str, Tensors] = {"adapter": copied(self.shared), "update": update}
        self.model()  # attach the adapter
        sent = {name: groups[name] for name in self.method.groups}
        return Message(rounds - 1, {**sent, **self.method.evidence(self.context, rounds)})

    @torch.no_grad()
    def _mix(self, row: Row, uploads: Uploads) -> None:
        """Update the shared parameters with all clients' uploads, weighted by trust.

        The weighted sum of updates is added to the values that the parameters had after the
        previous exchange. With `form: released`, the weighted sum of adapters replaces the values.
        """
        paper, start = self.method.form == "paper", self.buffers["start"]
        for name, parameter in self.shared.items():
            total = start[name].clone() if paper else torch.zeros_like(parameter)
            for peer, weight in row.items():
                term = uploads[peer]["update" if paper else "adapter"][name]
                total.add_(term.to(total.device), alpha=weight)
            parameter.copy_(total)
            start[name] = total

    def losses(self, uploads: Uploads, batch: AnyBatch) -> dict[ClientId, float]:
        """Return each uploaded adapter's mean loss on a batch (nats per token, or DPO loss)."""
        base, model = self.context.base, self.model()
        own, losses = copied(self.shared), {}
        for peer, upload in uploads.items():
            copy(upload["adapter"], self.shared)
            losses[peer] = mean_loss(base, model, batch, self.context.training.at_once)
        copy(own, self.shared)
        return losses


@dataclass(frozen=True, eq=False)
class Forwarded(Shared):
    """The uploads of the last exchange, which the next downloads contain."""

    uploads: PerClient[Groups] = PerClient()


class PCLServer(AdapterServer[PCL, Forwarded]):
    """A server that forwards every client's upload to the other clients and aggregates nothing."""

    needs_all: ClassVar[bool] = True

    def initial(self) -> Forwarded:
        return Forwarded()

    def download(self, value: Forwarded, client: ClientId, exchange: Exchange) -> Message:
        return Message(exchange.turn.exchange, peers=value.uploads.without(client))

    def reference(
        self, value: Forwarded, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        # The server does not know the client's parameters after mixing, so it compares an uploaded
        # adapter with the client's initial adapter, and an update with zero.
        adapter = self.method.adapter(self.context.base, self.context.seed, client)
        start = {n: tensor for n, tensor in adapter.tensors().items() if n in self.start}
        return {"adapter": start, "update": {n: torch.zeros_like(t) for n, t in start.items()}}

    def expects(
        self, value: Forwarded, client: ClientId, exchange: Exchange
    ) -> Mapping[str, Shapes]:
        if not self.method.due(exchange.turn.exchange + 1):
            return {}
        evidence = self.method.evidence_shapes(self.context.training)
        return {**dict.fromkeys(self.method.groups, value.held[client]), **evidence}

    def aggregate(self, value: Forwarded, exchange: Exchange) -> Forwarded:
        due = self.method.due(exchange.turn.exchange + 1)
        return replace(value, uploads=exchange.each() if due else PerClient())
