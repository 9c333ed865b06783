"""A client's local training: updates of an adapter that follow the levels of a schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Trainable
from coterie.data.split import AnyBatch, Measures
from coterie.data.windows import epoch_batch, sample_batch
from coterie.messages import State
from coterie.messages.names import LOSS, REPLAY, REWARDS
from coterie.seeding import generator
from coterie.training.context import ClientContext
from coterie.training.passes import Purpose, training_pass
from coterie.training.replay import replayed
from coterie.training.schedule import Level
from coterie.training.update import Piece, Updater


class TrainingState(State):
    """The state of a `LocalTraining`. A client needs it to train, but not to use its model."""


def without_training(state: State) -> State:
    """Return a client's state with an empty state in place of each `TrainingState`.

    The result is enough to use the client's model. A client that is restored from it has no moments
    and no accumulated gradients.
    """
    parts = {
        name: State() if isinstance(part, TrainingState) else without_training(part)
        for name, part in state.parts.items()
    }
    return replace(state, parts=parts)


class LocalTraining:
    """The local training of one client's adapter.

    Optimiser states persist from round to round, unless `training.reset_optimiser` is set.

    Args:
        context: The client's context.
        adapter: The adapter to train.
        levels: The levels of the schedule, each of which is a set of parameters that are updated
            together. A level is ignored if it selects no parameter of the adapter.
    """

    def __init__(self, context: ClientContext, adapter: Trainable, levels: Sequence[Level]) -> None:
        self.context = context
        self.adapter = adapter
        self.levels = [level for level in levels if adapter.tensors(level.selects)]
        self._updaters = {
            level.name: Updater(context, adapter, level.selects, level.leaves)
            for level in self.levels
        }
        self.start: Mapping[str, Tensor] = {}
        """Copies of the parameters at the start of the round; empty without a penalty or a pull."""

    def run(self, number: int) -> None:
        """Attach the adapter, and execute the steps of a local training.

        Args:
            number: The number of the local training, counted from 0 at the start of the run. The
                batches and the learning rate depend on it.
        """
        model = self.adapter.attach(self.context.base.model)
        if self.context.training.reset_optimiser:
            for updater in self._updaters.values():
                updater.reset()
        if any(level.penalty or level.pull for level in self.levels):
            self.start = {n: p.detach().clone() for n, p in self.adapter.tensors().items()}
        for step in self.steps(number):
            for level in self.levels:
                if level.active(number) and (step + 1) % level.every == 0:
                    for turn in range(level.steps):
                        self._update(model, level, step, turn)

    def steps(self, number: int) -> range:
        """Return the indices of a training's steps, counted from 0 at the start of the run."""
        steps = self.context.training.steps
        return range(number * steps, (number + 1) * steps)

    def _update(self, model: PreTrainedModel, level: Level, step: int, turn: int) -> None:
        parts = self._batch(level, step, turn).by_length().split(self.context.training.at_once)
        measured: list[Measures] = []
        pieces = [
            Piece(
                partial(self._loss, model, part, (level.name, step, turn, number), measured),
                part.terms,
            )
            for number, part in enumerate(parts)
        ]
        drift: list[Tensor] = []
        update = step * level.steps + turn
        beside = replayed(self.context, model, step, level.name, update, drift)
        loss = self._updaters[level.name].update(
            pieces,
            level.learning_rate(step),
            level.penalty,
            where=f"at step {step + 1}",
            beside=beside,
            pull=level.pull,
        )
        self.context.log(f"{LOSS}{level.name}", loss)
        if drift:
            self.context.log(f"{REPLAY}{level.name}", torch.cat(drift).mean().item())
        if measured:
            self.context.log(f"{REWARDS}{level.name}", measured[0].figures(measured))

    def _batch(self, level: Level, step: int, turn: int) -> AnyBatch:
        """Return the batch for an update of a level.

        The batch depends only on the arguments and on the client's context. It does not depend on
        the batches that were drawn earlier.

        Args:
            level: The level.
            step: The step, counted from 0 at the start of the run.
            turn: The index of the update, counted from 0 at the first of the `level.steps` updates
                that the level makes in this step.
        """
        context, training = self.context, self.context.training
        tokens = context.data.train if level.split == "train" else context.data.validation
        if training.sampling == "epochs":
            trained, every = step // training.steps, level.every
            turns = (step + 1) // every - trained * training.steps // every - 1
            number = (level.turns(trained, training.steps) + turns) * level.steps + turn
            generators = partial(generator, context.seed, "epoch", context.name, level.name)
            return epoch_batch(tokens, training.batch, context.window, number, generators)
        batches = generator(context.seed, "batch", context.name, level.name, step, turn)
        return sample_batch(tokens, training.batch, context.window, batches)

    def _loss(
        self, model: PreTrainedModel, batch: AnyBatch, purpose: Purpose, measured: list[Measures]
    ) -> Tensor:
        """Return the loss of a piece of a batch.

        If other values than the loss are measured on the piece, they are appended to `measured`.
        For preference pairs, for example, these values are the rewards.
        """
        with training_pass(self.context, *purpose):
            loss, measures = batch.to(self.context.base.device).loss(model)
        measured += [] if measures is None else [measures]
        return loss

    def moments(self, parameter: Tensor) -> list[Tensor]:
        """Return the moments that the optimisers store for a parameter.

        Only tensors with the parameter's shape are returned, so step counts, for example, are left
        out.
        """
        states = (updater.optimiser.state.get(parameter, {}) for updater in self._updaters.values())
        return [
            value
            for state in states
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def state(self) -> TrainingState:
        """Return each level's optimiser state and accumulated gradients; see `schedule.Level`."""
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in self._leftover_parameters().items()
            if parameter.grad is not None
        }
        parts = {name: updater.state() for name, updater in self._updaters.items()}
        return TrainingState({"leftover": gradients} if gradients else {}, parts=parts)

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`."""
        for name, updater in self._updaters.items():
            updater.restore(state.parts.get(name, State()))
        gradients = state.groups.get("leftover", {})
        for name, parameter in self._leftover_parameters().items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _leftover_parameters(self) -> Mapping[str, Tensor]:
        """Return a mapping from names to the parameters that one level leaves to another level.

        The level that leaves a parameter to another level only accumulates the parameter's
        gradients. The other level updates the parameter, and uses the accumulated gradients in its
        next update.
        """
        return self.adapter.tensors(lambda p: any(level.leaves(p) for level in self.levels))
