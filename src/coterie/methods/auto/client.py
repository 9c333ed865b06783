"""Auto's clients: they judge other clients in trials, and weight them in their means."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.data.tokens import divided
from coterie.evaluation.evaluate import mean_loss
from coterie.messages import Message, State, Tensors, check_shapes
from coterie.messages.host import on_host
from coterie.messages.names import TRUST
from coterie.methods.adapter import AdapterClient
from coterie.methods.auto.choice import (
    GRADIENTS,
    MARGIN,
    PARTS_OF_ALL,
    Evidence,
    at_one_length,
    checked_row,
    checked_sizes,
    excess,
    mixed,
    part_of,
    row_of,
    shares_of,
    standard_error,
    updated,
    widened,
)
from coterie.methods.auto.settings import AutoSettings
from coterie.methods.contract import ClientContext, ClientId
from coterie.methods.tensors import copied, copy, shapes_of
from coterie.training.probe import mean_gradients, probe_batch, sample_slopes
from coterie.transforms.context import Row
from coterie.turn import Turn


class AutoClient(AdapterClient[AutoSettings]):
    """A client that judges other clients in trials, and sends averaging weights to the server."""

    copies: ClassVar[int] = 2  # the mean, and the parameters before the last download

    def __init__(self, method: AutoSettings, context: ClientContext) -> None:
        data, window = context.data, context.window
        routers, judging = divided(data.validation, window, method.set_aside)
        self.judging = probe_batch(judging, window, method.samples)
        """The validation samples on which the client judges other clients."""
        self.tokens = len(data.train.ids)
        super().__init__(method, replace(context, data=replace(data, validation=routers)))
        self.judged = self.adapter.tensors(method.judges)
        self.initial = {n: t.clone() for n, t in on_host(self.judged).items()}
        self.buffers |= {"mean": copied(self.shared), "own": copied(self.shared)}
        """mean: the shared parameters from which the client trains next. own: those before the last
        download."""
        self.row: Row = {}
        """The client's weights for all clients. Before its first trial, the mapping is empty, and
        the server weights clients by their training tokens."""
        self.evidence: dict[ClientId, Evidence] = {}
        """For each judged client, the mean slope along its change, and the mean's precision."""
        self.gradients: dict[str, Tensor] = {}
        """The gradients for the next upload, by number, or nothing."""

    def receive(self, download: Message) -> None:
        own = copied(self.shared)
        complete = len(download["adapter"]) == len(own)
        parameters, last = self.parameters(), download.exchange == self.context.rounds
        names = self.method.downloaded(parameters, complete)
        sent = {n: t for n, t in self.shared.items() if n in names}
        check_shapes(download["adapter"], shapes_of(sent))
        common = download["common"]
        if common and not last:
            check_shapes(common, shapes_of(self.judged))
        elif common:
            sends, number = self.method.sends, self.context.rounds - 1
            uploaded = {n: t for n, t in self.shared.items() if sends(parameters[n], number)}
            check_shapes(common, shapes_of(uploaded))
        peers = {peer: widened(download.from_peer(peer)["adapter"]) for peer in download.peers}
        for tensors in peers.values():
            check_shapes(tensors, shapes_of(self.judged))
        sizes = checked_sizes(download.values.get("sizes", {}), peers)
        row = checked_row(download.values.get("row", {})) or self.row
        has_changed, self.row = row != self.row, row
        # A lone client's mean is its own upload, or an older one if its upload was excluded.
        if not self._is_alone:
            copy(download["adapter"], sent)
        self.buffers |= {"mean": copied(self.shared), "own": own}
        if peers:
            self._judge(peers, sizes)
        elif has_changed:
            self._begin_at(self.buffers["mean"])
        self.gradients = {}
        if common and not last:
            gradients = self._gradients(common)
            self.gradients = {str(i): g.to(torch.bfloat16) for i, g in enumerate(gradients)}
        is_own = download.exchange and (last or complete) and self._compare()
        if common and last:
            part = self._approach(common)
            shares = self._shares(sizes)
            row = {self.context.name: 1.0} if is_own else self.row or shares
            weights = {c: (1 - part) * row.get(c, 0) + part * p for c, p in shares.items()}
            self.context.log(TRUST, weights)

    @property
    def _is_alone(self) -> bool:
        return self.row.keys() == {self.context.name}

    def _compare(self) -> bool:
        """Set the model to the mean or, if the mean is worse, to the client's own parameters.

        Returns:
            Whether the model now has the client's own parameters.
        """
        mean = self.buffers["mean"]
        is_own = self._is_alone or not self._excess(mean) <= 0  # it may be NaN
        copy(self.buffers["own"] if is_own else mean, self.shared)
        return is_own

    def _approach(self, common: Tensors) -> float:
        """Move the model towards the mean of all clients while its loss decreases.

        Args:
            common: The mean over all clients of the parameters that they sent in the last round.

        Returns:
            The weight of this mean.
        """
        start = copied(self.shared)
        best, weight = start, 0.0
        least = self._mean_loss(start)
        for part in PARTS_OF_ALL:
            moved = {
                n: torch.lerp(start[n], t.to(start[n].device), part) for n, t in common.items()
            }
            point = {**start, **moved}
            if not (loss := self._mean_loss(point)) < least:
                break
            best, weight, least = point, part, loss
        copy(best, self.shared)
        return weight

    def train(self, turn: Turn) -> None:
        copy(self.buffers["mean"], self.shared)
        super().train(turn)

    def upload(self, turn: Turn) -> Message:
        message, choice = super().upload(turn), {"row": self.row, "tokens": self.tokens}
        groups = {**message.groups, "gradients": self.gradients}
        return replace(message, groups=groups, values={"choice": choice})

    def _mean_loss(self, tensors: Tensors) -> float:
        """Return the mean loss on the samples for judging, after setting the shared parameters."""
        copy(tensors, self.shared)
        at_once = self.context.training.at_once
        return mean_loss(self.context.base, self.model(), self.judging, at_once)

    def _losses(self, tensors: Tensors) -> Tensor:
        """Return the mean losses on pairs of samples, after setting the shared parameters."""
        copy(tensors, self.shared)
        base, model = self.context.base, self.model()
        losses = [mean_loss(base, model, pair, 2) for pair in self.judging.split(2)]
        return torch.tensor(losses, dtype=torch.float64)

    def _excess(self, mean: Tensors) -> float:
        """Return a mean's loss minus that of the client's own parameters and the standard error."""
        excess = self._losses(mean) - self._losses(self.buffers["own"])
        return (excess.mean() - standard_error(excess)).item()

    def _judge(self, peers: Mapping[ClientId, Tensors], sizes: Mapping[ClientId, float]) -> None:
        """Determine the weights, and continue from the mean with these weights.

        Args:
            peers: The judged parameters of other clients.
            sizes: The numbers of training tokens of all other clients.
        """
        name, own, mean = self.context.name, self.buffers["own"], self.buffers["mean"]
        pairs = dict(sorted({**peers, name: on_host({n: own[n] for n in self.judged})}.items()))
        shares = self._shares(sizes)
        received = self.row or shares

        def start(row: Row) -> dict[str, Tensor]:
            return mixed(name, own, mean, pairs, row, received)

        slopes = self._slopes(start(shares), pairs)
        evidence = updated(self.evidence, slopes, part_of(shares, pairs))
        self.evidence = {c: known for c, known in evidence.items() if c in shares}
        self.row = self.weights(shares, pairs)
        self._begin_at(start(self.row))

    def weights(self, shares: Row, pairs: Mapping[ClientId, Tensors]) -> Row:
        """Return the weights after a trial.

        Args:
            shares: All clients' shares of the training tokens.
            pairs: The judged parameters of the clients in the trial.
        """
        trust, least_others = self.method.trust, self.context.least_others
        return row_of(shares, excess(self.evidence), trust, self.context.name, least_others)

    def _begin_at(self, mean: Tensors) -> None:
        """Continue from a mean, or alone if the mean is worse than the client's own parameters."""
        if not self._excess(mean) <= MARGIN:  # it may be NaN
            self.row, mean = {self.context.name: 1.0}, copied(self.buffers["own"])
        self.buffers["mean"] = dict(mean)
        copy(mean, self.shared)
        self.context.log(TRUST, self.row)

    def _shares(self, sizes: Mapping[ClientId, float]) -> dict[ClientId, float]:
        return shares_of(dict(sorted({**sizes, self.context.name: self.tokens}.items())))

    def _slopes(self, mean: Tensors, pairs: Mapping[ClientId, Tensors]) -> Tensor:
        """Return the slope of each sample's loss along each client's change, at a mean."""
        changes = [{n: t[n] - start for n, start in self.initial.items()} for t in pairs.values()]
        copy(mean, self.shared)
        self.adapter.require_grad(self.method.judges)
        directions = at_one_length(changes)
        return sample_slopes(self.context, self.model(), self.judging, self.judged, directions)

    def _gradients(self, common: Tensors) -> list[Tensor]:
        """Return the mean gradients of groups of samples, at the mean with the clients' shares.

        Args:
            common: The judged parameters of this mean.
        """
        copy(common, self.judged)
        self.adapter.require_grad(self.method.judges)
        judged = dict(sorted(self.judged.items()))
        gradients = mean_gradients(self.context, self.model(), self.judging, judged, GRADIENTS)
        copy(self.buffers["mean"], self.shared)
        return gradients

    def state(self) -> State:
        choice = {"row": self.row, "evidence": self.evidence}
        state = super().state()
        return replace(state, values={**state.values, "choice": choice})

    def restore(self, state: State) -> None:
        super().restore(state)
        choice = state.values["choice"]
        self.row = dict(choice["row"])
        self.evidence = {
            client: (m, precision) for client, (m, precision) in choice["evidence"].items()
        }
