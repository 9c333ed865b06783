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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters.adapter import attach, check_unchanged, detach
from coterie.adapters.dropout import dropout, drops
from coterie.adapters.layout import Layout, Role
from coterie.adapters.lora import LoraPair
from coterie.adapters.padding import kept, only_real, real_mask
from coterie.adapters.part import Part, initialise
from coterie.bases.sites import QUERY_VALUE, StandIn, chosen_linears, working_dtype
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


class _Routing(NamedTuple):
    """How the last forward pass chose for its real tokens."""

    p: Tensor
    """Softmax scores, (tokens, n); with a gradient only where the load-balance loss has one."""
    works: Tensor
    """1 for the experts that work on a token, else 0: (tokens, n)."""


class AmoleLinear(StandIn):
    """A linear layer with a shared expert and n domain experts, stacked.

    A: (n, r, in) and B: (n, out, r) are those of the experts in `held`, in this order; router is
    the token projection (r, in) or the gate (experts, in), whose `rows` (n,) are theirs.
    """

    rows: Tensor

    def __init__(self, base: nn.Module, layout: AmoleLayout, held: Sequence[int]) -> None:
        super().__init__(base)
        self.layout, self.held = layout, tuple(held)
        pair = LoraPair.of(base, layout.rank)
        A, B, n = pair.A.data, pair.B.data, len(self.held)
        self.shared = pair if layout.shared else None
        self.A = nn.Parameter(A.new_zeros(n, *A.shape))
        self.B = nn.Parameter(B.new_zeros(n, *B.shape))
        rows = layout.rank if layout.router == "token" else layout.experts
        self.router = nn.Parameter(A.new_zeros(rows, A.shape[1]))
        self.register_buffer("rows", torch.tensor(self.held, device=A.device, dtype=torch.long))
        self._last: _Routing | None = None
        self.recorded: list[tuple[Tensor, Tensor]] | None = None
        """Where `AmoleAdapter.recording` wants them: each forward pass's sums and counts."""

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: not the last forward pass, whose graph cannot be copied."""
        return {**self.__dict__, "_last": None}

    def stacks(self, path: str) -> Iterator[tuple[str, Role, nn.Parameter]]:
        """Name, role and parameter of all that is trained, the domain experts in one."""
        if self.shared is not None:
            yield f"shared/{path}.A", "shared", self.shared.A
            yield f"shared/{path}.B", "shared", self.shared.B
        if self.held:
            yield f"domain/{path}.A", "domain", self.A
            yield f"domain/{path}.B", "domain", self.B
        yield self._router_name(path), "projection", self.router

    def parts(self, path: str) -> Iterator[Part]:
        """The same by expert: a domain expert's part is a view of the stack, to read and write."""
        if self.shared is not None:
            yield from self.shared.parts(f"shared/{path}", "shared", path, None)
        for i, expert in enumerate(self.held):
            name = f"domain.{expert}/{path}"
            A, B = nn.Parameter(self.A.data[i]), nn.Parameter(self.B.data[i])
            yield Part(f"{name}.A", "domain", A, "kaiming", path, "A", expert)
            yield Part(f"{name}.B", "domain", B, "zero", path, "B", expert)
        yield Part(self._router_name(path), "projection", self.router, "kaiming", path)

    def _router_name(self, path: str) -> str:
        return f"projection/{path}" if self.layout.router == "token" else f"gate/{path}"

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
        works = torch.ones_like(p)
        if len(self.held) > self.layout.top_k:
            chosen = p.detach().topk(self.layout.top_k, dim=-1).indices
            works = torch.zeros_like(p).scatter(1, chosen, 1)
        before = self._last or (None, None)
        # A graph is kept alive only where the load-balance loss has a gradient.
        seen = only_real(p if self.balances else p.detach())
        self._last = _Routing(kept(before[0], seen), kept(before[1], only_real(works)))
        return self._weights(p, works)

    def _weights(self, p: Tensor, works: Tensor) -> Tensor:
        weights = p * works
        if not self.layout.renormalise or self.layout.top_k == 1:
            return weights  # scaled to 1, the weight of a single expert would have no gradient
        return weights / weights.sum(-1, keepdim=True)

    @property
    def balances(self) -> bool:
        """Whether the load-balance loss has a gradient: some token is not every expert's load."""
        return len(self.held) > (self.layout.top_k if self.layout.load == "top_k" else 1)

    def load_balance(self) -> Tensor:
        """`n sum_j f_j P_j` of the last forward pass's real tokens; 1 where the load is even.

        f_j: share of the load on expert j (sums to 1, no gradient); P_j: mean softmax score. The
        load is the tokens that an expert works on, or those whose best it is (equation 27).
        """
        last = self._last_routing()
        if self.layout.load == "top_k":
            f = last.works.mean(0) / self.layout.top_k
        else:
            f = F.one_hot(last.p.argmax(-1), len(self.held)).to(last.p.dtype).mean(0)
        return len(self.held) * (f * last.p.mean(0)).sum()

    def routing(self) -> Tensor:
        """Mean weight of each expert held over the last forward pass's real tokens: (n,)."""
        last = self._last_routing()
        return self._weights(last.p.detach(), last.works).mean(0)

    def _last_routing(self) -> _Routing:
        if self._last is None:
            raise CoterieError("No routing is available before the first forward pass.")
        return self._last


def _sums(embeddings: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Over each sample's real tokens, the sum of embeddings (batch * time, n + 1, r) to
    (batch, n + 1, r), and how many these are: (batch,); x: (batch, time, in)."""
    mask = real_mask(x.device)
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    rows = exact.unflatten(0, x.shape[:2])
    return rows.where(mask[..., None, None], 0).sum(1), mask.sum(1)


class Recording:
    """What forward passes saw, sample by sample as they were read; the caller divides."""

    def __init__(self, passes: Mapping[str, list[tuple[Tensor, Tensor]]]) -> None:
        self._passes = passes

    @property
    def sums(self) -> dict[str, Tensor]:
        """By module, summed over a sample's real tokens: (samples, n + 1, r), the embeddings of
        the experts held and last the token embedding."""
        return {path: torch.cat([s for s, _ in seen]) for path, seen in self._passes.items()}

    @property
    def counts(self) -> Tensor:
        """Real tokens of each sample: (samples,)."""
        seen = next(iter(self._passes.values()))
        return torch.cat([count for _, count in seen])


class AmoleAdapter:
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
        self._stand_ins = {
            path: AmoleLinear(linear, layout, held[path]) for path, linear in linears.items()
        }
        stacks = [stack for path, m in self._stand_ins.items() for stack in m.stacks(path)]
        self._stacks: dict[str, tuple[Role, nn.Parameter]] = {
            name: (role, p) for name, role, p in sorted(stacks, key=lambda s: s[0])
        }
        initialise(self.parts().values(), seed, "", common=lambda part: True)

    def parts(self) -> dict[str, Part]:
        """What travels, by expert and sorted by name; a domain expert's are views of the stacks.

        `shared/PATH.A`: (r, in) and `.B`: (out, r), `domain.ID/PATH.A` and `.B` alike, and
        `projection/PATH`: (r, in) or `gate/PATH`: (experts, in).
        """
        parts = [part for path, module in self._stand_ins.items() for part in module.parts(path)]
        return {part.name: part for part in sorted(parts, key=lambda part: part.name)}

    def parameters(self, *roles: Role) -> dict[str, nn.Parameter]:
        """Parameters by name, sorted; of these roles, or all. Domain experts are stacked."""
        return {name: p for name, (role, p) in self._stacks.items() if not roles or role in roles}

    def require_grad(self, *roles: Role) -> None:
        """Train the parameters of exactly these roles."""
        for role, parameter in self._stacks.values():
            parameter.requires_grad_(role in roles)

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put this adapter into a base, in place of any other, and return it; it is frozen."""
        check_unchanged(base, Layout(0, 0, attention_rank=1, targets=self.layout.targets))
        attach(base, self._stand_ins)
        return base

    def detach(self, base: nn.Module) -> None:
        """Give back the bare base, whichever adapter is in it."""
        detach(base)

    @property
    def balances(self) -> bool:
        """Whether the load-balance loss has a gradient on any module."""
        return any(module.balances for module in self._stand_ins.values())

    def load_balance(self) -> Tensor:
        """The last forward pass's load-balance loss, summed over the modules where it is not
        constant: a scalar, 0 where there is none."""
        losses = [m.load_balance() for m in self._stand_ins.values() if m.balances]
        if not losses:
            return torch.zeros(())
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    def routing(self) -> dict[str, Tensor]:
        """Mean weight of each expert held in the last forward pass, (n,), by module."""
        return {path: module.routing() for path, module in self._stand_ins.items()}

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
        passes: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in self._stand_ins}
        try:
            for path, module in self._stand_ins.items():
                module.recorded = passes[path]
            with torch.no_grad():
                yield Recording(passes)
        finally:
            for module in self._stand_ins.values():
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
