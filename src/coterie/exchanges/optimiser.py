"""Server optimisers, which treat the change from the old parameters to the mean as a gradient.

FedAvgM (Hsu et al., arXiv 1909.06335) and FedAdagrad, FedYogi and FedAdam (Reddi et al., arXiv
2003.00295, algorithm 2). With the parameters x_t before round t and Delta_t = mean - x_t:

    fedavgm: m_t = beta m_{t-1} + Delta_t                x_{t+1} = x_t + eta m_t
    others:  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

Here, eta is the learning rate. The optimisers differ in how they update the second moment v_t. The
initial moments are m = 0 and v = tau^2. A tensor that no client uploaded in a round keeps its value
and its moments.
"""

from typing import ClassVar

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.exchanges.spec import ServerOptimiserSpec
from coterie.messages import Groups
from coterie.messages.schema import Reduce
from coterie.transforms.contract import Memory, Transform, TransformFacts


class ServerOptimiser(Transform):
    """An optimiser of the server's parameters. The moments are stored in float64 on the CPU."""

    name: ClassVar[str] = "server_optimiser"
    summary: ClassVar[str] = "server optimiser: FedAvgM, FedAdagrad, FedYogi or FedAdam"
    reductions: ClassVar[frozenset[Reduce]] = frozenset()

    optimiser: ServerOptimiserSpec
    """server optimiser: a name, or a mapping with the key `name` and the optimiser's settings"""

    def check(self, run: TransformFacts) -> None:
        if not run.schema.reduced("mean"):
            raise CoterieError(
                f"aggregation.optimiser has no effect with the method {run.method!r}, "
                "whose server computes no mean over all clients. Remove it, or choose another "
                "method."
            )

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> dict[str, dict[str, Tensor]]:
        # Moments are in the groups m.GROUP and, for adaptive optimisers, v.GROUP of the memory.
        # Means that replace no parameters are returned unchanged.
        result = {group: dict(tensors) for group, tensors in mean.items()}
        for group, tensors in result.items():
            moments = {kind: dict(memory.groups.get(f"{kind}.{group}", {})) for kind in "mv"}
            for name in [name for name in tensors if name in before.get(group, {})]:
                x = before[group][name].to(torch.float64)
                step = self._step(moments, name, tensors[name].to(torch.float64) - x)
                tensors[name] = (x + step).to(torch.float32)
            memory.groups |= {f"{kind}.{group}": m for kind, m in moments.items() if m}
        return result

    def _step(self, moments: dict[str, dict[str, Tensor]], name: str, delta: Tensor) -> Tensor:
        """Update the moments of a tensor, and return the change to add to the tensor's old value.

        Args:
            moments: The moments of the tensor's group, keyed by kind (`m` or `v`) and tensor name.
            name: The name of the tensor.
            delta: The mean minus the tensor's old value. The pseudo-gradient is `-delta`.
        """
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
