"""Server optimisers, which treat the change from the old parameters to the mean as a gradient.

FedAvgM (Hsu et al., arXiv 1909.06335) and FedAdagrad, FedYogi and FedAdam (Reddi et al., arXiv
2003.00295, algorithm 2). With the parameters x_t before round t and Delta_t = mean - x_t:

    fedavgm: m_t = beta m_{t-1} + Delta_t                x_{t+1} = x_t + eta m_t
    others:  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

Here, eta is the learning rate. The optimisers differ in how they update the second moment v_t. The
initial moments are m = 0 and v = tau^2. A tensor that no client uploaded in a round keeps its value
and its moments.
"""

import torch
from torch import Tensor

from coterie.exchanges.spec import ServerOptimiserSpec
from coterie.messages import Tensors
from coterie.transforms.context import Memory


def stepped(
    spec: ServerOptimiserSpec, group: str, mean: Tensors, start: Tensors, memory: Memory
) -> dict[str, Tensor]:
    """Take a step from the server's parameters towards the mean of uploads.

    Args:
        spec: The server optimiser and its settings.
        group: The name of the group.
        mean: The mean of each tensor of the group.
        start: The server's parameters before the step. A mean of any other tensor is returned
            unchanged.
        memory: The state of the exchange. The moments, which are in float64 on the CPU, are in its
            groups `m.GROUP` and, for adaptive optimisers, `v.GROUP`. They are replaced.

    Returns:
        The parameters after the step.
    """
    result = dict(mean)
    moments = {kind: dict(memory.groups.get(f"{kind}.{group}", {})) for kind in "mv"}
    for name in [name for name in mean if name in start]:
        x = start[name].to(torch.float64)
        step = _step(spec, moments, name, mean[name].to(torch.float64) - x)
        result[name] = (x + step).to(torch.float32)
    memory.groups |= {f"{kind}.{group}": m for kind, m in moments.items() if m}
    return result


def _step(
    spec: ServerOptimiserSpec, moments: dict[str, dict[str, Tensor]], name: str, delta: Tensor
) -> Tensor:
    """Update the moments of a tensor, and return the change to add to the tensor's old value.

    Args:
        spec: The server optimiser and its settings.
        moments: The moments of the tensor's group, keyed by kind (`m` or `v`) and tensor name.
        name: The name of the tensor.
        delta: The mean minus the tensor's old value. The pseudo-gradient is `-delta`.
    """
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
