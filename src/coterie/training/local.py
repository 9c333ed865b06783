"""A client's local training: the levels of a schedule, step by step, resumable."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Trainable
from coterie.bases.precision import autocast
from coterie.chance import generator
from coterie.data import sample_batch
from coterie.errors import CoterieError
from coterie.training.context import ClientContext
from coterie.training.loss import language_model_loss
from coterie.training.schedule import Level


class LocalTraining:
    """Updates one client's adapter; optimiser state lives on from round to round, unless the run
    file wants it fresh."""

    def __init__(self, context: ClientContext, adapter: Trainable, levels: Sequence[Level]) -> None:
        self.context = context
        self.adapter = adapter
        self.levels = [level for level in levels if adapter.parameters(*level.roles)]
        self._optimisers = {level.name: self._optimiser(level) for level in self.levels}
        self._start: dict[str, Tensor] = {}

    def round(self, round: int) -> None:
        """The local steps of one round (0 is the first), on the attached adapter."""
        steps = self.context.training.steps
        model = self.adapter.attach(self.context.base.model)
        if self.context.training.reset_optimiser:
            self._optimisers = {level.name: self._optimiser(level) for level in self.levels}
        if any(level.penalty for level in self.levels):
            self._start = {n: p.detach().clone() for n, p in self.adapter.parameters().items()}
        for step in range(round * steps, (round + 1) * steps):
            for level in self.levels:
                if (step + 1) % level.every == 0:
                    for turn in range(level.steps):
                        self._update(model, level, step, turn)

    def tensors(self) -> dict[str, Tensor]:
        """The optimisers' moments, by level, kind and parameter name."""
        found = {}
        for level in self.levels:
            state = self._optimisers[level.name].state
            for name, parameter in self.adapter.parameters(*level.roles).items():
                for kind, value in state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{level.name}/{kind}/{name}"] = value
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave; a parameter without moments starts afresh.

        Moments are written over those that are there: new ones for every client and evaluation
        would leave holes all over the heap (900 MiB with 32 clients of GPT-2).
        """
        saved: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            place, *rest = key.split("/", 2)
            if len(rest) == 2:  # of a level, or of something that stands beside them
                saved[place, rest[1]][rest[0]] = value
        for level in self.levels:
            state = self._optimisers[level.name].state
            afresh: torch.optim.Optimizer | None = None
            for name, parameter in self.adapter.parameters(*level.roles).items():
                mine, theirs = state.pop(parameter, {}), saved.get((level.name, name))
                if theirs is None:  # some optimisers begin with moments, as adagrad does
                    afresh = afresh or self._optimiser(level)
                    theirs = afresh.state.get(parameter, {})
                moments = {
                    kind: mine[kind].copy_(value) if kind in mine else value.clone()
                    for kind, value in theirs.items()
                }
                if moments:
                    state[parameter] = moments

    def _optimiser(self, level: Level) -> torch.optim.Optimizer:
        parameters = list(self.adapter.parameters(*level.roles).values())
        return self.context.training.optimiser.build(parameters, level.learning_rate(0))

    def _update(self, model: PreTrainedModel, level: Level, step: int, turn: int) -> None:
        context = self.context
        tokens = context.data.train if level.split == "train" else context.data.validation
        chance = generator(context.seed, "batch", context.name, level.name, step, turn)
        batch = sample_batch(tokens, context.training.batch, context.window, chance)
        self.adapter.require_grad(*level.roles)
        with autocast(context.base.precision, context.base.device.type):
            loss = language_model_loss(model, *batch.to(context.base.device))
            total = loss if level.penalty is None else loss + level.penalty(self._start)
        total.backward()
        if context.training.max_grad_norm is not None:
            trained = list(self.adapter.parameters(*level.roles).values())
            torch.nn.utils.clip_grad_norm_(trained, context.training.max_grad_norm)
        optimiser = self._optimisers[level.name]
        for group in optimiser.param_groups:
            group["lr"] = level.learning_rate(step)
        optimiser.step()
        optimiser.zero_grad()
        figure = loss.item()
        if not math.isfinite(figure):
            raise CoterieError(
                f"The loss of client {context.name!r} is no longer finite at step {step + 1}; "
                "a lower training.learning_rate may help."
            )
        context.log(f"loss/{level.name}", figure)
