"""Averages that are exact: the mean of `B A` is not the product of the means of B and of A.

After FedEx-LoRA (arXiv 2410.09432): beside the means, the server sends what they miss of the mean
update, `mean_i(B_i A_i) - B A`, and clients add it to the layer, frozen. FedEx-LoRA adds it to the
base; here clients share their base with others, so it stays beside it, in low-rank factors.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from coterie.adapters import Adapter
from coterie.aggregation import LowRankSum, product_norm
from coterie.exchange import Field as Travels
from coterie.exchange import Message, Schema, Shapes, State, check_shapes
from coterie.methods.adapter import AdapterClient, AdapterServer
from coterie.methods.contract import ClientContext, ClientId, ServerContext
from coterie.methods.lora import LoraMethod

PREFIX = "residual/"
NEGLIGIBLE = 1e-7
"""Singular values of a residual, relative to the update, that float32 does not hold either."""


class AveragingMethod(LoraMethod):
    """A method whose server averages pairs of which both matrices are trained."""

    aggregation: Literal["mean", "exact"] = Field(
        default="mean",
        description="what is averaged: A and B; or exact: their products, at more traffic",
    )

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The residuals come down too."""
        schema = super().schema()
        if self.aggregation == "mean":
            return schema
        residual = Travels(f"{PREFIX}*", "what the averaged low-rank pairs miss of the mean update")
        return Schema(hello=schema.hello, up=schema.up, down=(*schema.down, residual))

    def client(self, context: ClientContext) -> AdapterClient:
        """Takes residuals in, if averages are exact."""
        kind = AdapterClient if self.aggregation == "mean" else ExactClient
        return kind(self, context)

    def server(self, context: ServerContext) -> AdapterServer:
        """Keeps account of residuals, if averages are exact."""
        kind = AdapterServer if self.aggregation == "mean" else ExactServer
        return kind(self, context)


class ExactClient(AdapterClient):
    """Adds the server's residuals to its shared pairs; they are not trained and not uploaded."""

    adapter: Adapter

    def finish(self, download: Message) -> None:
        """Replace the shared parameters and the residuals by the server's."""
        whole = {name: tuple(p.shape) for name, p in self.shared.items()}
        check_shapes(download, whole | _residual_shapes(download, whole))
        residual = {n: t for n, t in download.tensors.items() if n.startswith(PREFIX)}
        shared = {name: download.tensors[name] for name in whole}
        super().finish(Message(download.round, shared))
        self.adapter.set_residual(residual)

    def state(self) -> State:
        """The residuals too."""
        state = super().state()
        residual = {f"adapter/{name}": t for name, t in self.adapter.residual().items()}
        return State({**state.tensors, **residual}, state.values)

    def restore(self, state: State) -> None:
        """Take residuals back too."""
        super().restore(state)
        tensors = {name.removeprefix("adapter/"): t for name, t in state.tensors.items()}
        self.adapter.set_residual(tensors)


class ExactServer(AdapterServer):
    """For every shared pair: the residual `R = sum over rounds of (mean_i(B_i A_i) - B A)`, with B
    and A the means. It is common to all clients, so what they have in a round is exactly the mean
    of what they had at the end of the round before."""

    def __init__(self, method: LoraMethod, context: ServerContext) -> None:
        super().__init__(method, context)
        self.residual: dict[str, Tensor] = {}
        self.sums: dict[str, LowRankSum] = {}
        self.counts: dict[str, int] = {}

    def open(self, round: int, participants: list[ClientId]) -> None:
        """Start the sums."""
        super().open(round, participants)
        self.sums, self.counts = {}, {}

    def download(self, client: ClientId) -> Message:
        """With the residuals of the client's pairs."""
        message = super().download(client)
        names = [f"{PREFIX}{name}" for name in self.held[client]]
        residual = {name: self.residual[name] for name in names if name in self.residual}
        return Message(message.round, {**message.tensors, **residual})

    def receive(self, client: ClientId, upload: Message) -> None:
        """Count products in too."""
        super().receive(client, upload)
        for name, A in upload.tensors.items():
            pair = name.removesuffix(".A")
            if pair != name:
                self.sums.setdefault(pair, LowRankSum()).add(upload.tensors[f"{pair}.B"], A)
                self.counts[pair] = self.counts.get(pair, 0) + 1

    def close(self) -> None:
        """Take the means, then add to the residuals what they miss."""
        super().close()
        for pair, total in self.sums.items():
            a, b = f"{PREFIX}{pair}.A", f"{PREFIX}{pair}.B"
            A, B, count = self.shared[f"{pair}.A"], self.shared[f"{pair}.B"], self.counts[pair]
            total.add(-count * B.double(), A)
            if a in self.residual:
                total.add(count * self.residual.pop(b).double(), self.residual.pop(a))
            U, S, Vt = total.svd()
            S = S / count
            least = NEGLIGIBLE * max(S[0].item(), product_norm(B, A))
            kept = int(S.gt(least).sum())
            if kept:
                self.residual[a] = Vt[:kept].float().contiguous()
                self.residual[b] = (U * S)[:, :kept].float().contiguous()
        self.sums = {}

    def state(self) -> State:
        """The residuals too."""
        state = super().state()
        return State({**state.tensors, **self.residual}, state.values)

    def restore(self, state: State) -> None:
        """Take residuals back too."""
        super().restore(state)
        self.residual = {n: t for n, t in self.shared.items() if n.startswith(PREFIX)}
        self.shared = {n: t for n, t in self.shared.items() if n not in self.residual}


def _residual_shapes(download: Message, whole: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes that residuals must have: any rank, but one, and the widths of a shared pair."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in download.tensors.items():
        pair = name.removeprefix(PREFIX).removesuffix(".A")
        if name == f"{PREFIX}{pair}.A" and f"{pair}.A" in whole and tensor.dim():
            shapes[name] = (len(tensor), whole[f"{pair}.A"][1])
            shapes[f"{PREFIX}{pair}.B"] = (whole[f"{pair}.B"][0], len(tensor))
    return shapes
