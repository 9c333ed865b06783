"""Slopes of the losses of single samples, with which a client judges other clients' parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases.precision import autocast
from coterie.data.split import AnyBatch, Split
from coterie.messages import Tensors
from coterie.messages.host import on_host
from coterie.training.context import ClientContext


def probe_batch(split: Split, window: int, most: int) -> AnyBatch:
    """Return evenly spaced samples of a split.

    Args:
        split: The split.
        window: The number of tokens predicted in each sample of plain text.
        most: The maximum number of samples.
    """
    samples = split.samples(window, window + 1)
    count = min(most, len(samples))
    return samples.batch(torch.arange(count) * len(samples) // count)


def sample_slopes(
    context: ClientContext,
    model: PreTrainedModel,
    batch: AnyBatch,
    parameters: Mapping[str, Tensor],
    directions: Sequence[Tensors],
) -> Tensor:
    """Return the derivative of each sample's loss along several directions.

    Args:
        context: The client's context.
        model: The model to which the parameters belong.
        batch: The samples.
        parameters: The parameters with respect to which derivatives are computed, at their current
            values. They must require gradients.
        directions: For each direction, a mapping from every parameter's name to a tensor on the
            CPU. The products with the gradients are computed on the CPU, in float64.

    Returns:
        A float64 tensor shaped (samples, directions).
    """
    rows = []
    for sample in batch.split(1):
        gradient = _gradient(context, model, sample, parameters)
        rows.append([_product(gradient, direction) for direction in directions])
    return torch.tensor(rows, dtype=torch.float64)


def mean_gradients(
    context: ClientContext,
    model: PreTrainedModel,
    batch: AnyBatch,
    parameters: Mapping[str, Tensor],
    most: int,
) -> list[Tensor]:
    """Return the mean gradients of the losses of several groups of samples, flattened.

    Args:
        context: The client's context.
        model: The model to which the parameters belong.
        batch: The samples. Those of a group are equally distant from each other.
        parameters: The parameters with respect to which derivatives are computed, at their current
            values. They must require gradients.
        most: The maximum number of groups.

    Returns:
        One float64 tensor for each group, without those that are not finite.
    """
    samples, means = [*batch.split(1)], []
    for number in range(min(most, len(samples))):
        group = samples[number::most]
        total = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64)
        for sample in group:
            gradient = _gradient(context, model, sample, parameters)
            total += torch.cat([t.flatten() for t in gradient.values()])
        means.append(total / len(group))
    return [mean for mean in means if mean.isfinite().all()]


def _gradient(
    context: ClientContext,
    model: PreTrainedModel,
    sample: AnyBatch,
    parameters: Mapping[str, Tensor],
) -> Tensors:
    """Return the gradient of a sample's loss, on the CPU."""
    base = context.base
    with autocast(base.precision, base.device.type):
        loss, _ = sample.to(base.device).loss(model)
    gradients = torch.autograd.grad(loss, [*parameters.values()])
    return on_host(dict(zip(parameters, gradients, strict=True)))


def _product(a: Tensors, b: Tensors) -> float:
    return sum((tensor.double() * b[name].double()).sum().item() for name, tensor in a.items())
