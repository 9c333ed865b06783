"""FedAMoLE's mixture on single linear layers (arXiv 2411.19128, section 4).

On each client, an adapted layer has a shared expert s, which all clients hold, and the n domain
experts that chose this client. For an input x (in,), the token embedding is t = W_t x (r,), and the
embedding of the domain expert j is e_j = A_j x (r,). With a scaling factor g, the output is:

    p_j = softmax_j(t . e_j / sqrt(r))
    w_j = p_j for the k experts with the highest p_j, scaled to sum to 1; 0 for all other experts
    y   = W x + b + g B_s A_s x + g sum_j w_j B_j e_j

The router's shape does not depend on n, so the routers of clients with different experts can be
averaged. One matrix product computes all embeddings, and a second matrix product computes the
outputs of all experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.adapter import Trainable
from coterie.adapters.dropout import dropout, drops
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraPair
from coterie.adapters.parameter import Parameter, by_name, initialise
from coterie.adapters.routed import Router
from coterie.bases.padding import real_mask
from coterie.bases.sites import QUERY_VALUE, Linear, chosen_linears, sizes, working_dtype
from coterie.errors import CoterieError


@dataclass(frozen=True)
class AmoleLayout:
    """The settings of a FedAMoLE adapter, which apply to each adapted linear layer."""

    experts: int
    """Number of domain experts in the whole run. Each client holds some of these experts."""
    rank: int = 8
    alpha: float = 16.0
    top_k: int = 2
    """Maximum number of domain experts per token."""
    targets: str | None = QUERY_VALUE
    """Regular expression for the last component of a linear layer's path, or for the layer's place
    (see `place_of`); None selects all linear layers of attention."""
    shared: bool = True
    """Whether there is an expert that every client holds and that processes every token."""
    router: Literal["token", "vanilla"] = "token"
    """Kind of the router. token: FedAMoLE's router. vanilla: a linear gate with one row for each
    domain expert of the run. A client uses only the rows of the experts that it holds."""
    score_scale: Literal["rank", "dim"] = "rank"
    """Divisor of the token router's scores. rank: sqrt(rank). dim: sqrt(in), as in the paper, where
    `in` is the layer's input width."""
    renormalise: bool = True
    """Whether the weights of the experts that are chosen for a token are scaled to sum to 1. In the
    paper, the weights are not scaled."""
    load: Literal["top_k", "first"] = "top_k"
    """Definition of an expert's load. top_k: the share of tokens that the expert processes. first:
    the share of tokens for which the expert has the highest score."""
    dropout: float = 0.0
    """Dropout rate in training. Dropout is applied to the input of every expert's A, but not to the
    router's input."""

    def __post_init__(self) -> None:
        """Raise CoterieError if a number is out of range."""
        if min(self.rank, self.top_k) < 1 or self.experts < 0:
            raise CoterieError("rank and top_k must be at least 1, and experts at least 0.")

    @property
    def gain(self) -> float:
        """The factor g by which low-rank products are scaled."""
        return self.alpha / self.rank


class AmoleLinear(Router):
    """A linear layer with n stacked domain experts and, optionally, a shared expert.

    `A` (n, r, in) and `B` (n, out, r) stack the factors of the domain experts in the order of
    `held`. The router is either FedAMoLE's token projection or a gate (see `AmoleLayout.router`).
    The attribute `router` contains the router's weight. The weight of a token projection has the
    shape (r, in). The weight of a gate has the shape (experts, in), where `experts` is the number
    of domain experts in the whole run. A client uses only the rows of the gate's weight that belong
    to the experts in `held`. The tensor `rows` (n,) contains the indices of these rows.

    Args:
        base: The linear layer.
        path: Path of the layer in the base.
        layout: The layout, which sets the numbers of experts, the ranks and the routing.
        held: Indices of the domain experts that the client holds.
    """

    rows: Tensor

    def __init__(self, base: Linear, path: str, layout: AmoleLayout, held: Sequence[int]) -> None:
        super().__init__(base, len(held), layout.top_k if layout.load == "top_k" else 1)
        self.path, self.layout, self.held = path, layout, tuple(held)
        pair = LoraPair("shared", path, sizes(base), layout.rank, base.weight)
        A, B, n = pair.A.data, pair.B.data, len(self.held)
        self.shared = pair if layout.shared else None
        self.A = nn.Parameter(A.new_zeros(n, *A.shape))
        self.B = nn.Parameter(B.new_zeros(n, *B.shape))
        rows = layout.rank if layout.router == "token" else layout.experts
        self.router = nn.Parameter(A.new_zeros(rows, A.shape[1]))
        self.register_buffer("rows", torch.tensor(self.held, device=A.device, dtype=torch.long))
        self.recorded: list[tuple[Tensor, Tensor]] | None = None
        """Sums and counts (see `_sums`) of each forward pass in `AmoleAdapter.recording`; None
        outside this context."""

    def described(self, stacked: bool) -> Iterator[Parameter]:
        """Yield the adapter's parameters on this layer, with their names and roles.

        Args:
            stacked: Whether to yield one stacked A and one stacked B that contain the factors of
                all domain experts. If false, a separate A and B are yielded for each domain expert.
                These tensors are views of the stacked tensors.
        """
        path, experts = self.path, [("domain", None, self.A, self.B)] if self.held else []
        if not stacked:
            experts = [
                (f"domain.{expert}", expert, nn.Parameter(A), nn.Parameter(B))
                for expert, A, B in zip(self.held, self.A.data, self.B.data, strict=True)
            ]
        for name, expert, A, B in experts:
            yield Parameter(f"{name}/{path}.A", "domain", A, "kaiming", path, "A", expert)
            yield Parameter(f"{name}/{path}.B", "domain", B, "zero", path, "B", expert)
        if self.shared is not None:
            yield from self.shared.described()
        kind = "projection" if self.layout.router == "token" else "gate"
        yield Parameter(f"{kind}/{path}", "projection", self.router, "kaiming", path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, in) to (batch, time, out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        router_output, shared, domain = self._project(x.flatten(0, -2))
        if self.recorded is not None:
            self.recorded.append(_sums(torch.cat([domain, router_output.unsqueeze(1)], dim=1), x))
        weights = self._route(router_output, domain)
        low = torch.cat([shared, (domain * weights.to(x.dtype).unsqueeze(-1)).flatten(1)], dim=1)
        Bs = [] if self.shared is None else [self.shared.B.t()]
        # This memory layout, (rank, out), makes the backward pass use the thin factor first.
        B = torch.cat([*Bs, self.B.transpose(1, 2).flatten(0, 1)]).to(x.dtype)
        return torch.addmm(y.flatten(0, -2), low, B, alpha=self.layout.gain).view_as(y)

    def _project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the products of the input with the router's weight and with each expert's A.

        Without dropout, a single matrix product computes all of these products.

        Args:
            tokens: The input of the layer, (tokens, in).

        Returns:
            Three tensors. The first tensor contains the token embeddings, shaped (tokens, r). If
            the router is a gate, the first tensor contains the gate's scores instead, shaped
            (tokens, n). The second tensor is the product with the shared expert's A, shaped
            (tokens, r). Without a shared expert, the second tensor is shaped (tokens, 0). The third
            tensor contains the products with the A of each of the n domain experts, shaped
            (tokens, n, r).
        """
        has_gate = self.layout.router != "token"
        router = self.router.index_select(0, self.rows) if has_gate else self.router
        As = [] if self.shared is None else [self.shared.A]
        widths = [len(router), sum(map(len, As)), len(self.held) * self.layout.rank]
        if drops(rate := self.layout.dropout):  # each expert has its own mask
            experts = [dropout(tokens, rate) @ A.to(tokens.dtype).t() for A in (*As, *self.A)]
            product = torch.cat([tokens @ router.to(tokens.dtype).t(), *experts], dim=1)
        else:
            product = tokens @ torch.cat([router, *As, self.A.flatten(0, 1)]).to(tokens.dtype).t()
        router_output, shared, domain = product.split(widths, dim=1)
        return router_output, shared, domain.unflatten(1, (len(self.held), self.layout.rank))

    def _route(self, router_output: Tensor, domain: Tensor) -> Tensor:
        """Compute the routing weights of the domain experts, shaped (tokens, n).

        If an expert is not chosen for a token, its routing weight for the token is 0.

        Args:
            router_output: The first tensor returned by `_project`.
            domain: The third tensor returned by `_project`.
        """
        scores = router_output.to(self.router.dtype)
        if self.layout.router == "token":
            # Autocast would reduce the precision of a matrix product, so none is used here.
            scores = (domain.to(scores.dtype) * scores.unsqueeze(1)).sum(-1)
            dim = self.layout.rank if self.layout.score_scale == "rank" else self.router.shape[1]
            scores = scores / dim**0.5
        p = scores.softmax(-1)
        self._keep(p)
        return self._weights(p)

    def _works(self, p: Tensor) -> Tensor:
        """Return a tensor shaped (tokens, n) that marks the experts that work on each token.

        An element is 1 if the expert is chosen for the token, and 0 otherwise.

        Args:
            p: The softmax of the router's scores, shaped (tokens, n).
        """
        if len(self.held) <= self.layout.top_k:
            return torch.ones_like(p)
        chosen = p.detach().topk(self.layout.top_k, dim=-1).indices
        return torch.zeros_like(p).scatter(1, chosen, 1)

    def _weights(self, p: Tensor) -> Tensor:
        weights = p * self._works(p)
        if not self.layout.renormalise or self.layout.top_k == 1:
            return weights  # a single weight that is scaled to 1 would have no gradient
        return weights / weights.sum(-1, keepdim=True)

    def _loads(self) -> tuple[Tensor, Tensor]:
        p = self._last_scores()  # eq. 27
        if self.layout.load == "top_k":
            f = self._works(p).mean(0) / self.layout.top_k
        else:
            f = F.one_hot(p.argmax(-1), len(self.held)).to(p.dtype).mean(0)
        return f, p.mean(0)

    def routing(self) -> Tensor:
        return self._weights(self._last_scores().detach()).mean(0)


def _sums(embeddings: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum embeddings over the tokens of each sample, excluding padding.

    Args:
        embeddings: (batch * time, n + 1, r). For each token, the first n vectors are the embeddings
            A_j x of the n domain experts, and the last vector is the token embedding.
        x: (batch, time, in), the layer's input.

    Returns:
        Two tensors. The first tensor contains the sums, shaped (batch, n + 1, r). The second tensor
        contains the number of tokens in each sample, shaped (batch,).
    """
    mask = real_mask(x.device)
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    rows = exact.unflatten(0, x.shape[:2])
    return rows.where(mask[..., None, None], 0).sum(1), mask.sum(1)


@dataclass(frozen=True)
class Recording:
    """Embeddings from several forward passes, summed over the tokens of each sample.

    Samples are in the order in which the forward passes read them.
    """

    passes: Mapping[str, list[tuple[Tensor, Tensor]]]
    """A mapping from the path of each layer to the sums and counts of every forward pass (see
    `_sums`)."""

    @property
    def sums(self) -> dict[str, Tensor]:
        """A mapping from the path of each layer to sums of embeddings.

        The sums are over the tokens of each sample, excluding padding. Each tensor has the shape
        (samples, n + 1, r). For each sample, the first n sums belong to the n domain experts that
        the client holds in the layer, and the last one is the sum of token embeddings.
        """
        return {path: torch.cat([s for s, _ in passes]) for path, passes in self.passes.items()}

    @property
    def counts(self) -> Tensor:
        """Number of tokens in each sample, shaped (samples,), excluding padding."""
        passes = next(iter(self.passes.values()))
        return torch.cat([count for _, count in passes])


class AmoleAdapter(Trainable):
    """A client's FedAMoLE adapter: stand-ins for linear layers of a base.

    Many adapters can share one base in memory, because each adapter contains only its own
    parameters. A tensor's initial values depend only on the seed and the tensor's name, so an
    expert has the same initial values on every client that holds the expert.

    Args:
        base: A model with linear layers that match the layout. If the base is on the meta device,
            the adapter uses only the names and shapes of the base's modules, and is created on the
            CPU.
        layout: The layout, which sets the adapted layers, the numbers of experts, the ranks and the
            routing.
        seed: The run's seed.
        held: A mapping from the path of each adapted layer to the indices of the domain experts
            that the client holds in this layer. The indices are in ascending order.

    Raises:
        CoterieError: The layout matches no layer, or `held` does not match the layout.
    """

    def __init__(
        self, base: nn.Module, layout: AmoleLayout, seed: int, held: Mapping[str, Sequence[int]]
    ) -> None:
        self.layout = layout
        self._checked_layout = Layout(0, 0, attention_rank=1, targets=layout.targets)
        linears = chosen_linears(base, layout.targets)
        _refuse_held(held, linears, layout)
        self.linears = {
            path: AmoleLinear(linear, path, layout, held[path]) for path, linear in linears.items()
        }
        stacks = [p for m in self.linears.values() for p in m.described(stacked=True)]
        super().__init__(stacks, self.linears, self.linears)
        initialise(self.parameters().values(), seed, "", common=lambda parameter: True)

    def parameters(self) -> dict[str, Parameter]:
        # `shared/PATH.A` (r, in) and `shared/PATH.B` (out, r); `domain.ID/PATH.A` and `.B` with the
        # same shapes, as views of the stacks; `projection/PATH` (r, in) or `gate/PATH`
        # (experts, in).
        return by_name(
            parameter for m in self.linears.values() for parameter in m.described(stacked=False)
        )

    def load_balance(self) -> Tensor:
        """Return the load-balance loss of the last forward pass as a scalar, summed over layers.

        Layers whose loss has no gradient are omitted. The result is 0 if no layers remain.
        """
        losses = [m.load_balance() for m in self.linears.values() if m.balances]
        if not losses:
            return torch.zeros(())
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record sums of embeddings in all forward passes inside the `with` block.

        Gradients are disabled inside the `with` block. Each forward pass adds sums for its samples
        to the recording that the context yields.

        Raises:
            CoterieError: The router is a gate, which has no token embeddings.
        """
        if self.layout.router != "token":
            raise CoterieError(
                "The experts cannot choose clients, because a vanilla router has no token "
                "embeddings; set router.kind to token."
            )
        passes: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in self.linears}
        try:
            for path, module in self.linears.items():
                module.recorded = passes[path]
            with torch.no_grad():
                yield Recording(passes)
        finally:
            for module in self.linears.values():
                module.recorded = None


def _refuse_held(
    held: Mapping[str, Sequence[int]], linears: Mapping[str, nn.Module], layout: AmoleLayout
) -> None:
    if wrong := sorted(held.keys() ^ linears.keys()):
        raise CoterieError(
            f"The layers in `held` do not match the adapted layers: {wrong[0]!r} is "
            f"{'missing' if wrong[0] in linears else 'not adapted'}."
        )
    for path, ids in held.items():
        if list(ids) != sorted({i for i in ids if 0 <= i < layout.experts}):
            raise CoterieError(
                f"The experts held at {path!r} are {list(ids)}; give distinct numbers from 0 to "
                f"{layout.experts - 1} in ascending order."
            )
