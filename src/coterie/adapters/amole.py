"""FedAMoLE's mixture on single linear layers (arXiv 2411.19128, section 4): one expert that all
clients share, and the domain experts that chose this client.

With n domain experts held, and t = W_t x the token's embedding (r,), e_j = A_j x an expert's (r,):

    p = softmax_j(t . e_j / sqrt(r))        w = p of the k highest, 0 elsewhere, summing to 1
    y = W x + b + g B_s A_s x + g sum_j w_j B_j e_j

The router's shape does not depend on n, so clients with different experts can average it. All
embeddings come from one product, and all experts' outputs from another.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters.adapter import Trainable, check_unchanged
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
    """What stands on each chosen linear layer."""

    experts: int
    """How many domain experts there are; a client holds some of them."""
    rank: int = 8
    alpha: float = 16.0
    top_k: int = 2
    """How many domain experts work on a token; all of them where fewer are held."""
    targets: str | None = QUERY_VALUE
    """Regular expression for the last part of a linear layer's path, as a whole, or for what it
    does; None: all of attention's."""
    shared: bool = True
    """Whether an expert that every client holds works on every token."""
    router: Literal["token", "vanilla"] = "token"
    """vanilla: a gate with one row for each of all experts, of which the held ones are used."""
    score_scale: Literal["rank", "dim"] = "rank"
    """The token router's scores are divided by sqrt(rank), or by sqrt(in) as in the paper."""
    renormalise: bool = True
    """Whether the weights of a token's experts are scaled to sum to 1; not so in the paper."""
    load: Literal["top_k", "first"] = "top_k"
    """What counts as an expert's load: the tokens it works on, or those whose best expert it is."""
    dropout: float = 0.0
    """Rate of dropout on what every expert's A reads, in training; the router reads all."""

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if min(self.rank, self.top_k) < 1 or self.experts < 0:
            raise CoterieError("rank and top_k must be at least 1, and experts at least 0.")

    @property
    def gain(self) -> float:
        """The factor g of a low-rank product."""
        return self.alpha / self.rank


class AmoleLinear(Router):
    """A linear layer with a shared expert and n domain experts, stacked.

    A: (n, r, in) and B: (n, out, r) are those of the experts in `held`, in this order; router is
    the token projection (r, in) or the gate (experts, in), whose `rows` (n,) are theirs.
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
        """Where `AmoleAdapter.recording` wants them: each forward pass's sums and counts."""

    def described(self, stacked: bool) -> Iterator[Parameter]:
        """Declare what is trained: domain experts in one stack, or each as a view of that."""
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
        """x: (batch, time, in) to (batch, time, out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        seen, shared, domain = self._project(x.flatten(0, -2))
        if self.recorded is not None:
            self.recorded.append(_sums(torch.cat([domain, seen.unsqueeze(1)], dim=1), x))
        weights = self._route(seen, domain)
        low = torch.cat([shared, (domain * weights.to(x.dtype).unsqueeze(-1)).flatten(1)], dim=1)
        Bs = [] if self.shared is None else [self.shared.B.t()]
        # (rank, out) in memory, so that its gradient is computed with the thin factor first.
        B = torch.cat([*Bs, self.B.transpose(1, 2).flatten(0, 1)]).to(x.dtype)
        return torch.addmm(y.flatten(0, -2), low, B, alpha=self.layout.gain).view_as(y)

    def _project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All that is computed from tokens (tokens, in), in one product unless inputs drop out.

        What the router sees, (tokens, r) or with a gate (tokens, n); A_s x: (tokens, r), or
        (tokens, 0) without a shared expert; and the domain experts' embeddings: (tokens, n, r).
        """
        token = self.layout.router == "token"
        router = self.router if token else self.router.index_select(0, self.rows)
        As = [] if self.shared is None else [self.shared.A]
        widths = [len(router), sum(map(len, As)), len(self.held) * self.layout.rank]
        if drops(rate := self.layout.dropout):  # each expert has a mask of its own
            experts = [dropout(tokens, rate) @ A.to(tokens.dtype).t() for A in (*As, *self.A)]
            product = torch.cat([tokens @ router.to(tokens.dtype).t(), *experts], dim=1)
        else:
            product = tokens @ torch.cat([router, *As, self.A.flatten(0, 1)]).to(tokens.dtype).t()
        seen, shared, domain = product.split(widths, dim=1)
        return seen, shared, domain.unflatten(1, (len(self.held), self.layout.rank))

    def _route(self, seen: Tensor, domain: Tensor) -> Tensor:
        """Each token's weights, 0 for the experts that do not work on it: (tokens, n)."""
        scores = seen.to(self.router.dtype)
        if self.layout.router == "token":
            # Not a matrix product: autocast would compute that with less precision.
            scores = (domain.to(scores.dtype) * scores.unsqueeze(1)).sum(-1)
            dim = self.layout.rank if self.layout.score_scale == "rank" else self.router.shape[1]
            scores = scores / dim**0.5
        p = scores.softmax(-1)
        self._keep(p)
        return self._weights(p)

    def _works(self, p: Tensor) -> Tensor:
        """1 for the experts that work on a token, else 0: (tokens, n)."""
        if len(self.held) <= self.layout.top_k:
            return torch.ones_like(p)
        chosen = p.detach().topk(self.layout.top_k, dim=-1).indices
        return torch.zeros_like(p).scatter(1, chosen, 1)

    def _weights(self, p: Tensor) -> Tensor:
        weights = p * self._works(p)
        if not self.layout.renormalise or self.layout.top_k == 1:
            return weights  # scaled to 1, the weight of a single expert would have no gradient
        return weights / weights.sum(-1, keepdim=True)

    def _loads(self) -> tuple[Tensor, Tensor]:
        """The load is the tokens that an expert works on, or those whose best it is (eq. 27)."""
        p = self._last_scores()
        if self.layout.load == "top_k":
            f = self._works(p).mean(0) / self.layout.top_k
        else:
            f = F.one_hot(p.argmax(-1), len(self.held)).to(p.dtype).mean(0)
        return f, p.mean(0)

    def routing(self) -> Tensor:
        """See `Router`."""
        return self._weights(self._last_scores().detach()).mean(0)


def _sums(embeddings: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Over each sample's real tokens, the sum of embeddings (batch * time, n + 1, r) to
    (batch, n + 1, r), and how many these are: (batch,); x: (batch, time, in)."""
    mask = real_mask(x.device)
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    rows = exact.unflatten(0, x.shape[:2])
    return rows.where(mask[..., None, None], 0).sum(1), mask.sum(1)


@dataclass(frozen=True)
class Recording:
    """What forward passes saw, sample by sample as they were read; the caller divides."""

    passes: Mapping[str, list[tuple[Tensor, Tensor]]]

    @property
    def sums(self) -> dict[str, Tensor]:
        """By module, summed over a sample's real tokens: (samples, n + 1, r), the embeddings of
        the experts held and last the token embedding."""
        return {path: torch.cat([s for s, _ in seen]) for path, seen in self.passes.items()}

    @property
    def counts(self) -> Tensor:
        """Real tokens of each sample: (samples,)."""
        seen = next(iter(self.passes.values()))
        return torch.cat([count for _, count in seen])


class AmoleAdapter(Trainable):
    """Everything one client trains with FedAMoLE: stand-ins for linear layers of a base.

    Many adapters can share one base in memory, as with `Adapter`. A tensor's first values depend
    on the seed and its name alone, so they are equal wherever that expert is held.

    Args:
        base: any model with linear layers that the layout names; on the meta device, the adapter
            learns names and shapes from it and is made on the CPU.
        layout: which layers, how many experts, how routed.
        seed: the run's seed.
        held: by path of each adapted layer, the domain experts held there, ascending.

    Raises:
        CoterieError: the layout names no layer, or `held` is not of its layers and experts.
    """

    def __init__(
        self, base: nn.Module, layout: AmoleLayout, seed: int, held: Mapping[str, Sequence[int]]
    ) -> None:
        self.layout = layout
        linears = chosen_linears(base, layout.targets)
        _refuse_held(held, linears, layout)
        self.linears = {
            path: AmoleLinear(linear, path, layout, held[path]) for path, linear in linears.items()
        }
        stacks = [p for m in self.linears.values() for p in m.described(stacked=True)]
        super().__init__(stacks, self.linears, self.linears)
        initialise(self.parameters().values(), seed, "", common=lambda parameter: True)

    def parameters(self) -> dict[str, Parameter]:
        """What travels, by expert and sorted by name; a domain expert's are views of the stacks.

        `shared/PATH.A`: (r, in) and `.B`: (out, r), `domain.ID/PATH.A` and `.B` alike, and
        `projection/PATH`: (r, in) or `gate/PATH`: (experts, in).
        """
        return by_name(
            parameter for m in self.linears.values() for parameter in m.described(stacked=False)
        )

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put this adapter into a base, in place of any other; see `Trainable`."""
        check_unchanged(base, Layout(0, 0, attention_rank=1, targets=self.layout.targets))
        return super().attach(base)

    def load_balance(self) -> Tensor:
        """The last forward pass's load-balance loss, summed over the modules where it is not
        constant: a scalar, 0 where there is none."""
        losses = [m.load_balance() for m in self.linears.values() if m.balances]
        if not losses:
            return torch.zeros(())
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Forward passes inside have no gradient, and their embeddings are summed up.

        Raises CoterieError where a gate routes: it has no token embedding.
        """
        if self.layout.router != "token":
            raise CoterieError(
                "A vanilla router has no token embeddings for experts to choose by; set "
                "router.kind to token."
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
            f"Held experts must be given for exactly the adapted layers; {wrong[0]!r} is "
            f"{'missing' if wrong[0] in linears else 'not adapted'}."
        )
    for path, ids in held.items():
        if list(ids) != sorted({i for i in ids if 0 <= i < layout.experts}):
            raise CoterieError(
                f"The experts held at {path!r} are {list(ids)}; give distinct numbers from 0 to "
                f"{layout.experts - 1} in ascending order."
            )
