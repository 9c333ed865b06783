"""SCAFFOLD's control variates (Karimireddy et al., arXiv 1910.06378) on low-rank pairs.

Clients drift apart because their texts differ. So client i adds c - c_i to every gradient: c_i is
its own mean gradient in its last round, c the mean over clients (algorithm 1, option II).
"""

from dataclasses import replace
from typing import ClassVar

import torch

from coterie.errors import CoterieError
from coterie.messages import Field, Message, check_shapes
from coterie.methods.adapter import AdapterClient, AdapterServer, copied, copy, shapes_of
from coterie.methods.averaging import FedAvg
from coterie.training.schedule import learning_rate


class Scaffold(FedAvg):
    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "arXiv 1910.06378"
    summary: ClassVar[str] = "as fedavg; control variates correct each client's gradients"

    def schema(self):
        schema, what = super().schema(), "up: the change of a client's mean gradient; down: c"
        control = Field("control", what, reduce="mean")
        return replace(schema, up=(*schema.up, control), down=(*schema.down, control))

    def check(self, run):
        super().check(run)
        if run.optimiser != "sgd":
            raise CoterieError("scaffold needs plain SGD: set training.optimiser=sgd.")

    def penalty(self, client):  # linear, so that its gradient is the correction c - c_i
        kept, shared = client.kept, client.shared
        return lambda: sum(((kept["c"][n] - kept["c_i"][n]) * p).sum() for n, p in shared.items())

    def client(self, context):
        return ScaffoldClient(self, context)

    def server(self, context):
        return ScaffoldServer(self, context)


class ScaffoldClient(AdapterClient):
    def __init__(self, method, context):
        super().__init__(method, context)
        zeros = {n: torch.zeros_like(p) for n, p in self.shared.items()}
        self.kept |= {"c": copied(zeros), "c_i": copied(zeros), "change": copied(zeros)}

    def receive(self, download):
        check_shapes(download["control"], shapes_of(self.shared))
        super().receive(download)
        copy(download["control"], self.kept["c"])

    def train(self, exchange):
        before, training = copied(self.shared), self.context.training
        super().train(exchange)
        rate = learning_rate(training, self.context.rounds)
        way = sum(map(rate, range(exchange * training.steps, (exchange + 1) * training.steps)))
        c, c_i, change = (self.kept[group] for group in ("c", "c_i", "change"))
        for n, after in copied(self.shared).items():
            change[n] = (before[n] - after) / way - c[n]
            c_i[n] = c_i[n] + change[n]

    def upload(self, exchange):
        groups = super().upload(exchange).groups
        return Message(exchange, {**groups, "control": copied(self.kept["change"])})


class ScaffoldServer(AdapterServer):
    def __init__(self, method, context):
        super().__init__(method, context)
        self.kept["control"] = {n: torch.zeros_like(t) for n, t in self.shared.items()}

    def end_round(self, mean, held):
        control = self.kept["control"]
        for n, change in mean["control"].items():
            control[n] = control[n] + change * held["control"][n] / len(self.held)
        super().end_round(mean, held)
