"""Averages that are exact: the mean of `B A` is not the product of the means of B and of A.

After FedEx-LoRA (arXiv 2410.09432): beside the means, the server sends what they miss of the mean
update, `mean_i(B_i A_i) - B A`, and clients add it to the layer, frozen. FedEx-LoRA adds it to the
base; here clients share their base with others, so it stays beside it, in low-rank factors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import Tensor

from coterie.adapters import Parameter, pairs_of
from coterie.aggregation.low_rank import LowRankSum, product_norm
from coterie.aggregation.weights import TOKENS
from coterie.messages import Field as Travels
from coterie.messages import Groups, Message, Schema, Shapes, Tensors

SETTING: Any = Field(
    default=False,
    description="average the products B A exactly, at more traffic (FedEx-LoRA); false: "
    "average A and B",
)
"""The setting `exact`. Presets add it, too, and have no class body to hold a docstring."""
NEGLIGIBLE = 1e-7
"""Singular values of a residual, relative to the update, that float32 does not hold either."""


def with_residuals(averaged: Schema) -> Schema:
    """What travels: the server needs each client's pairs too, and residuals go down."""
    each = tuple(replace(field, reduce="each") for field in averaged.up)
    residual = Travels("residual", "difference of the mean update from the averaged LoRA pairs")
    return Schema(averaged.hello, (*averaged.up, *each), (*averaged.down, residual))


def residual_shapes(
    parameters: Mapping[str, Parameter], shared: Shapes, residual: Tensors
) -> Shapes:
    """The shapes that residuals must have: any rank, but one, and the widths of a shared pair."""
    shapes: dict[str, tuple[int, ...]] = {}
    for a, b in pairs_of(parameters):
        A = residual.get(a.name)
        if a.name in shared and A is not None and A.dim():
            shapes[a.name] = (len(A), shared[a.name][1])
            shapes[b.name] = (shared[b.name][0], len(A))
    return shapes


class Residuals:
    """A server's account, for every shared pair, of `R = sum over rounds of
    (mean_i(B_i A_i) - B A)`, with B and A the means. R is common to all clients, so what they have
    in a round is exactly the mean of what they had at the end of the round before.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.pairs = [(a.name, b.name) for a, b in pairs_of(parameters)]
        self.tensors: dict[str, Tensor] = {}
        """R's factors, under the names of the pairs' A and B."""
        self.start_round()

    def start_round(self) -> None:
        """A round begins: start the sums."""
        self.sums: dict[str, LowRankSum] = {}

    def groups(self, names: Iterable[str]) -> Groups:
        """The group of a message or state with those of a client that holds these tensors; none
        without pairs."""
        found = {name: self.tensors[name] for name in names if name in self.tensors}
        return {"residual": found} if self.pairs else {}

    def receive(self, upload: Message) -> None:
        """Count a client's products in, by its weight in the mean."""
        adapter, weight = upload["adapter"], upload.values.get(TOKENS.name, 1)
        for a, b in self.pairs:
            if a in adapter and b in adapter:
                total = self.sums.setdefault(a, LowRankSum())
                total.add(weight * adapter[b].double(), adapter[a])
                total.weight += weight

    def end_round(self, means: Tensors) -> None:
        """Add what the means of A and B miss."""
        for a, b in self.pairs:
            if a not in self.sums:
                continue
            total, A, B = self.sums.pop(a), means[a], means[b]
            weight = total.weight
            total.add(-weight * B.double(), A)
            if a in self.tensors:
                total.add(weight * self.tensors.pop(b).double(), self.tensors.pop(a))
            U, S, Vt = total.svd()
            S = S / weight
            least = NEGLIGIBLE * max(S[0].item(), product_norm(B, A))
            kept = int(S.gt(least).sum())
            if kept:
                self.tensors[a] = Vt[:kept].float().contiguous()
                self.tensors[b] = (U * S)[:, :kept].float().contiguous()
