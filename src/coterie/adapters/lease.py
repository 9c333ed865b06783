"""FedLEASE's mixture on single linear layers (arXiv 2509.15087).

A client holds all M experts, and one of them is its own. The router has 2 M - 1 slots: one for each
expert, and M - 1 further slots for the client's own expert. With a scaling factor g:

    p_s = softmax_s(G x)
    w_i = sum of p_s over the slots s of expert i among the M best slots, scaled to sum to 1
    y   = W x + b + g sum_i w_i B_i A_i x

At most M - 1 of the slots belong to other experts, so the client's own expert processes every
token, with 0 to M - 1 other experts (adaptive top-M routing).
"""

import torch
from torch import Tensor, nn

from coterie.adapters.adapter import Trainable
from coterie.adapters.beside import BLOCK, Beside
from coterie.adapters.layout import Layout
from coterie.adapters.parameter import initialise
from coterie.adapters.routed import Routed, described
from coterie.bases.sites import Linear, chosen_linears, sizes


class LeaseLinear(Beside):
    """A linear layer with M experts and a router of 2 M - 1 slots; no router if M is 1.

    Args:
        base: The linear layer.
        path: Path of the layer in the base.
        layout: The layout; its generalists are the experts.
        own: Index of the client's own expert.
    """

    slot_experts: Tensor

    def __init__(self, base: Linear, path: str, layout: Layout, own: int) -> None:
        Routed.__init__(self, base, path, layout, {BLOCK: (path, sizes(base), base.weight)})
        experts = range(layout.experts)
        if self.router is not None:
            slots = [*experts, *(own for _ in experts[1:])]
            device, width = self.router.device, self.router.shape[1]
            self.router = nn.Parameter(self.router.new_zeros(len(slots), width))
            self.register_buffer("slot_experts", torch.tensor(slots, device=device))

    def _route(self, tokens: Tensor) -> tuple[Tensor, None]:
        if self.router is None:
            return tokens.new_ones(1, len(tokens), 1), None
        with torch.autocast(tokens.device.type, enabled=False):
            logits = tokens.to(self.router.dtype) @ self.router.t()
        self._keep(logits)
        return self._shares(logits).t().unsqueeze(-1), None

    def _shares(self, logits: Tensor) -> Tensor:
        """Return the experts' routing weights, shaped (tokens, M).

        Args:
            logits: The router's scores of the slots, shaped (tokens, 2 M - 1).
        """
        experts = len(self.experts)
        best, slots = logits.topk(experts, dim=-1)
        # A softmax over the best slots is the softmax over all slots, scaled to sum to 1.
        shares = logits.new_zeros(len(logits), experts)
        return shares.scatter_add(1, self.slot_experts[slots], best.softmax(-1))

    def token_routing(self) -> Tensor:
        return self._shares(self._last_scores().detach())


class LeaseAdapter(Trainable):
    """A client's FedLEASE adapter.

    The initial values depend on the seed alone, so they are the same for all clients.

    Args:
        base: A model with linear layers that match the layout, possibly on the meta device.
        layout: The layout, which sets the adapted layers, the number of experts and the rank.
        seed: The run's seed.
        own: Index of the client's own expert.

    Raises:
        CoterieError: The layout matches no layer.
    """

    def __init__(self, base: nn.Module, layout: Layout, seed: int, own: int = 0) -> None:
        self.layout, self.own = layout, own
        self._checked_layout = Layout(0, 0, attention_rank=1, targets=layout.targets)
        linears = chosen_linears(base, layout.targets)
        modules = {path: LeaseLinear(m, path, layout, own) for path, m in linears.items()}
        _, parameters, routers = described(modules, "kaiming")
        super().__init__(parameters, modules, routers)
        initialise(parameters, seed, "", common=lambda parameter: True)
