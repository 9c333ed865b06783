"""FedALT (arXiv 2503.11880): a client's own LoRA, mixed with the mean of the other clients' LoRA.

On each client, an adapted layer has two LoRA pairs: the client's own pair (A1, B1), which is
trained and uploaded, and the rest-of-world pair (A0, B0), which is frozen. A router G, which never
leaves the client, weights both pairs for each token. With a scaling factor g, the layer computes

    a = softmax(G x)
    y = W x + b + g (a_0 B0 A0 dropout(x) + a_1 B1 A1 dropout(x))

For each client, the server averages the A1 and the B1 of all other clients. The client loads these
means into its rest-of-world pair, and keeps its own pair.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from coterie.adapters import Adapter, Layout, Parameter, Trainable
from coterie.bases.sites import QUERY_VALUE
from coterie.exchanges.exchange import Exchange
from coterie.messages import Groups, Message, Schema, Tensors, check_shapes
from coterie.methods.adapter import AdapterClient
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.grouped import Personal, PersonalMethod, PersonalServer
from coterie.methods.settings import Attention, Lora
from coterie.methods.tensors import closest, copy, shapes_of
from coterie.methods.value import PerClient
from coterie.training.schedule import Level
from coterie.transforms.context import Rows

OTHERS, OWN = 0, 1
"""The index of the rest-of-world pair and the index of a client's own pair in each layer."""


class FedALT(PersonalMethod):
    """FedALT: a client's own LoRA pairs beside the frozen mean of the others' pairs.

    In reports, `generalist 1` is the rest-of-world pair, and `generalist 2` is the client's own
    pair. The mean is over the other clients that took part in the round. If there are none, a
    client keeps its rest-of-world pair, which has no effect at the start. With two clients, each
    client receives the pairs of the other client.
    """

    name: ClassVar[str] = "fedalt"
    paper: ClassVar[str] = "arXiv 2503.11880"
    summary: ClassVar[str] = "own LoRA pairs, mixed with the frozen mean of the others' pairs"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shared_roles: ClassVar[tuple[str, ...]] = ("generalist",)

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: Lora = Lora(alpha=32.0, scale="rank")

    def shared(self, parameter: Parameter) -> bool:
        return parameter.expert == OWN

    def schema(self) -> Schema:
        averaged = super().schema()
        return replace(
            averaged, up=(*averaged.up, *(replace(f, reduce="each") for f in averaged.up))
        )

    def layout(self, client: ClientId) -> Layout:
        layout, rank = super().layout(client), self.attention.rank
        experts = replace(layout, generalists=2, rank=rank, placement="linear", routed=True)
        return replace(experts, attention_rank=0)  # the experts take the place of single pairs

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Trainable:
        return Adapter(base, self.layout(client), seed, client, lambda parameter: True)

    def levels(self, client: AdapterClient) -> list[Level]:
        [level] = super().levels(client)
        return [replace(level, selects=lambda parameter: parameter.expert != OTHERS)]

    def client(self, context: ClientContext) -> "FedALTClient":
        return FedALTClient(self, context)

    def server(self, context: ServerContext) -> "FedALTServer":
        return FedALTServer(self, context)


class FedALTClient(AdapterClient[FedALT]):
    """A client that loads the mean of the other clients' pairs into its rest-of-world pairs."""

    def receive(self, download: Message) -> None:
        check_shapes(download["adapter"], shapes_of(self.shared))
        others = self.adapter.tensors(lambda parameter: parameter.expert == OTHERS)
        # Names differ only in the index of the pair, so both mappings have the same order.
        copy(download["adapter"], dict(zip(self.shared, others.values(), strict=True)))


@dataclass(frozen=True, eq=False)
class Own(Personal):
    """The clients' means and own pairs."""

    uploads: PerClient[Tensors] = PerClient()
    """The latest own pairs of each client, from which the client trains."""


class FedALTServer(PersonalServer[FedALT, Own]):
    """A server that averages, for each client, the uploads of all other clients."""

    def initial(self) -> Own:
        return Own(self.start)

    def rows(self, value: Own, exchange: Exchange) -> Rows:
        return {c: dict.fromkeys(value.held.keys() - {c}, 1.0) for c in value.held}

    def reference(
        self, value: Own, client: ClientId, upload: Message, exchange: Exchange
    ) -> Groups:
        # A client that has lost its state begins with the initial values.
        last = value.uploads.get(client, self.start)
        return {"adapter": closest(upload["adapter"], last, self.start)}

    def aggregate(self, value: Own, exchange: Exchange) -> Own:
        uploads = value.uploads | exchange.each("adapter")
        return replace(super().aggregate(value, exchange), uploads=uploads)
