"""Exact averages of LoRA pairs: the mean of `B A` is not the product of the means of B and A.

Follows FedEx-LoRA (arXiv 2410.09432). In addition to the means A and B, the server sends the
residual of every pair, `mean_i(B_i A_i) - B A`, which clients add to the layer's output without
training it. FedEx-LoRA adds residuals to the base's weights. In Coterie several clients may use one
copy of the base, so residuals are stored separately, as low-rank factors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import Tensor

from coterie.adapters import Parameter, pairs_of
from coterie.aggregation.low_rank import LowRankSum, product_norm
from coterie.aggregation.weights import TOKENS
from coterie.messages import Field as MessageField
from coterie.messages import Groups, Message, Schema, Shapes, Tensors

SETTING: Any = Field(
    default=False,
    description="average the products B A exactly, at more traffic (FedEx-LoRA); false: "
    "average A and B",
)
"""The setting `exact`, with a description because presets have no docstrings under fields."""
NEGLIGIBLE = 1e-7
"""The relative size below which a residual's singular values are dropped: float32's precision."""


def with_residuals(averaged: Schema) -> Schema:
    """Extend the schema of averaged pairs: residuals are sent down, and each client's pairs up.

    Args:
        averaged: The schema of a method that averages LoRA pairs.

    Returns:
        A schema in which the server also receives each client's pairs.
    """
    each = tuple(replace(field, reduce="each") for field in averaged.up)
    residual = MessageField(
        "residual", "difference of the mean update from the averaged LoRA pairs"
    )
    return Schema(averaged.hello, (*averaged.up, *each), (*averaged.down, residual))


def residual_shapes(
    parameters: Mapping[str, Parameter], shared: Shapes, residual: Tensors
) -> Shapes:
    """Return the shapes that the residuals in a download must have.

    Args:
        parameters: The parameters of the client's adapter, by name.
        shared: The shapes of the shared tensors, by name.
        residual: The residuals' factors. A and B of a residual must have equal ranks, but the rank
            is arbitrary; their widths must be those of the shared pair.

    Returns:
        The shapes, by name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for a, b in pairs_of(parameters):
        A = residual.get(a.name)
        if a.name in shared and A is not None and A.dim():
            shapes[a.name] = (len(A), shared[a.name][1])
            shapes[b.name] = (shared[b.name][0], len(A))
    return shapes


class Residuals:
    """The residuals of all shared pairs, on the server.

    The residual of a pair is R, the sum over rounds of `mean_i(B_i A_i) - B A`, where B and A are
    the means. R is the same for all clients. A client therefore starts a round with the update
    `B A + R`, which is exactly the mean of the clients' updates at the end of the previous round.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.pairs = [(a.name, b.name) for a, b in pairs_of(parameters)]
        self.tensors: dict[str, Tensor] = {}
        """The factors of each R, by the names of the pair's A and B."""
        self.start_round()

    def start_round(self) -> None:
        """Reset the sums at the start of a round."""
        self.sums: dict[str, LowRankSum] = {}

    def groups(self, names: Iterable[str]) -> Groups:
        """Return the group of residuals for a message or a state.

        Args:
            names: The names of the tensors whose residuals are needed.

        Returns:
            The group `residual`, or no group if there are no pairs.
        """
        residuals = {name: self.tensors[name] for name in names if name in self.tensors}
        return {"residual": residuals} if self.pairs else {}

    def receive(self, upload: Message) -> None:
        """Add a client's products B A, multiplied by the client's weight in the mean."""
        adapter, weight = upload["adapter"], upload.values.get(TOKENS.name, 1)
        for a, b in self.pairs:
            if a in adapter and b in adapter:
                total = self.sums.setdefault(a, LowRankSum())
                total.add(weight * adapter[b].double(), adapter[a])
                total.weight += weight

    def end_round(self, means: Tensors) -> None:
        """Add this round's `mean_i(B_i A_i) - B A` to every R, as truncated low-rank factors."""
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
            threshold = NEGLIGIBLE * max(S[0].item(), product_norm(B, A))
            rank = int(S.gt(threshold).sum())
            if rank:
                self.tensors[a] = Vt[:rank].float().contiguous()
                self.tensors[b] = (U * S)[:, :rank].float().contiguous()
