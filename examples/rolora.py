"""RoLoRA (Chen et al., arXiv 2502.01755): B and A are trained and averaged in turn, B first.

While one factor is fixed and equal for all clients, the mean of the products B A is exactly the
product of the means.
"""

from dataclasses import replace
from typing import ClassVar

from coterie.adapters import Parameter
from coterie.methods.adapter import AdapterClient
from coterie.methods.averaging import FedIT
from coterie.training.schedule import Level


class RoLoRA(FedIT):
    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "arXiv 2502.01755"
    summary: ClassVar[str] = "as fedit; B is trained and averaged in even rounds, A in odd ones"

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        return self.shared(parameter) and parameter.factor == "BA"[exchange % 2]

    def levels(self, client: AdapterClient) -> list[Level]:
        [ab] = super().levels(client)
        B = replace(ab, name="B", selects=lambda p: p.factor == "B", exchanges=lambda e: e % 2 == 0)
        A = replace(ab, name="A", selects=lambda p: p.factor == "A", exchanges=lambda e: e % 2 == 1)
        return [B, A]
