"""The memory that a client holds between training steps: its base, its adapter and copies."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.adapters import trained
from coterie.analysis.sizes import bytes_in, instances_in
from coterie.bases import BaseSpec
from coterie.bases.weights import DTYPES
from coterie.config.run import RunConfig
from coterie.methods.contract import ClientSide
from coterie.training.local import LocalTraining, without_training
from coterie.training.optimiser import build
from coterie.training.spec import TrainingSpec

QUANTISED = {"int8": 1.0, "nf4": 0.516}
"""Bytes per weight of a quantised linear layer.

The value for nf4 includes the quantisation scales, which are also quantised (QLoRA).
"""


def kept_dtype(skeleton: nn.Module) -> torch.dtype:
    """Return the dtype of a base's checkpoint.

    Args:
        skeleton: The base without loaded weights. Its configuration states the checkpoint's dtype.
            If the configuration states no dtype, the result is float32.
    """
    config: Any = skeleton.config
    return config.get_text_config().dtype or config.dtype or torch.float32


def loaded_dtype(
    spec: BaseSpec, checkpoint_dtype: torch.dtype, training: TrainingSpec
) -> torch.dtype:
    """Return the dtype of a base's weights after loading.

    For quantised weights, this is the dtype in which the base computes.

    Args:
        spec: The base's name and format.
        checkpoint_dtype: The dtype of the base's checkpoint.
        training: The training settings, whose precision is known.
    """
    if training.precision == "fp32":
        return torch.float32
    if spec.weights is not None:
        return DTYPES.get(spec.weights, torch.bfloat16)
    return torch.bfloat16 if checkpoint_dtype == torch.float16 else checkpoint_dtype


def weights_bytes(spec: BaseSpec, model: PreTrainedModel) -> int:
    """Return the size of a base's weights and buffers, which are on the meta device.

    Tied weights count once.

    Args:
        spec: The base's name and format.
        model: The base, possibly with an adapter.
    """
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.is_meta}
    if spec.weights in QUANTISED:
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                weight = module.weight
                tensors[id(weight)] = int(weight.numel() * QUANTISED[spec.weights])
    return sum(tensors.values())


@dataclass(frozen=True)
class Held:
    """The sizes of what a client holds besides its base, in bytes."""

    adapter: int
    """The adapter, and the gradients and moments of trained parameters."""
    copies: int
    """All other tensors."""
    state: int
    """The client's state and best model in a checkpoint."""


def held_by(side: ClientSide, config: RunConfig) -> Held:
    """Return the sizes of what a client holds besides its base.

    Args:
        side: The method's client-side object.
        config: The run.
    """
    parameters = list(side.parameters().values())
    trainings = [*instances_in(side, LocalTraining)]
    updated, gradients, starts = [], [], 0
    for training in trainings:
        adapter = training.adapter.parameters().values()
        for level in training.levels:
            updated.append(_bytes(p.tensor for p in adapter if level.selects(p)))
            gradients.append(updated[-1] + _bytes(p.tensor for p in adapter if level.leaves(p)))
        if any(level.penalty or level.pull for level in training.levels):
            starts = max(starts, _bytes(p.tensor for p in adapter))
    if not trainings:  # the client creates its optimisers in every round
        updated = gradients = [_bytes(p.tensor for p in parameters if trained(p))]
    moments = _moments(config.training) * sum(updated)
    own = _bytes(p.tensor for p in parameters)
    others = bytes_in(side) - _bytes(p.tensor for p in parameters if not p.tensor.is_meta)
    initial = side.state()
    best = without_training(initial).nbytes if config.evaluation.keep == "best" else 0
    state = moments + initial.nbytes
    copies = others + starts + best + side.copies * state
    return Held(own + max(gradients, default=0) + moments, copies, state + best)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _moments(training: TrainingSpec) -> int:
    """Count the state tensors that the optimiser stores per parameter.

    Only tensors with the parameter's shape are counted. For Adam, the count is two.
    """
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimiser = build(training.optimiser, [parameter], training.learning_rate)
    optimiser.step()
    state = optimiser.state[parameter].values()
    return sum(isinstance(t, Tensor) and t.shape == parameter.shape for t in state)
