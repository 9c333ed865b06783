"""Auto: each client finds out with whom it should learn.

The adapter is the CoMiGS adapter (arXiv 2409.13931): on every MLP, two experts and a router that is
trained on validation text; and LoRA pairs on attention. The server sends each client its own mean
of all clients' parameters. The weights of this mean are the clients' shares p_j of all training
tokens, until the client chooses other weights in trials.

Let d_j be the change of client j's parameters since the start of the run, and L the loss of one
client's text at the mean with the weights w. If every change consists of a useful part and of noise
whose variance is inversely proportional to the number of training tokens, then w adds two terms to
L. The first one is caused by the differences between the clients' texts. At w = p, its derivatives
are the slopes of L along d_j, minus their mean. The second one is the variance of the noise,
(c / 2) sum_j w_j^2 / p_j, where c is the variance if all tokens have equal weights. It is lowest at
w = p, where its second-order expansion equals that of c KL(w || p). The minimum of the linearised
first term and c KL(w || p) is

    w_j = p_j exp(-eta x_j) / sum_k p_k exp(-eta x_k),    eta = 1 / c,

where x_j is the slope of j minus the lowest slope.

A client estimates slopes in trials after the rounds 1, 3, 7, 15 and so on:

1. The client receives the attention pairs of the other clients (at most `peers`), in float16. At
   the mean with the weights p, it measures the slope of each sample's loss along each d_j, minus
   the mean slope. All d_j are scaled to the same length, so a longer change does not count as a
   better one. The mean over the samples, m_j, has the standard error E_j. Earlier trials count,
   too: the precision 1 / E_j^2 of a peer's evidence is halved in every trial, and the means are
   weighted by precision.
2. The client changes its weights. Slopes are shrunk by their errors: with a normal prior for the
   true slopes, whose variance v is estimated from the spread of the m_j, their posterior means are
   s_j = m_j v / (v + E_j^2). With a margin of 0.01 nats per token,

       x_j = max(0, s_j - min_k s_k - margin).

   Clients that are about as good as the best one therefore have their full shares, and the mean is
   not narrower than the evidence requires. More samples reduce the errors, but do not turn a small
   difference into a large one. Clients without evidence have the mean x_j. Weights below a tenth
   of the equal share are dropped.
3. The client continues from the mean with the new weights, as far as it can compute this mean.
   Slopes can mislead where the loss is far from linear. If the loss at this mean, less the standard
   error, exceeds that of the client's own parameters by more than the margin, the client's only
   weight is its own. Such a client ignores the mean until the next trial.

With `trials: gradients`, clients do not receive the parameters of single others. In a trial, a
client also receives the attention pairs of the mean with the weights p. With these, it computes the
mean gradients of four groups of its samples, and sends them with its parameters. The server
multiplies them with the clients' changes: these are the slopes, with four values for each client.
The server computes the weights, and averages with them at once. The client does step 3 when it
receives this mean.

In the rounds whose mean contains all parameters, and after the last round, the client's own
parameters are evaluated instead of the mean if their loss is lower by more than the standard error.

During training, a client needs weights that avoid differences between texts, because later rounds
would add up their effects. After the last round, it can reduce the noise further: clients receive
the mean with the weights p, too, and move their models towards it, in steps of a tenth of the
distance and at most half of it, as long as the validation loss decreases.
"""

import math
from dataclasses import replace
from typing import ClassVar, Literal

from coterie.errors import CoterieError
from coterie.messages import Field as MessageField
from coterie.messages import Schema
from coterie.methods.auto.choice import GRADIENTS
from coterie.methods.auto.client import AutoClient
from coterie.methods.auto.server import AutoServer
from coterie.methods.auto.settings import AutoSettings
from coterie.methods.comigs import Mixture
from coterie.methods.contract import ClientContext, RunFacts, ServerContext
from coterie.privacy.ledger import Budget


class Auto(AutoSettings, Mixture):
    """A mixture of experts, averaged with weights that each client sets for itself.

    Trials follow the rounds 1, 3, 7, 15 and so on.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "all parameters averaged with the clients that help"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    @property
    def budget(self) -> Budget | None:
        sent = "weights that depend on" if self.trials == "parameters" else "gradients of"
        return Budget(math.inf, 1.0, f"{sent} this client's validation samples")

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
        common = replace(
            adapter,
            name="common",
            description="mean over all clients",
            of=("adapter",),
            when="after the last round",
            exclusive=True,
        )
        choice = "weights of other clients, number of training tokens"
        judged = MessageField(
            "adapter",
            "LoRA pairs on attention" if self.attention else "LoRA pairs of the first generalist",
            "float16",  # rounding is small compared with the noise of training
            peers=True,
            copies=lambda p, clients: self.judges(p) * min(self.peers, clients - 1),
            when="in trials",
            exclusive=True,
        )
        tokens = {"name": "sizes", "description": "number of training tokens", "dtype": "json"}
        when = "in trials, and after the last round"
        sizes = replace(judged, **tokens, of=("choice",), when=when, exclusive=False)
        up = (
            replace(adapter, reduce="rows"),
            replace(adapter, reduce="each"),
            MessageField("choice", choice, "json"),
        )
        if self.trials == "parameters":
            return replace(super().schema(), up=up, down=(adapter, common, judged, sizes))
        gradients = MessageField(
            "gradients",
            "gradients of validation samples",
            "bfloat16",
            copies=lambda p, _: GRADIENTS * self.judges(p),
            when="in trials",
        )
        common = replace(common, when=when, exclusive=False)
        sizes = replace(sizes, when="after the last round")
        row = MessageField("row", "weights of other clients", "json", of=("gradients", "adapter"))
        return replace(super().schema(), up=(*up, gradients), down=(adapter, common, sizes, row))

    def client(self, context: ClientContext) -> AutoClient:
        return AutoClient(self, context)

    def server(self, context: ServerContext) -> AutoServer:
        return AutoServer(self, context)
