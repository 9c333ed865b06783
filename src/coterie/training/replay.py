"""Replay: beside private samples, a model reads general samples and stays close to its base there.

Fine-tuning on a little text makes a model forget what its base knew. With replay, each update also
lowers the mean Kullback-Leibler divergence KL(base || model) on samples that contain nothing
private (as in arXiv 2512.22337). The base's predictions follow from its last hidden states, which
are computed once, before training.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.seeding import generator
from coterie.training.context import ClientContext
from coterie.training.general import Replay
from coterie.training.passes import training_pass
from coterie.training.update import Piece


def replayed(
    context: ClientContext,
    model: PreTrainedModel,
    step: int,
    level: str,
    update: int,
    divergences: list[Tensor],
) -> list[Piece]:
    """Return the loss of one update's general samples, in pieces that fit in memory.

    Args:
        context: The client's context.
        model: The model in training.
        step: The step, counted from 0 at the start of the run.
        level: The name of the level that is updated.
        update: The number of the level's update. The samples that are drawn depend on it.
        divergences: A list to which the divergences of the tokens are appended, without gradients.

    Returns:
        The pieces. The list is empty if the run has no replay, or if replay has not begun.
    """
    replay, training = context.replay, context.training
    if replay is None or step < replay.spec.start * context.rounds * training.steps:
        return []
    chosen = _chosen(context, replay, level, update)
    at_once = training.at_once
    parts = [chosen[start : start + at_once] for start in range(0, len(chosen), at_once)]

    def loss(part: Sequence[int], number: int) -> Tensor:
        with training_pass(context, "replay", level, update, number):
            values = replay.samples.divergences(context.base, model, part)
        divergences.append(values.detach())
        return replay.spec.weight * values.mean()

    return [
        Piece(partial(loss, part, number), replay.samples.terms(part))
        for number, part in enumerate(parts)
    ]


def _chosen(context: ClientContext, replay: Replay, level: str, update: int) -> list[int]:
    """Return the numbers of an update's samples.

    The updates of a level read all samples in random order before they read one again.
    """
    count, size = len(replay.samples.ids), replay.spec.samples
    chosen: list[int] = []
    for place in range(update * size, (update + 1) * size):
        draw = generator(context.seed, "replay", context.name, level, place // count)
        chosen.append(int(torch.randperm(count, generator=draw)[place % count]))
    return chosen
