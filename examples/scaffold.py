"""SCAFFOLD's control variates (Karimireddy et al., arXiv 1910.06378) on low-rank pairs.

Clients drift apart because their texts differ. So client i adds c - c_i to every gradient: c_i is
its own mean gradient in its last round, c the mean over clients (algorithm 1, option II).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field, Schema, Tensors
from coterie.methods.adapter import AdapterClient, AdapterServer, Shared
from coterie.methods.averaging import FedAvg
from coterie.methods.contract import ClientContext, RunFacts, ServerContext
from coterie.methods.tensors import zeros_like
from coterie.training.schedule import Penalty
from coterie.turn import Turn


class Scaffold(FedAvg):
    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "arXiv 1910.06378"
    summary: ClassVar[str] = "as fedavg; control variates correct each client's gradients"

    def schema(self) -> Schema:
        schema = super().schema()
        change = Field("change", "change of a client's mean gradient", reduce="mean")
        control = Field("control", "mean gradient over clients")
        return replace(schema, up=(*schema.up, change), down=(*schema.down, control))

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.optimiser != "sgd":
            raise CoterieError("scaffold needs plain SGD: set training.optimiser=sgd.")

    def penalty(self, client: AdapterClient) -> Penalty:
        def correction() -> Tensor:  # linear, so that its gradient is c - c_i
            c, c_i = client.buffers["control"], client.buffers["own"]
            return torch.stack(
                [((c[n] - c_i[n]) * p).sum() for n, p in client.shared.items()]
            ).sum()

        return correction

    def client(self, context: ClientContext) -> "ScaffoldClient":
        return ScaffoldClient(self, context)

    def server(self, context: ServerContext) -> "ScaffoldServer":
        return ScaffoldServer(self, context)


class ScaffoldClient(AdapterClient):
    def __init__(self, method: Scaffold, context: ClientContext) -> None:
        super().__init__(method, context)
        self.buffers = {group: zeros_like(self.shared) for group in ("control", "own", "change")}

    def train(self, turn: Turn) -> None:
        super().train(turn)
        [level] = self.training.levels
        way = sum(map(level.learning_rate, self.training.steps(turn.exchange)))
        c, c_i, change = (self.buffers[group] for group in ("control", "own", "change"))
        for n, after in self.shared.items():
            change[n] = (self.training.start[n] - after.detach()) / way - c[n]
            c_i[n] = c_i[n] + change[n]


@dataclass(frozen=True, eq=False)
class Controlled(Shared):
    control: Tensors = field(default_factory=dict[str, Tensor])


class ScaffoldServer(AdapterServer[Scaffold, Controlled]):
    def initial(self) -> Controlled:
        return Controlled(self.start, control=zeros_like(self.start))

    def aggregate(self, value: Controlled, exchange: Exchange) -> Controlled:
        control, mean = dict(value.control), exchange.mean("change")
        for n, change in mean.items():  # a mean over all clients, not over the round's
            control[n] = control[n] + change * exchange.holders("change")[n] / len(value.held)
        return replace(super().aggregate(value, exchange), control=control)
