"""Exact averages of the products B A of LoRA pairs, as in FedEx-LoRA (arXiv 2410.09432).

The mean of the clients' products B_i A_i differs from the product of the means B and A. In addition
to B and A, the server therefore sends the residual of every pair, `mean_i(B_i A_i) - B A`. Clients
apply the residual in the layer's forward pass but do not train it. FedEx-LoRA adds residuals to the
base's weights. In Coterie, several clients may use one copy of the base, so residuals are stored
separately, as low-rank factors.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import Tensor

from coterie.adapters import Parameter, pairs_of
from coterie.exchanges.exchange import Exchange
from coterie.messages import Field as MessageField
from coterie.messages import Schema, Shapes, Tensors
from coterie.methods.low_rank import LowRankSum, product_norm

SETTING: Any = Field(
    default=False,
    description="average the products B A exactly, which needs more traffic (FedEx-LoRA); "
    "false: average A and B",
)
"""The pydantic field of the setting `exact`.

The field has an explicit description, because the fields of presets have no docstrings.
"""
NEGLIGIBLE = 1e-7
"""The relative size below which a residual's singular values are dropped (float32 precision)."""


def with_residuals(averaged: Schema) -> Schema:
    """Extend a method's schema with the fields that exact averaging of LoRA pairs needs.

    Args:
        averaged: The method's schema without these fields, in which LoRA pairs are averaged. Its
            uploads must have exactly one field, which contains the LoRA pairs and has the reduction
            `mean`.

    Returns:
        A schema in which downloads also contain residuals (see `residuals`). The server receives
        each client's LoRA pairs in addition to the mean of all pairs.
    """
    each = tuple(replace(field, reduce="each") for field in averaged.up)
    residual = MessageField(
        "residual",
        "for each LoRA pair, the mean of the clients' products B A minus the product of the "
        "averaged B and the averaged A, summed over rounds",
        of=tuple(field.name for field in averaged.up),
        grows=True,
    )
    return Schema(averaged.hello, (*averaged.up, *each), (*averaged.down, residual))


def residual_shapes(
    parameters: Mapping[str, Parameter], shared: Shapes, residual: Tensors
) -> Shapes:
    """Return the shapes that the residuals in a download must have.

    Args:
        parameters: A mapping from names to the parameters of the client's adapter.
        shared: A mapping from the names of the shared tensors to their shapes.
        residual: The low-rank factors of the residuals. A factor has the name of the shared tensor
            A or B to which it belongs. It also has the shape of this tensor, except that its LoRA
            rank may be any number. The two factors of a residual must have equal ranks.

    Returns:
        A mapping from the name of each factor to the factor's shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for a, b in pairs_of(parameters):
        A = residual.get(a.name)
        if a.name in shared and A is not None and A.dim():
            shapes[a.name] = (len(A), shared[a.name][1])
            shapes[b.name] = (shared[b.name][0], len(A))
    return shapes


def residuals(
    parameters: Mapping[str, Parameter], before: Tensors, means: Tensors, exchange: Exchange
) -> dict[str, Tensor]:
    """Return the residuals of all shared pairs after an exchange.

    The residual R of a pair is the sum of `mean_i(B_i A_i) - B A` over all rounds. Here mean_i is
    the mean over clients, and B and A are the means of the round's B_i and A_i. R is the same for
    all clients. A client starts a round with the update `B A + R`, which is exactly the mean of the
    clients' updates at the end of the previous round. Singular values of R that are negligible in
    float32 are dropped.

    Args:
        parameters: The shared parameters, by name.
        before: The low-rank factors of each residual before the exchange, under the names of the
            pair's A and B.
        means: The mean of each A and each B over the clients, keyed by the tensor's name.
        exchange: The exchange, with the uploads of the clients' pairs.

    Returns:
        The low-rank factors of each residual, under the names of the pair's A and B.
    """
    pairs = [(a.name, b.name) for a, b in pairs_of(parameters)]
    sums: dict[str, LowRankSum] = {}
    for client, adapter in exchange.each("adapter").items():
        weight = exchange.weight(client)
        for a, b in pairs:
            if a in adapter and b in adapter:
                total = sums.setdefault(a, LowRankSum())
                total.add(weight * adapter[b].double(), adapter[a])
                total.weight += weight
    after = dict(before)
    for a, b in pairs:
        if a not in sums:
            continue
        total, A, B = sums.pop(a), means[a], means[b]
        weight = total.weight
        total.add(-weight * B.double(), A)
        if a in after:
            total.add(weight * after.pop(b).double(), after.pop(a))
        U, S, Vt = total.svd()
        S = S / weight
        threshold = NEGLIGIBLE * max(S[0].item(), product_norm(B, A))
        rank = int(S.gt(threshold).sum())
        if rank:
            after[a] = Vt[:rank].float().contiguous()
            after[b] = (U * S)[:, :rank].float().contiguous()
    return after
