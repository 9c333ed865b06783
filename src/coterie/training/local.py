"""A client's local training: the levels of a schedule, step by step, resumable."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Trainable
from coterie.data.split import AnyBatch, Measures
from coterie.data.windows import epoch_batch, sample_batch
from coterie.messages import State
from coterie.messages.names import LOSS, REWARDS
from coterie.seeding import generator
from coterie.training.context import ClientContext
from coterie.training.passes import Purpose, training_pass
from coterie.training.schedule import Level
from coterie.training.update import Piece, Updater


class LocalTraining:
    """Updates one client's adapter; optimiser state lives on from round to round, unless the run
    file resets it."""

    def __init__(self, context: ClientContext, adapter: Trainable, levels: Sequence[Level]) -> None:
        self.context = context
        self.adapter = adapter
        self.levels = [level for level in levels if adapter.tensors(level.selects)]
        self._updaters = {
            level.name: Updater(context, adapter, level.selects, level.leaves)
            for level in self.levels
        }
        self.start: Mapping[str, Tensor] = {}
        """Where a level has a penalty: what is trained, by name, as the round found it."""

    def round(self, round: int) -> None:
        """Take the local steps of a round (the first is 0), on the attached adapter."""
        model = self.adapter.attach(self.context.base.model)
        if self.context.training.reset_optimiser:
            for updater in self._updaters.values():
                updater.reset()
        if any(level.penalty for level in self.levels):
            self.start = {n: p.detach().clone() for n, p in self.adapter.tensors().items()}
        for step in self.steps(round):
            for level in self.levels:
                if level.exchanges(round) and (step + 1) % level.every == 0:
                    for turn in range(level.steps):
                        self._update(model, level, step, turn)

    def steps(self, round: int) -> range:
        """Return the numbers of a round's steps, counted over the run."""
        steps = self.context.training.steps
        return range(round * steps, (round + 1) * steps)

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
        loss = self._updaters[level.name].update(
            pieces, level.learning_rate(step), level.penalty, where=f"at step {step + 1}"
        )
        self.context.log(f"{LOSS}{level.name}", loss)
        if measured:
            self.context.log(f"{REWARDS}{level.name}", measured[0].figures(measured))

    def _batch(self, level: Level, step: int, turn: int) -> AnyBatch:
        """What an update of a level learns from; it follows from the run's step count alone."""
        context, training = self.context, self.context.training
        tokens = context.data.train if level.split == "train" else context.data.validation
        if training.sampling == "epochs":
            exchange, every = step // training.steps, level.every
            now = (step + 1) // every - exchange * training.steps // every - 1
            number = (level.turns(exchange, training.steps) + now) * level.steps + turn
            chance = partial(generator, context.seed, "epoch", context.name, level.name)
            return epoch_batch(tokens, training.batch, context.window, number, chance)
        chance = generator(context.seed, "batch", context.name, level.name, step, turn)
        return sample_batch(tokens, training.batch, context.window, chance)

    def _loss(
        self, model: PreTrainedModel, batch: AnyBatch, purpose: Purpose, measured: list[Measures]
    ) -> Tensor:
        """Return a piece's loss; add what it measured beside it, such as rewards."""
        with training_pass(self.context, *purpose):
            loss, found = batch.to(self.context.base.device).loss(model)
        measured += [] if found is None else [found]
        return loss

    def moments(self, parameter: Tensor) -> list[Tensor]:
        """The optimisers' moments of a parameter that are of its shape."""
        states = (updater.optimiser.state.get(parameter, {}) for updater in self._updaters.values())
        return [
            value
            for state in states
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def state(self) -> State:
        """The optimisers' moments, by level, and the gradients that levels left for others."""
        left = {
            name: parameter.grad.clone()
            for name, parameter in self._left_on().items()
            if parameter.grad is not None
        }
        parts = {name: updater.state() for name, updater in self._updaters.items()}
        return State({"leftover": left} if left else {}, parts=parts)

    def restore(self, state: State) -> None:
        """Take back what `state` gave."""
        for name, updater in self._updaters.items():
            updater.restore(state.parts.get(name, State()))
        left = state.groups.get("leftover", {})
        for name, parameter in self._left_on().items():
            gradient = left.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _left_on(self) -> Mapping[str, Tensor]:
        """Return the tensors on which a level may leave gradients, by name."""
        return self.adapter.tensors(lambda p: any(level.leaves(p) for level in self.levels))
