"""One client's adapter: stand-ins for a base's MLPs and attention layers, put in and taken out."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coterie.adapters.layout import Layout, Role
from coterie.adapters.lora import LoraLinear
from coterie.adapters.mixture import Balance, Mixture
from coterie.adapters.part import Part, initialise
from coterie.bases.sites import StandIn, chosen_linears, mlp_shape, walk
from coterie.errors import CoterieError


class Trainable(Protocol):
    """What training and averaging need of whatever a client trains."""

    def parts(self) -> dict[str, Part]:
        """Everything that is trained or kept with it, by name, sorted; what travels is of these."""
        ...

    def parameters(self, *roles: Role) -> dict[str, nn.Parameter]:
        """What an optimiser updates, by name, sorted; of these roles, or all."""
        ...

    def require_grad(self, *roles: Role) -> None:
        """Train the parameters of exactly these roles."""
        ...

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """The base with what is trained, ready to run."""
        ...

    def routing(self) -> dict[str, Tensor]:
        """Mean routing weight per expert in the last forward pass, (experts,), by layer."""
        ...


class Adapter:
    """Everything one client trains: modules that stand in for modules of a base.

    Many adapters can share one base in memory: each holds its own parameters only, and attaching
    one swaps modules of the base, not values. The base's own parameters are never trained.

    Args:
        base: a causal language model (GPT-2 or Llama family); on the meta device, the adapter
            learns names and shapes from it and is made on the CPU.
        layout: which experts, which ranks, routed or averaged.
        seed: the run's seed.
        client: the client's name, from which its personal parameters are drawn.
        common: whether a part's first values are the same for all clients.

    Raises:
        CoterieError: the base has no MLP of a known kind.
    """

    def __init__(
        self,
        base: nn.Module,
        layout: Layout,
        seed: int,
        client: str,
        common: Callable[[Part], bool],
    ) -> None:
        self.layout = layout
        self._stand_ins = _stand_ins(base, layout)
        parts = [part for path, module in self._stand_ins.items() for part in module.parts(path)]
        self._parts: dict[str, Part] = {
            part.name: part for part in sorted(parts, key=lambda part: part.name)
        }
        self._pairs = [
            pair for path, module in self._stand_ins.items() for pair in module.pairs(path)
        ]
        initialise(parts, seed, client, common)

    def parts(self) -> dict[str, Part]:
        """Everything that is trained or frozen beside the base, by name, sorted."""
        return self._parts

    def parameters(self, *roles: Role) -> dict[str, nn.Parameter]:
        """Parameters by name, sorted; of these roles, or all."""
        return {
            name: part.parameter
            for name, part in self._parts.items()
            if not roles or part.role in roles
        }

    def require_grad(self, *roles: Role) -> None:
        """Train the parameters of exactly these roles."""
        for part in self._parts.values():
            part.parameter.requires_grad_(part.role in roles)

    def residual(self) -> dict[str, Tensor]:
        """What is added to pairs and never trained, under the names of the pairs' own A and B.

        Of an A: (any, in); of its B: (out, any).
        """
        return {
            part.name: tensor
            for pair, parts in self._pairs
            for part, tensor in zip(parts, pair.residual or (), strict=False)
        }

    def set_residual(self, tensors: Mapping[str, Tensor]) -> None:
        """Add this to pairs, in place of any former residual."""
        for pair, (a, b) in self._pairs:
            A, B = tensors.get(a.name), tensors.get(b.name)
            pair.residual = None if A is None or B is None else (A.to(pair.A), B.to(pair.B))

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put this adapter into a base, in place of any other, and return it; it is frozen."""
        attach(base, self._stand_ins)
        return base

    def detach(self, base: nn.Module) -> None:
        """Give back the bare base, whichever adapter is in it."""
        detach(base)

    @property
    def balances(self) -> bool:
        """Whether a load-balance loss has a gradient: some router leaves experts out."""
        return any(mixture.balances for mixture in self._routed().values())

    def load_balance(self, form: Balance) -> Tensor:
        """The last forward pass's load-balance loss, averaged over layers: a scalar."""
        losses = [mixture.load_balance(form) for mixture in self._routed().values()]
        if not losses:
            raise CoterieError("This adapter has no router, so it has no load-balancing loss.")
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()

    def routing(self) -> dict[str, Tensor]:
        """Mean routing weight per expert in the last forward pass, (experts,), by layer."""
        return {path: mixture.routing() for path, mixture in self._routed().items()}

    def _routed(self) -> dict[str, Mixture]:
        return {
            path: module
            for path, module in self._stand_ins.items()
            if isinstance(module, Mixture) and module.router is not None
        }


def first_experts(model: nn.Module) -> dict[str, Tensor]:
    """The best-scored expert of each token in the last forward pass, (tokens,), by routed layer.

    model: a base with an adapter attached. Raises CoterieError before its first forward pass.
    """
    found = ((path, m) for path, m in model.named_modules() if isinstance(m, Mixture))
    return {path: m.first_experts() for path, m in found if m.router is not None}


def attach(base: nn.Module, stand_ins: Mapping[str, StandIn]) -> None:
    """Put stand-ins where they belong, by path, in place of any other adapter; freeze the base."""
    detach(base)
    base.requires_grad_(False)
    for path, module in stand_ins.items():
        module.base = base.get_submodule(path)
        base.set_submodule(path, module)


def detach(base: nn.Module) -> None:
    """Take whichever adapter is attached out of a base."""
    stand_ins = [(path, m) for path, m in base.named_modules() if isinstance(m, StandIn)]
    for path, module in stand_ins:
        base.set_submodule(path, module.base)


def _stand_ins(base: nn.Module, layout: Layout) -> dict[str, Mixture | LoraLinear]:
    """By path; those of the same layer together."""
    found: dict[str, Mixture | LoraLinear] = {}
    for path, module in walk(base):
        if layout.experts and (shape := mlp_shape(module)):
            found[path] = Mixture(module, shape, layout)
    if layout.experts and not found:
        raise CoterieError(
            f"{type(base).__name__} has no supported MLP; experts need a GPT-2 or "
            "Llama-family base."
        )
    if layout.attention_rank:
        for path, linear in chosen_linears(base, layout.targets).items():
            if path.rpartition(".")[0] not in found:  # a mixture's own layers have its experts
                found[path] = LoraLinear(linear, layout)
    return found
