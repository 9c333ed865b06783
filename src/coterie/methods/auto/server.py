"""Auto's server: it averages with each client's weights, and forwards parameters for trials."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from coterie.exchanges.exchange import Exchange
from coterie.messages import Groups, Json, Message, Shapes, Tensors, check_shapes
from coterie.methods.auto.choice import (
    GRADIENTS,
    at_one_length,
    checked_choice,
    excess,
    latest_trial,
    limited_rows,
    mixed,
    part_of,
    rounded,
    row_of,
    shares_of,
    updated,
    widened,
)
from coterie.methods.auto.settings import AutoSettings
from coterie.methods.clusters import nearest
from coterie.methods.contract import ClientId, ServerContext
from coterie.methods.grouped import Personal, PersonalServer
from coterie.methods.value import PerClient
from coterie.seeding import generator
from coterie.transforms.context import Row, Rows

EVERYBODY = ""
"""The name of the mean of all clients' parameters; no client has this name."""


@dataclass(frozen=True, eq=False)
class Chosen(Personal):
    """The clients' choices, and the pairs for trials."""

    rows: PerClient[PerClient[float]] = PerClient()
    """Each client's weights for all clients, or nothing before its first trial."""
    tokens: PerClient[int] = PerClient()
    """The number of each client's training tokens."""
    evidence: PerClient[PerClient[list[float]]] = PerClient()
    """Each client's `Evidence` about others, if clients send gradients."""
    tried: PerClient[int] = PerClient()
    """For each client, the number of rounds after which its latest trial was due."""
    uploads: PerClient[Tensors] = PerClient()
    """The latest upload of each client, if a trial is due for any client."""
    common: Tensors = field(default_factory=dict)
    """The mean of all clients' parameters after the last round, and that of judged parameters
    before trials in which clients send gradients; otherwise, nothing."""
    current: PerClient[bool] = PerClient()
    """The clients that have uploaded since all parameters were last averaged."""


class AutoServer(PersonalServer[AutoSettings, Chosen]):
    """A server that averages with each client's own weights, and forwards pairs for trials.

    The server decides which data of others a client receives: pairs once per trial. A client's
    weights change only in a trial.
    """

    def __init__(self, method: AutoSettings, context: ServerContext) -> None:
        super().__init__(method, context)
        self._compared: tuple[Chosen, Mapping[ClientId, list[ClientId]]] | None = None
        """A value, and the clients with similar pairs for each client in its `uploads`."""

    def initial(self) -> Chosen:
        return Chosen(self.start)

    def _due(self, value: Chosen, client: ClientId, exchange: int) -> bool:
        """Return whether a trial is due for a client before an exchange."""
        latest = latest_trial(exchange) if exchange < self.context.rounds else 0
        return latest > value.tried.get(client, 0)

    def _is_due(self, value: Chosen, exchange: int) -> bool:
        """Return whether a trial is due for any client before an exchange."""
        return any(self._due(value, client, exchange) for client in value.rows)

    def _tries(self, value: Chosen, client: ClientId, exchange: Exchange) -> bool:
        """Return whether an exchange is a trial of a client."""
        is_known = client in value.uploads and len(value.uploads) > 1
        return is_known and self._due(value, client, exchange.turn.exchange)

    def _peers(self, value: Chosen, client: ClientId, exchange: Exchange) -> list[ClientId]:
        """Return the clients whose pairs a client receives in an exchange.

        If there are more than `peers`, half of these are the clients with the largest weights or,
        before the first trial, with the most similar pairs. The other half rotates.
        """
        if self.method.trials == "gradients" or not self._tries(value, client, exchange):
            return []
        number = exchange.turn.exchange
        others = sorted(value.uploads.keys() - {client})
        most = self.method.peers
        if len(others) <= most:
            return others
        chance = generator(self.context.seed, "peers", client)
        others = [others[i] for i in torch.randperm(len(others), generator=chance).tolist()]
        if row := value.rows.get(client):
            others.sort(key=lambda other: -row.get(other, 0.0))
            first = others[: most - most // 2]
        else:
            first = self._similar(value)[client]
        rest = [other for other in others if other not in first]
        begin = latest_trial(number).bit_length() * (most // 2) % len(rest)
        return sorted({*first, *[*rest, *rest][begin : begin + most // 2]})

    def _similar(self, value: Chosen) -> Mapping[ClientId, list[ClientId]]:
        if self._compared is None or self._compared[0] is not value:
            most = self.method.peers
            judged = value.uploads.mapped(self._judged)
            self._compared = value, nearest(judged, self.start, most - most // 2)
        return self._compared[1]

    def download(self, value: Chosen, client: ClientId, exchange: Exchange) -> Message:
        message = super().download(value, client, exchange)
        names = self.method.downloaded(self.parameters, client not in value.current)
        sent = {n: t for n, t in message["adapter"].items() if n in names}
        of_peers = value.uploads.only(self._peers(value, client, exchange))
        peers = of_peers.mapped(lambda tensors: {"adapter": rounded(self._judged(tensors))})
        values: dict[str, Json] = {}
        last = exchange.turn.exchange == self.context.rounds
        common = message["common"] if last or self._tries(value, client, exchange) else {}
        if peers or (last and common):
            values["sizes"] = {c: count for c, count in value.tokens.items() if c != client}
        if self.method.trials == "gradients":
            values["row"] = dict(value.rows.get(client, {}))
        groups = {**message.groups, "adapter": sent, "common": common}
        return replace(message, groups=groups, peers=peers, values=values)

    def expects(self, value: Chosen, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        return {"adapter": super().expects(value, client, exchange)["adapter"]}

    def check(self, value: Chosen, client: ClientId, upload: Message, exchange: Exchange) -> None:
        rest = {g: tensors for g, tensors in upload.groups.items() if g != "gradients"}
        super().check(value, client, replace(upload, groups=rest), exchange)
        checked_choice(client, upload.values.get("choice"), value.held)
        size = sum(tensor.numel() for tensor in self._judged(self.start).values())
        numbers = map(str, range(GRADIENTS if self._tries(value, client, exchange) else 0))
        sent = upload["gradients"]  # fewer, if the client has little validation text
        check_shapes(sent, {number: (size,) for number in numbers if number in sent})

    def reference(
        self, value: Chosen, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        mean = super().download(value, client, exchange)["adapter"]
        if not (peers := self._peers(value, client, exchange)):
            return {"adapter": mean}
        chosen = checked_choice(client, upload.values.get("choice"), value.held)["row"]
        received = value.rows.get(client) or shares_of(value.tokens)
        own = {**mean, **value.uploads[client]}
        pairs: dict[str, Tensors] = {
            peer: widened(rounded(self._judged(value.uploads[peer]))) for peer in peers
        }
        pairs[client] = self._judged(own)
        return {"adapter": mixed(client, own, mean, pairs, chosen, received)}

    def rows(self, value: Chosen, exchange: Exchange) -> Rows:
        everybody = shares_of(value.tokens)
        rows = {client: row or everybody for client, row in value.rows.items()}
        number = exchange.turn.exchange + 1
        needed = number == self.context.rounds or (
            self.method.trials == "gradients" and self._is_due(value, number)
        )
        # From two means of one exchange, a client could compute those of fewer others.
        if needed and self.context.least_others == 1:
            rows[EVERYBODY] = everybody
        return limited_rows(rows, exchange.counted, self.context.least_others)

    def aggregate(self, value: Chosen, exchange: Exchange) -> Chosen:
        number = exchange.turn.exchange
        trying = {client for client in exchange.asked if self._tries(value, client, exchange)}
        gradients = self.method.trials == "gradients"
        choices = {
            client: checked_choice(client, choice, value.held)
            for client, choice in exchange.each("choice").items()
        }

        def accepts(client: ClientId, row: Row) -> bool:
            # The server computes the weights of clients that send gradients; they may stay alone.
            return row.keys() == {client} if gradients else client in trying

        rows = {
            client: row if accepts(client, row := choice["row"]) else value.rows.get(client, {})
            for client, choice in choices.items()
        }
        value = replace(
            value,
            rows=value.rows | rows,
            tokens=value.tokens | {c: choice["tokens"] for c, choice in choices.items()},
            tried=value.tried | dict.fromkeys(trying, latest_trial(number)),
        )
        value = super().aggregate(self._judge(value, exchange), exchange)
        common = dict(value.means.get(EVERYBODY, {}))
        if number + 1 < self.context.rounds:
            common = self._judged(common)
        due, is_complete = self._is_due(value, number + 1), (number + 1) % self.method.every == 0
        return replace(
            value,
            means=value.means.without(EVERYBODY),
            common=common,
            uploads=value.uploads | exchange.each("adapter") if due else PerClient(),
            current=PerClient() if is_complete else value.current | dict.fromkeys(choices, True),
        )

    def _judge(self, value: Chosen, exchange: Exchange) -> Chosen:
        """Return the value with weights from the gradients that clients have sent, if any."""
        if self.method.trials == "parameters" or not (gradients := exchange.each("gradients")):
            return value
        start, uploads = self._judged(self.start), exchange.each("adapter")
        changes = [{n: t[n] - start[n] for n in sorted(start)} for t in uploads.values()]
        directions = [
            torch.cat([t.double().flatten() for t in change.values()])
            for change in at_one_length(changes)
        ]
        shares = shares_of(dict(sorted(value.tokens.items())))
        trust, least_others = self.method.trust, self.context.least_others
        rows: dict[str, Mapping[str, float]] = {}
        judged: dict[str, Mapping[str, list[float]]] = {}
        for client, sent in gradients.items():
            products = [[torch.dot(d, g.double()) for d in directions] for g in sent.values()]
            slopes = torch.tensor(products, dtype=torch.float64)
            old = {c: (m, p) for c, (m, p) in value.evidence.get(client, {}).items()}
            evidence = updated(old, slopes, part_of(shares, uploads))
            judged[client] = {c: [*known] for c, known in evidence.items() if c in shares}
            rows[client] = row_of(shares, excess(evidence), trust, client, least_others)
        return replace(value, evidence=value.evidence | judged, rows=value.rows | rows)

    def _judged(self, tensors: Tensors) -> Tensors:
        """Return the tensors that trials compare."""
        return {n: t for n, t in tensors.items() if self.method.judges(self.parameters[n])}
