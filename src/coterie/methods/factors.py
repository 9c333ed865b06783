"""Methods that share or train one factor of each LoRA pair: FedSA-LoRA, Fed-ALoRA and RoLoRA.

FedSA-LoRA averages A over clients and keeps B on the client; Fed-ALoRA averages B and keeps A.
RoLoRA averages both factors, but trains and sends only one of them in each exchange. All clients
start with B = 0 and with the same values of A.
"""

from typing import ClassVar, Literal

from torch import nn

from coterie.adapters import Adapter, Parameter, Trainable
from coterie.methods.adapter import AdapterClient
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ClientId
from coterie.training.schedule import Level, learning_rate


class FedSA(FedIT):
    """FedSA-LoRA: A is averaged, and B stays on the client.

    A client's model consists of the averaged factor and of its own factor. The preset `fed-alora`
    (Fed-ALoRA) averages B instead. Its clients keep their A between rounds, as in the paper; in the
    code that the authors released, each round starts from the initial A.
    """

    name: ClassVar[str] = "fedsa"
    paper: ClassVar[str] = "arXiv 2410.01463"
    summary: ClassVar[str] = "A of each LoRA pair averaged; B stays on the client"
    factor: ClassVar[Literal["A", "B"]] = "A"
    """The factor that is averaged."""

    def shared(self, parameter: Parameter) -> bool:
        return parameter.factor == self.factor

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        # If clients had different initial values of A, averages of B would be meaningless.
        return Adapter(base, self.layout(client), seed, client, lambda parameter: True)


class RoLora(FedIT):
    """RoLoRA: clients train and average B and A in turn, beginning with B.

    The factor that is not trained is equal on all clients, so the mean of the trained factor is the
    mean of the products B A. Each factor keeps its optimiser's moments until its next turn.
    """

    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "arXiv 2502.01755"
    summary: ClassVar[str] = "B and A of LoRA pairs are trained and averaged in turn"

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        return self.shared(parameter) and parameter.factor == "BA"[exchange % 2]

    def levels(self, client: AdapterClient) -> list[Level]:
        rate = learning_rate(client.context.training, client.context.rounds)
        return [
            Level("B", lambda p: p.factor == "B", "train", rate, active=lambda n: n % 2 == 0),
            Level("A", lambda p: p.factor == "A", "train", rate, active=lambda n: n % 2 == 1),
        ]


PRESETS = {
    "fed-alora": {
        "paper": "arXiv 2509.25414",
        "summary": "B of each LoRA pair averaged; A stays on the client",
        "factor": "B",
    }
}
