"""Server optimisers: the server steps towards a round's mean instead of taking it as it is.

FedAvgM (Hsu et al., arXiv 1909.06335) and FedAdagrad, FedYogi and FedAdam (Reddi et al., arXiv
2003.00295, algorithm 2). With x_t what the clients began round t with and Delta_t = mean - x_t:

    fedavgm: m_t = beta m_{t-1} + Delta_t                x_{t+1} = x_t + eta m_t
    others:  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

m begins as 0 and v as tau^2. A tensor that nobody held in a round keeps its value and its moments.
"""

import torch
from torch import Tensor

from coterie.aggregation.spec import ServerOptimiserSpec
from coterie.errors import CoterieError
from coterie.messages import Groups, State


class ServerOptimiser:
    """The moments of everything that is averaged, in float64 on the CPU."""

    def __init__(self, spec: ServerOptimiserSpec) -> None:
        self.spec = spec
        self.moments: dict[str, dict[str, dict[str, Tensor]]] = {}
        """By group: `m`, and with the adaptive optimisers `v`, by tensor."""

    def stepped(self, mean: Groups, before: Groups) -> dict[str, dict[str, Tensor]]:
        """The parameters after the step, float32, for all tensors of `before` with a mean; other
        means as they are. Call it once per round. Raises CoterieError if `before` is empty.
        """
        found = {group: dict(tensors) for group, tensors in mean.items()}
        steps = [(g, n) for g, tensors in found.items() for n in tensors if n in before.get(g, {})]
        if not any(before.values()):
            raise CoterieError(
                "aggregation.optimiser has no effect: the server replaces no parameters by their "
                "mean; remove it."
            )
        for group, name in steps:
            x = before[group][name].detach().to("cpu", torch.float64)
            step = self._step(group, name, found[group][name].to(torch.float64) - x)
            found[group][name] = (x + step).to(torch.float32)
        return found

    def _step(self, group: str, name: str, delta: Tensor) -> Tensor:
        """What a tensor changes by; `delta` is its pseudo-gradient, turned round."""
        spec, moments = self.spec, self.moments.setdefault(group, {"m": {}})
        m = spec.momentum * moments["m"].get(name, torch.zeros_like(delta))
        if spec.name == "fedavgm":
            m = moments["m"][name] = m + delta
            return spec.rate * m
        m = moments["m"][name] = m + (1 - spec.momentum) * delta
        v = moments.setdefault("v", {}).get(name, torch.full_like(delta, spec.tau**2))
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

    def state(self) -> State:
        """The moments, by group."""
        return State(parts={group: State(moments) for group, moments in self.moments.items()})

    def restore(self, state: State) -> None:
        """Take back what `state` gave."""
        self.moments = {
            group: {kind: dict(tensors) for kind, tensors in part.groups.items()}
            for group, part in state.parts.items()
        }
