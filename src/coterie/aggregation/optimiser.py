"""Server optimisers: the server steps towards a round's mean instead of taking it as it is.

FedAvgM (Hsu et al., arXiv 1909.06335) and FedAdagrad, FedYogi and FedAdam (Reddi et al., arXiv
2003.00295, algorithm 2). With x_t what the clients began round t with and Delta_t = mean - x_t:

    fedavgm: m_t = beta m_{t-1} + Delta_t                x_{t+1} = x_t + eta m_t
    others:  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

m begins as 0 and v as tau^2. A tensor that nobody held in a round keeps its value and its moments.
"""

from typing import ClassVar

import torch
from torch import Tensor

from coterie.aggregation.spec import ServerOptimiserSpec
from coterie.aggregation.transform import Memory, Transform, TransformFacts
from coterie.errors import CoterieError
from coterie.messages import Groups
from coterie.messages.schema import Reduce


class ServerOptimiser(Transform):
    """The server steps towards a round's mean; moments are in float64 on the CPU."""

    name: ClassVar[str] = "server_optimiser"
    summary: ClassVar[str] = "the server steps towards the mean of uploads"
    reductions: ClassVar[frozenset[Reduce]] = frozenset()

    optimiser: ServerOptimiserSpec
    """optimiser, by its name or as a mapping of `name` and settings"""

    def check(self, run: TransformFacts) -> None:
        """Refuse a method without a mean."""
        if not run.schema.reduced("mean"):
            raise CoterieError(
                f"aggregation.optimiser has no effect with the method {run.method!r}, in which "
                "the server takes no mean; remove it."
            )

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> dict[str, dict[str, Tensor]]:
        """Return the parameters after the step, and means that replace no parameters as they are.

        `memory` holds the moments: the groups `m.GROUP`, and with the adaptive optimisers
        `v.GROUP`.

        Raises:
            CoterieError: if the mean replaces no parameters.
        """
        if not any(before.values()):
            raise CoterieError(
                "aggregation.optimiser has no effect: the server replaces no parameters by their "
                "mean; remove it."
            )
        found = {group: dict(tensors) for group, tensors in mean.items()}
        for group, tensors in found.items():
            moments = {kind: dict(memory.groups.get(f"{kind}.{group}", {})) for kind in "mv"}
            for name in [name for name in tensors if name in before.get(group, {})]:
                x = before[group][name].detach().to("cpu", torch.float64)
                step = self._step(moments, name, tensors[name].to(torch.float64) - x)
                tensors[name] = (x + step).to(torch.float32)
            memory.groups |= {f"{kind}.{group}": of for kind, of in moments.items() if of}
        return found

    def _step(self, moments: dict[str, dict[str, Tensor]], name: str, delta: Tensor) -> Tensor:
        """Return what a tensor changes by; `delta` is its pseudo-gradient, turned round."""
        spec = self.optimiser
        m = spec.momentum * moments["m"].get(name, torch.zeros_like(delta))
        if spec.name == "fedavgm":
            m = moments["m"][name] = m + delta
            return spec.rate * m
        m = moments["m"][name] = m + (1 - spec.momentum) * delta
        v = moments["v"].get(name, torch.full_like(delta, spec.tau**2))
        square = delta.square()
        match spec.name:
            case "fedadagrad":
                v = v + square
            case "fedyogi":
                v = v - (1 - spec.beta2) * square * (v - square).sign()
            case "fedadam":
                v = spec.beta2 * v + (1 - spec.beta2) * square
        moments["v"][name] = v
        return spec.rate * m / (v.sqrt() + spec.tau)
