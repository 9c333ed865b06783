"""RoLoRA (Chen et al., arXiv 2502.01755): B and A are trained and averaged in turn, B first.

While one factor is fixed and equal for all clients, the mean of the products B A is exactly the
product of the means.
"""

from typing import ClassVar

from coterie.adapters import Parameter
from coterie.methods.adapter import AdapterClient
from coterie.methods.averaging import FedIT
from coterie.training.schedule import Level, learning_rate


class RoLoRA(FedIT):
    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "arXiv 2502.01755"
    summary: ClassVar[str] = "as fedit; B is trained and averaged in even rounds, A in odd ones"

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        return self.shared(parameter) and parameter.factor == "BA"[exchange % 2]

    def levels(self, client: AdapterClient) -> list[Level]:
        rate = learning_rate(client.context.training, client.context.rounds)
        return [
            Level("B", lambda p: p.factor == "B", "train", rate, exchanges=lambda e: e % 2 == 0),
            Level("A", lambda p: p.factor == "A", "train", rate, exchanges=lambda e: e % 2 == 1),
        ]
