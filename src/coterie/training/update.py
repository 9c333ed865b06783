"""One update of some of an adapter's parameters: the same for local training and distillation."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie.adapters import Role, Trainable
from coterie.bases.precision import autocast
from coterie.errors import Diverged
from coterie.exchange import State
from coterie.training.context import ClientContext
from coterie.training.optimiser import build
from coterie.training.schedule import Penalty


class Updater:
    """An optimiser of the parameters that have certain roles."""

    def __init__(self, context: ClientContext, adapter: Trainable, roles: Sequence[Role]) -> None:
        self.context, self.adapter, self.roles = context, adapter, tuple(roles)
        self.parameters = adapter.parameters(*self.roles)
        self.reset()

    def reset(self) -> None:
        """Forget all moments."""
        self.optimiser = self._made()

    def update(
        self,
        loss: Callable[[], Tensor],
        learning_rate: float,
        penalty: Penalty | None = None,
        *,
        where: str,
    ) -> float:
        """One step down the gradient of loss and penalty; the loss, in nats per token.

        Raises Diverged if their sum is not finite, before anything is changed; `where` says at
        which point, for people.
        """
        base, training = self.context.base, self.context.training
        self.adapter.require_grad(*self.roles)
        with autocast(base.precision, base.device.type):
            value = loss()
            total = value if penalty is None else value + penalty()
        if not math.isfinite(total.item()):
            raise Diverged(
                f"The loss of {self.context.name!r} is not finite {where}; a lower "
                "training.learning_rate may help."
            )
        total.backward()
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), training.max_grad_norm)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        return value.item()

    def state(self) -> State:
        """The optimiser's moments, copied: for each kind a group of tensors, by parameter."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimiser.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    groups.setdefault(kind, {})[name] = value.detach().clone()
        return State(groups)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Take back what `state` gave; a parameter without moments starts afresh.

        Moments are written over those that are there: new ones for every client and evaluation
        would leave holes all over the heap (900 MiB with 32 clients of GPT-2).
        """
        beginning = self._made().state  # some optimisers begin with moments, as Adagrad does
        for name, parameter in self.parameters.items():
            mine = self.optimiser.state.pop(parameter, {})
            theirs = {kind: found[name] for kind, found in state.groups.items() if name in found}
            moments = {
                kind: mine[kind].copy_(value) if kind in mine else value.clone()
                for kind, value in (theirs or beginning.get(parameter, {})).items()
            }
            if moments:
                self.optimiser.state[parameter] = moments

    def _made(self) -> torch.optim.Optimizer:
        training = self.context.training
        return build(training.optimiser, self.parameters.values(), training.learning_rate)
