"""Auto's clients: they judge other clients in trials, and weight them in their means."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from coterie.evaluation.evaluate import mean_loss
from coterie.messages import Json, Message, State, Tensors, check_shapes
from coterie.messages.host import on_host
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient
from coterie.methods.auto.choice import (
    checked_sizes,
    row_from_slopes,
    shares_of,
    standard_error,
    with_no_change,
)
from coterie.methods.auto.settings import AutoSettings
from coterie.methods.contract import ClientContext, ClientId
from coterie.methods.tensors import copied, copy, shapes_of
from coterie.training.probe import divided, probe_batch, sample_losses, sample_slopes
from coterie.transforms.context import Row
from coterie.turn import Turn


class AutoClient(AdapterClient[AutoSettings]):
    """A client that judges other clients in trials, and sends averaging weights to the server."""

    copies: ClassVar[int] = 2  # before and after training from the client's own parameters

    def __init__(self, method: AutoSettings, context: ClientContext) -> None:
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
        last = download.exchange == self.context.rounds
        if self.stage == "undecided" or (download.exchange and (last or complete)):
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
