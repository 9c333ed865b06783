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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from coterie.adapters import Parameter
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import mean_loss
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Json, Message, Schema, State, Tensors, check_shapes
from coterie.messages.host import on_host
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient
from coterie.methods.choice import (
    checked_choice,
    checked_sizes,
    latest_trial,
    limited_rows,
    row_from_slopes,
    shares_of,
    standard_error,
    with_no_change,
)
from coterie.methods.clusters import nearest
from coterie.methods.comigs import Mixture
from coterie.methods.contract import ClientContext, ClientId, RunFacts, ServerContext
from coterie.methods.grouped import Personal, PersonalServer
from coterie.methods.settings import Generalists, PhasedRouter
from coterie.methods.tensors import copied, copy, shapes_of
from coterie.methods.value import PerClient
from coterie.privacy.ledger import Budget
from coterie.training.probe import divided, probe_batch, sample_losses, sample_slopes
from coterie.transforms.context import Row, Rows
from coterie.turn import Turn


class Auto(Mixture):
    """A mixture of experts, averaged with weights that each client sets for itself.

    Trials follow the rounds 1, 3, 7, 15 and so on of the first half of a run.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "all parameters averaged with the clients that help"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    shared_roles: ClassVar[tuple[str, ...]] = ("dense", "generalist", "router")

    mlp: Generalists = Generalists()
    router: PhasedRouter = PhasedRouter()
    samples: int = Field(default=16, ge=2)
    """number of validation samples on which a client judges other clients"""
    set_aside: float = Field(default=0.5, ge=0, lt=1)
    """fraction of the validation samples reserved for judging; routers are trained on the rest (0:
    both use all samples)"""
    trust: float = Field(default=1.0, ge=0)
    """step size of the change of weights in a trial (eta)"""
    patience: float = 1.0
    """number of standard errors by which training from the client's own parameters must be better
    than training from the mean for the client to stay alone"""
    peers: int = Field(default=16, ge=1)
    """maximum number of other clients in a trial; those whose changes are the most similar to the
    client's are chosen"""
    every: int = Field(default=2, ge=1)
    """how often experts other than the first are averaged: every this many rounds"""

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

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        return self.shared(parameter) and (
            parameter.role == "dense" or not parameter.expert or (exchange + 1) % self.every == 0
        )

    def downloaded(self, parameters: Mapping[str, Parameter], complete: bool) -> set[str]:
        """Return the names of a download's tensors: all, or those averaged in every exchange."""
        exchange = self.every - 1 if complete else 0
        return {name for name, p in parameters.items() if self.sends(p, exchange)}

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

    def client(self, context: ClientContext) -> "AutoClient":
        return AutoClient(self, context)

    def server(self, context: ServerContext) -> "AutoServer":
        return AutoServer(self, context)

    def judges(self, parameter: Parameter) -> bool:
        """Return whether trials compare a parameter: of attention or, without it, of expert 0."""
        return parameter.expert == 0 if self.attention is None else parameter.role == "dense"


class AutoClient(AdapterClient[Auto]):
    """A client that judges other clients in trials, and sends averaging weights to the server."""

    copies: ClassVar[int] = 2  # before and after training from the client's own parameters

    def __init__(self, method: Auto, context: ClientContext) -> None:
        data, window = context.data, context.window
        routers, judging = divided(data.validation, window, method.set_aside)
        self.judging = probe_batch(judging, window, method.samples)
        """The validation samples on which the client judges other clients."""
        self.tokens = len(data.train.ids)
        self.log, self._logged = context.log, list[tuple[str, Json]]()
        data, log = replace(data, validation=routers), lambda *metric: self._logged.append(metric)
        super().__init__(method, replace(context, data=data, log=log))
        self.judged = self.adapter.tensors(method.judges)
        self.initial = {n: t.clone() for n, t in on_host(self.judged).items()}
        self.buffers |= {"mean": copied(self.shared), "own": copied(self.shared)}
        """mean: the shared parameters after the last download. own: those before that download."""
        self.row: Row = {}
        """The client's weights for all clients. Before its first trial, the mapping is empty, and
        the server weights clients by their training tokens."""
        self.stage: Literal["", "proposed", "undecided"] = ""
        """proposed: the client has not received a mean with its new weights yet. undecided: the
        next training determines whether the client stays alone."""

    def receive(self, download: Message) -> None:
        own = copied(self.shared)
        complete = len(download["adapter"]) == len(own)
        names = self.method.downloaded(self.parameters(), complete)
        sent = {n: t for n, t in self.shared.items() if n in names}
        check_shapes(download["adapter"], shapes_of(sent))
        peers = {peer: download.from_peer(peer)["adapter"] for peer in download.peers}
        for tensors in peers.values():
            check_shapes(tensors, shapes_of(self.judged))
        sizes = checked_sizes(download.values.get("sizes", {}), peers)
        if peers:
            self._judge(peers, sizes)
            self.stage = "proposed"
        elif self.stage == "proposed":
            self.stage = "undecided"
        copy(download["adapter"], sent)
        self.buffers |= {"mean": copied(self.shared), "own": own}
        last = download.round == self.context.rounds
        if self.stage == "undecided" or (download.round and (last or complete)):
            self._compare()

    def _compare(self) -> None:
        """Set the model to the client's own parameters, unless the mean has a lower loss.

        A lower loss of the mean also ends a trial. A client that is alone does not compare.
        """
        if self.row.keys() != {self.context.name}:
            loss = self._mean_loss(self.buffers["own"])
            if not self._mean_loss(self.buffers["mean"]) < loss:  # it may be NaN
                copy(self.buffers["own"], self.shared)
                return
        if self.stage == "undecided":
            self.stage = ""
            self.log(TRUST, self.row)

    def train(self, turn: Turn) -> None:
        copy(self.buffers["mean"], self.shared)
        train = self._decide if self.stage == "undecided" else super().train
        train(turn)
        for name, value in self._logged:
            self.log(name, value)
        self._logged.clear()

    def _decide(self, turn: Turn) -> None:
        """Train from both, and keep the result from the mean unless the other is clearly better."""
        before = super().state()
        copy(self.buffers["own"], self.shared)
        super().train(turn)
        alone, logged = super().state(), [*self._logged]
        losses = sample_losses(self.context, self.model(), self.judging)
        super().restore(before)
        self._logged.clear()
        super().train(turn)
        gain = losses - sample_losses(self.context, self.model(), self.judging)
        if gain.mean() < -self.method.patience * standard_error(gain):
            super().restore(alone)
            self.row, self._logged = {self.context.name: 1.0}, logged
        self.stage = ""
        self.log(TRUST, self.row)

    def upload(self, turn: Turn) -> Message:
        choice = {"row": self.row, "tokens": self.tokens}
        return replace(super().upload(turn), values={"choice": choice})

    def _mean_loss(self, tensors: Tensors) -> float:
        """Return the mean loss on the samples for judging, after setting the shared parameters."""
        copy(tensors, self.shared)
        at_once = self.context.training.at_once
        return mean_loss(self.context.base, self.model(), self.judging, at_once)

    def _judge(self, peers: Mapping[ClientId, Tensors], sizes: Mapping[ClientId, float]) -> None:
        """Determine the weights, from other clients' pairs and numbers of training tokens."""
        name = self.context.name
        pairs = dict(sorted({**peers, name: on_host(self.judged)}.items()))
        initial = self.initial.items()
        changes = [{n: t[n] - start for n, start in initial} for t in pairs.values()]
        shares = shares_of({n: self.tokens if n == name else sizes[n] for n in pairs})
        weights = with_no_change(shares).tolist()[:-1]
        mean = {
            n: start + sum(w * change[n] for w, change in zip(weights, changes, strict=True))
            for n, start in initial
        }
        copy(mean, self.judged)
        self.adapter.require_grad(self.method.judges)
        slopes = sample_slopes(self.context, self.model(), self.judging, self.judged, changes)
        trust, least_others = self.method.trust, self.context.least_others
        self.row = row_from_slopes(shares, slopes, trust, name, least_others)

    def state(self) -> State:
        choice = {"row": self.row, "stage": self.stage}
        state = super().state()
        return replace(state, values={**state.values, "choice": choice})

    def restore(self, state: State) -> None:
        super().restore(state)
        choice = state.values["choice"]
        self.row, self.stage = dict(choice["row"]), choice["stage"]


@dataclass(frozen=True, eq=False)
class Chosen(Personal):
    """The clients' choices, and the pairs for trials."""

    rows: PerClient[PerClient[float]] = PerClient()
    """Each client's weights for all clients, or nothing before its first trial."""
    tokens: PerClient[int] = PerClient()
    """The number of each client's training tokens."""
    tried: PerClient[int] = PerClient()
    """For each client, the number of rounds after which its latest trial was due."""
    uploads: PerClient[Tensors] = PerClient()
    """The latest pairs of each client, if a trial is due for any client."""
    before: PerClient[Tensors] = PerClient()
    """The upload of each client's latest trial, until its next upload. A client that stays alone
    after the trial trains from these parameters, and not from its mean."""
    current: PerClient[bool] = PerClient()
    """The clients that have uploaded since all parameters were last averaged."""


class AutoServer(PersonalServer[Auto, Chosen]):
    """A server that averages with each client's own weights, and forwards pairs for trials.

    The server decides which data of others a client receives: pairs once per trial. A client's
    weights change only in a trial, or when it decides to stay alone.
    """

    def __init__(self, method: Auto, context: ServerContext) -> None:
        super().__init__(method, context)
        self.context = context
        self._compared: tuple[Chosen, Mapping[ClientId, list[ClientId]]] | None = None
        """A value, and the clients with similar pairs for each client in its `uploads`."""

    def initial(self) -> Chosen:
        return Chosen(self.start)

    def _due(self, value: Chosen, client: ClientId, exchange: int) -> bool:
        """Return whether a trial is due for a client before an exchange."""
        return latest_trial(exchange, self.context.rounds) > value.tried.get(client, 0)

    def _peers(self, value: Chosen, client: ClientId, exchange: Exchange) -> list[ClientId]:
        """Return the clients whose pairs a client receives in an exchange."""
        if client not in value.uploads or not self._due(value, client, exchange.turn.exchange):
            return []
        if self._compared is None or self._compared[0] is not value:
            self._compared = value, nearest(value.uploads, self.start, self.method.peers)
        return self._compared[1][client]

    def download(self, value: Chosen, client: ClientId, exchange: Exchange) -> Message:
        message = super().download(value, client, exchange)
        names = self.method.downloaded(self.parameters, client not in value.current)
        sent = {n: t for n, t in message["adapter"].items() if n in names}
        of_peers = value.uploads.only(self._peers(value, client, exchange))
        peers = of_peers.mapped(lambda tensors: {"adapter": tensors})
        values = {"sizes": {p: value.tokens[p] for p in peers}} if peers else {}
        return replace(message, groups={"adapter": sent}, peers=peers, values=values)

    def check(self, value: Chosen, client: ClientId, upload: Message, exchange: Exchange) -> None:
        super().check(value, client, upload, exchange)
        checked_choice(client, upload.values.get("choice"), value.held)

    def reference(
        self, value: Chosen, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        start = super().download(value, client, exchange)["adapter"]
        row = checked_choice(client, upload.values.get("choice"), value.held)["row"]
        before = value.before.get(client, {}) if row == {client: 1.0} else {}
        return {"adapter": {**start, **before}}

    def rows(self, value: Chosen, exchange: Exchange) -> Rows:
        everybody = shares_of(value.tokens)
        rows = {client: row or everybody for client, row in value.rows.items()}
        return limited_rows(rows, exchange.counted, self.context.least_others)

    def aggregate(self, value: Chosen, exchange: Exchange) -> Chosen:
        number = exchange.turn.exchange
        trying = {client for client in exchange.asked if self._peers(value, client, exchange)}
        choices = {
            client: checked_choice(client, choice, value.held)
            for client, choice in exchange.each("choice").items()
        }
        alone = {client for client, choice in choices.items() if choice["row"] == {client: 1.0}}
        rows = {
            client: choice["row"] if client in trying | alone else value.rows.get(client, {})
            for client, choice in choices.items()
        }
        value = replace(
            value,
            rows=value.rows | rows,
            tokens=value.tokens | {c: choice["tokens"] for c, choice in choices.items()},
            tried=value.tried | dict.fromkeys(trying, latest_trial(number, self.context.rounds)),
            # Clients that stay alone have not trained from their means.
            means=value.means.updated(value.before.only(alone)),
        )
        value = super().aggregate(value, exchange)
        adapters = exchange.each("adapter")
        before = value.before.only(value.before.keys() - choices) | adapters.only(trying)
        due = any(self._due(value, client, number + 1) for client in value.rows)
        is_complete = (number + 1) % self.method.every == 0
        return replace(
            value,
            uploads=value.uploads | adapters.mapped(self._judged) if due else PerClient(),
            before=before,
            current=PerClient() if is_complete else value.current | dict.fromkeys(choices, True),
        )

    def _judged(self, tensors: Tensors) -> Tensors:
        """Return the tensors that trials compare."""
        return {n: t for n, t in tensors.items() if self.method.judges(self.parameters[n])}
