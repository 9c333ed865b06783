"""Auto: each client finds out with whom it should learn.

The adapter is the CoMiGS adapter (arXiv 2409.13931): on every MLP, two experts and a router that is
trained on validation text; and LoRA pairs on attention. The server sends each client its own mean
of all clients' parameters. The weights of this mean are the clients' shares of all training tokens,
until the client determines better ones in trials:

1. The client receives the attention pairs of the other clients (at most `peers`). For every client
   j, including itself, d_j is the change of j's pairs since the start of the run. On validation
   samples, the client measures the slope of its loss along each d_j, at the mean of all d_j with
   the weights p_j, client j's share of the training tokens of these clients. With s_j, this slope
   minus the mean slope, and E_j, the standard error of s_j, the evidence e_j and the new weights
   are

       e_j = sign(s_j) min(max(|s_j| - max(E_j, margin), 0) / E_j, 3),
       w_j = p_j exp(-eta e_j) / sum_k p_k exp(-eta e_k),

   as in exponentiated gradient descent, with e_j in place of the gradient. The margin is 0.01 nats
   per token: among similar clients, smaller differences can exceed their standard errors but do not
   persist, and following them gives worse models. An additional direction, d = 0, takes part in
   both means and receives no weight in the result: it absorbs the gain that comes only from making
   all changes smaller. Weights below 0.02 are dropped. If no weight of another client remains, the
   new weights are the shares p_j, and step 2 decides whether the client stays alone.
2. In the next round, the client receives the first mean with its new weights. If its validation
   loss is not lower with this mean than with the client's own parameters, the client trains that
   round twice, from its own parameters and from the mean. If the loss is then lower after training
   from its own parameters, by more than one standard error (`patience`), the client stays alone
   until the next trial.

The same comparison without training determines which model is evaluated, in the rounds whose mean
contains all parameters and after the last round: the mean, or the client's own parameters if the
mean's loss is not lower.
"""

import math
from dataclasses import replace
from typing import ClassVar, Literal

from coterie.errors import CoterieError
from coterie.messages import Field as MessageField
from coterie.messages import Schema
from coterie.methods.auto.client import AutoClient
from coterie.methods.auto.server import AutoServer
from coterie.methods.auto.settings import AutoSettings
from coterie.methods.comigs import Mixture
from coterie.methods.contract import ClientContext, RunFacts, ServerContext
from coterie.privacy.ledger import Budget


class Auto(AutoSettings, Mixture):
    """A mixture of experts, averaged with weights that each client sets for itself.

    Trials follow the rounds 1, 3, 7, 15 and so on of the first half of a run.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "all parameters averaged with the clients that help"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf, 1.0, "weights that depend on this client's validation samples")

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.least_others > self.peers:
            raise CoterieError(
                f"aggregation.least_others ({run.least_others}) exceeds method.peers "
                f"({self.peers}), the number of other clients in a trial; change either."
            )
        if run.token_weights:
            raise CoterieError(
                f"The method {self.name!r} weights clients by their training tokens itself; set "
                "aggregation.weights to uniform."
            )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        [adapter] = super().schema().up
        choice = "weights of other clients, number of training tokens"
        judged = MessageField(
            "adapter",
            "LoRA pairs on attention" if self.attention else "LoRA pairs of the first generalist",
            peers=True,
            copies=lambda p, clients: self.judges(p) * min(self.peers, clients - 1),
            when="in trials",
        )
        tokens = {"name": "sizes", "description": "number of training tokens", "dtype": "json"}
        sizes = replace(judged, **tokens, of=("choice",))
        up = (replace(adapter, reduce="rows"), replace(adapter, reduce="each"))
        return replace(
            super().schema(),
            up=(*up, MessageField("choice", choice, "json")),
            down=(adapter, judged, sizes),
        )

    def client(self, context: ClientContext) -> AutoClient:
        return AutoClient(self, context)

    def server(self, context: ServerContext) -> AutoServer:
        return AutoServer(self, context)
