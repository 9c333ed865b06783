"""FedDPA-T (arXiv 2403.19211): the outputs of averaged and of personal LoRA pairs are added.

An adapted layer has an averaged pair (A_g, B_g) and a personal pair (A_l, B_l), which never leaves
the client. With a scaling factor g and the weight w of the personal pair, the layer computes

    y = W x + b + g (w B_l A_l + (1 - w) B_g A_g) dropout(x)

In each round, a client first trains the personal pairs, while the averaged pairs that it has
received are frozen. It then trains the averaged pairs alone, from the values that it has received:
y = W x + b + g B_g A_g dropout(x). In round 0, clients train only the averaged pairs.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from transformers import PreTrainedModel

from coterie.adapters import Adapter
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ClientContext
from coterie.methods.ditto import PersonalClient
from coterie.turn import Turn


class FedDPA(FedIT):
    """FedDPA-T: averaged and personal LoRA pairs, whose outputs are added.

    Departure from the paper: models are scored and used with the fixed weight used in training. In
    the paper, a weight is computed for each prompt from its similarity to training samples; running
    text has no prompts.

    Clients train the personal pairs for as many steps as the averaged pairs, so a round takes about
    twice as long as in FedAvg.
    """

    name: ClassVar[str] = "feddpa"
    paper: ClassVar[str] = "arXiv 2403.19211"
    summary: ClassVar[str] = "LoRA pairs averaged; the outputs of personal pairs are added"

    weight: float = Field(default=0.5, gt=0, le=1)
    """weight of the personal pairs' output; the averaged pairs' output has the weight 1 - weight"""

    def client(self, context: ClientContext) -> "FedDPAClient":
        return FedDPAClient(self, context)


class FedDPAClient(PersonalClient[FedDPA]):
    """A client whose model adds the outputs of its averaged and of its personal pairs."""

    def __init__(self, method: FedDPA, context: ClientContext) -> None:
        base, name, layout = context.base.model, context.name, method.layout(context.name)
        weighted = replace(layout, alpha=layout.alpha * method.weight)  # the scaling factor is g w
        personal = Adapter(base, weighted, context.seed, name, method.shared)
        super().__init__(method, context, personal, first=1)

    def train(self, turn: Turn) -> None:
        self._add_averaged()
        self.personal_training.run(turn.exchange)
        super().train(turn)

    def model(self) -> PreTrainedModel:
        personal = self.personal.parameters().values()
        if not any(p.tensor.any() for p in personal if p.factor == "B"):
            return self.adapter.attach(self.context.base.model)  # not trained yet
        self._add_averaged()
        return super().model()

    def _add_averaged(self) -> None:
        """Add the averaged pairs to the personal pairs, as residuals, which are never trained."""
        # The personal pairs' scaling factor is g w, so B_g is multiplied by (1 - w) / w.
        share = {"A": 1.0, "B": (1 - self.method.weight) / self.method.weight}
        averaged = self.adapter.parameters().items()
        self.personal.set_residual(
            {n: share[p.factor] * p.tensor.detach() for n, p in averaged if p.factor is not None}
        )
