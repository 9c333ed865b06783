"""Base classes of all mixtures: routers, and blocks that have low-rank experts and a router.

A linear map without bias computes the experts' scores from the hidden state that enters the block.
The experts' weights are a softmax over the k highest scores (CoMiGS, arXiv 2409.13931, section 3).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.dropout import dropout, drops
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraPair, pairs_in
from coterie.adapters.parameter import Parameter
from coterie.bases.padding import collected, only_real
from coterie.bases.sites import StandIn
from coterie.errors import CoterieError

Balance = Literal["uniform", "generalist"]


Place = tuple[str, tuple[int, int], Tensor]
"""A description of a module that gets a low-rank pair. It consists of the module's path in the
base, the module's shape (in, out), and a weight of the module. The pair is created on the device of
this weight."""


class Router(StandIn):
    """A stand-in that scores every expert for each token, and converts scores to routing weights.

    The stand-in stores the scores of the last forward pass, which are needed for the load-balance
    loss and for statistics.

    Args:
        base: The module of the base that the stand-in replaces.
        experts: Number n of experts.
        loaded: Number of experts to whose loads each token contributes. These are the experts with
            the highest scores for the token.
    """

    def __init__(self, base: nn.Module, experts: int, loaded: int) -> None:
        super().__init__(base)
        self.balances = loaded < experts
        """Whether the load-balance loss has a gradient."""
        self._scores: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the module's state for a copy of the module.

        The scores of the last forward pass are left out, because their autograd graph cannot be
        copied.
        """
        return {**self.__dict__, "_scores": None}

    def routing(self) -> Tensor:
        """Return each expert's mean routing weight in the last forward pass, shaped (n,).

        The mean is over all tokens except padding.
        """
        raise NotImplementedError

    def load_balance(self, form: Balance = "uniform") -> Tensor:
        """Return the load-balance loss of the last forward pass.

        The loss is 1 if the load is balanced. Let n be the number of experts, f_j the load of
        expert j (the expert's share of the tokens, without gradient), and P_j the mean softmax
        score of expert j. The uniform loss is `n sum_j f_j P_j`. The generalist loss is
        `2 f_0 P_0 + 2 (n-1) sum_{j>0} f_j P_j` (CoMiGS, eq. 5, scaled as in CoMiGS' released code).

        Args:
            form: The distribution of load that counts as balanced. `uniform` means that all experts
                have equal loads. `generalist` means that the first expert has half of the load, and
                that the remaining experts share the second half equally.
        """
        f, P = self._loads()
        n, fP = len(f), f * P
        if form == "uniform":
            return n * fP.sum()
        return 2 * fP[0] + 2 * (n - 1) * fP[1:].sum()

    def _loads(self) -> tuple[Tensor, Tensor]:
        """Compute the loads f (n,) and the mean scores P (n,), which `load_balance` defines."""
        raise NotImplementedError

    def _keep(self, scores: Tensor) -> None:
        """Store the scores (tokens, n) of a forward pass, except the scores of padding.

        The scores' autograd graph is stored only if the load-balance loss has a gradient.
        """
        unpadded = only_real(scores if self.balances else scores.detach())
        self._scores = collected(self._scores, unpadded)

    def _last_scores(self) -> Tensor:
        if self._scores is None:
            raise CoterieError("Router scores are not available before the first forward pass.")
        return self._scores


class Routed(Router):
    """A block of the base to which low-rank experts and a router are added.

    The router computes the routing weights of the experts. Each token has k *slots*, one for each
    expert that is chosen for the token. With dropout, a separate mask is applied to the input of
    each expert's A.

    Args:
        base: The block.
        path: Path of the block in the base. The path is part of the router's name.
        layout: The layout, which sets the numbers of experts, the ranks and the routing.
        places: Descriptions of the modules for which each expert has a low-rank pair. The key of a
            description is the name of the module's pair in every expert.
    """

    def __init__(
        self, base: nn.Module, path: str, layout: Layout, places: Mapping[str, Place]
    ) -> None:
        super().__init__(base, layout.experts, layout.slots)
        self.path = path
        self.roles = layout.roles
        self.slots = layout.slots
        self.gain = layout.gain(layout.rank)
        self.dropout = layout.dropout
        self.experts = nn.ModuleList()
        numbers = (*range(layout.generalists), *range(layout.specialists))
        for role, number in zip(layout.roles, numbers, strict=True):
            pairs = {
                name: LoraPair(role, path, shape, layout.rank, near, number, layout.freeze_A)
                for name, (path, shape, near) in places.items()
            }
            self.experts.append(nn.ModuleDict(pairs))
        self.router: nn.Parameter | None = None
        if layout.routed and layout.experts > 1:
            A = pairs_in(self)[0].A
            self.router = nn.Parameter(A.new_zeros(layout.experts, A.shape[1]))

    def _factors(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the factors of the low-rank pair that has a given name, for every expert.

        The result consists of a list of all A (r, in) and a list of all B (out, r). The factors
        include residuals, and are padded with zeros to the largest rank r.
        """
        pairs = [cast(LoraPair, expert.get_submodule(name)) for expert in self.experts]
        rank = max(pair.rank for pair in pairs)
        factors = [pair.factors(rank) for pair in pairs]
        return [A for A, _ in factors], [B for _, B in factors]

    def _low(self, tokens: Tensor, A: Tensor) -> Tensor:
        """Multiply tokens by every expert's A, and concatenate the products.

        Args:
            tokens: (tokens, in), the input.
            A: (n*r, in), the factors A of all experts, in the dtype of the tokens.

        Returns:
            A tensor shaped (tokens, n*r).
        """
        if not drops(self.dropout):
            return tokens @ A.t()
        experts = A.chunk(len(self.roles))
        lows = [dropout(tokens, self.dropout) @ expert.t() for expert in experts]
        return torch.cat(lows, dim=1)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the routing weights of the slots and the choices of experts.

        The routing weights have the shape (k, tokens, 1), where k is the number of slots. The
        choices are one-hot and have the shape (k, tokens, n), where n is the number of experts. If
        k = n, the choices are None, because slot s then always belongs to expert s.
        """
        n = len(self.roles)
        if self.router is None:
            return tokens.new_full((), 1 / n).expand(n, len(tokens), 1), None
        with torch.autocast(tokens.device.type, enabled=False):
            logits = tokens.to(self.router.dtype) @ self.router.t()
        self._keep(logits)
        if not self.balances:
            return logits.softmax(-1).t().unsqueeze(-1), None
        weights, chosen = self._weights(logits)
        return weights.t().unsqueeze(-1), F.one_hot(chosen.t(), n)

    def _weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the routing weights and the indices of the k experts with the highest scores.

        Both tensors have the shape (tokens, k). The routing weights are a softmax over the k
        highest scores. If k = 1, however, this softmax would always be 1 and have no gradient.
        Then the routing weight is taken from the softmax over all experts, as in CoMiGS' released
        code.
        """
        best, chosen = logits.topk(self.slots, dim=-1)
        if self.slots == 1:
            return logits.softmax(-1).gather(-1, chosen), chosen
        return best.softmax(-1), chosen

    def routing(self) -> Tensor:
        return self.token_routing().mean(0)

    def token_routing(self) -> Tensor:
        """Return the routing weights of each token of the last forward pass, shaped (tokens, n)."""
        logits = self._last_scores().detach()
        weights, chosen = self._weights(logits)
        return torch.zeros_like(logits).scatter(1, chosen, weights)

    def first_experts(self) -> Tensor:
        """Return the index of each token's highest-scoring expert.

        The result has the shape (tokens,).
        """
        return self._last_scores().argmax(-1)

    def _loads(self) -> tuple[Tensor, Tensor]:
        logits, n = self._last_scores(), len(self.roles)
        chosen = logits.topk(self.slots, dim=-1).indices
        # On a GPU, bincount would force a synchronisation.
        f = F.one_hot(chosen, n).sum((0, 1)).to(logits.dtype) / chosen.numel()
        return f, logits.softmax(-1).mean(0)


def described(
    stand_ins: Mapping[str, StandIn], start: Literal["kaiming", "normal"]
) -> tuple[list[LoraPair], list[Parameter], dict[str, Routed]]:
    """Describe the parameters of stand-ins.

    Args:
        stand_ins: A mapping from paths to stand-ins.
        start: The distribution of the routers' initial values.

    Returns:
        All LoRA pairs; the parameters of the pairs, followed by the parameters of the routers; and
        the stand-ins that have a router.
    """
    pairs = [pair for module in stand_ins.values() for pair in pairs_in(module)]
    parameters = [parameter for pair in pairs for parameter in pair.described()]
    routers: dict[str, Routed] = {}
    for path, m in stand_ins.items():
        if isinstance(m, Routed) and m.router is not None:
            name = f"router/{m.path}.weight"
            parameters.append(Parameter(name, "router", m.router, start, m.path))
            routers[path] = m
    return pairs, parameters, routers


def expert_roles(model: nn.Module) -> tuple[str, ...]:
    """Return the roles of the experts among which each router of a model chooses.

    Args:
        model: A base with an adapter attached.

    Returns:
        The role of each expert, such as "generalist"; empty if no module is routed.
    """
    return next((m.roles for m in _routed(model)), ())


def role_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight of each role of experts, for each token of the last forward pass.

    A role's weight is the sum of the routing weights of the experts with this role, averaged over
    all modules with a router.

    Args:
        model: A base with an adapter attached, and at least one module with a router.

    Returns:
        A mapping from the roles, such as "generalist", to weights shaped (tokens,).
    """
    weights = torch.stack([module.token_routing() for module in _routed(model)]).mean(0)
    roles = expert_roles(model)
    return {
        role: weights[:, [n for n, other in enumerate(roles) if other == role]].sum(1)
        for role in dict.fromkeys(roles)
    }


def _routed(model: nn.Module) -> list[Routed]:
    return [m for m in model.modules() if isinstance(m, Routed) and m.router is not None]
