"""One update of some of an adapter's parameters: the same for local training and distillation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.adapters import Selects, Trainable
from coterie.bases.precision import autocast
from coterie.errors import CoterieError, Diverged, enough_memory
from coterie.messages import State
from coterie.training.context import ClientContext
from coterie.training.optimiser import build
from coterie.training.schedule import Penalty


@dataclass(frozen=True)
class Piece:
    """A part of a step's batch, small enough to be in memory as a whole."""

    loss: Callable[[], Tensor]
    """The mean loss over its counted tokens, or its pairs: a scalar with a gradient."""
    terms: int
    """How many those are."""


class Updater:
    """An optimiser of an adapter's selected parameters.

    Args:
        context: the client's context.
        adapter: the adapter whose parameters are updated.
        selects: whether a parameter is updated.
        leaves: whether each update adds a gradient to a parameter that is not updated here; the
            parameter's own updater consumes the gradient.
    """

    def __init__(
        self,
        context: ClientContext,
        adapter: Trainable,
        selects: Selects,
        leaves: Selects = lambda _: False,
    ) -> None:
        self.context, self.adapter = context, adapter
        self.selects, self.leaves = selects, leaves
        self.parameters = adapter.tensors(selects)
        self.reset()

    def reset(self) -> None:
        """Forget all moments."""
        self.optimiser = self._made()

    def update(
        self,
        loss: Callable[[], Tensor] | Sequence[Piece],
        learning_rate: float,
        penalty: Penalty | None = None,
        *,
        where: str,
    ) -> float:
        """One step down the gradient of loss and penalty; the loss, in nats per token, or DPO's.

        A loss in pieces is their mean over tokens, or pairs. The penalty is then the mean of what
        it is after each piece: for one of the parameters alone that is the penalty itself, and load
        balance is over a piece's tokens. Raises Diverged if a sum is not finite, before anything
        but what `leaves` get is changed; `where` says at which point, for people.
        """
        pieces = [Piece(loss, 1)] if callable(loss) else loss
        training, terms = self.context.training, sum(piece.terms for piece in pieces)
        self.adapter.require_grad(lambda p: self.selects(p) or self.leaves(p))
        try:
            with enough_memory("a training step", self._helps):
                shares = [self._add_gradient(p, p.terms / terms, penalty, where) for p in pieces]
        except CoterieError:
            self.optimiser.zero_grad()  # of the pieces before
            raise
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), training.max_grad_norm)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        return sum(shares)

    def _add_gradient(
        self, piece: Piece, share: float, penalty: Penalty | None, where: str
    ) -> float:
        """Add a piece's share of the gradient; its share of the loss."""
        base = self.context.base
        with autocast(base.precision, base.device.type):
            loss = piece.loss()
            total = loss if penalty is None else loss + penalty().to(loss.device)
        (total * share).backward()
        # Not sooner: a GPU would have nothing to do until its value is here.
        if not math.isfinite(total.item()):
            raise Diverged(
                f"The loss of {self.context.name!r} is not finite {where}; a lower "
                "training.learning_rate may help."
            )
        return loss.item() * share

    def _helps(self) -> list[str]:
        """Settings with which a step needs less memory."""
        at_once, config = self.context.training.at_once, self.context.base.model.config
        window = f"data.window to less than {self.context.window}"
        again = [] if self.context.training.checkpointing else ["training.checkpointing: true"]
        return [
            *([f"training.micro_batch: {at_once // 2}"] if at_once > 1 else []),
            *again,
            *([] if hasattr(config, "quantization_config") else ["base.weights: nf4"]),
            window,
            "`base` to a smaller one",
        ]

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
                kind: mine[kind].copy_(value) if kind in mine else _beside(parameter, kind, value)
                for kind, value in (theirs or beginning.get(parameter, {})).items()
            }
            if moments:
                self.optimiser.state[parameter] = moments

    def _made(self) -> torch.optim.Optimizer:
        training = self.context.training
        return build(training.optimiser, self.parameters.values(), training.learning_rate)


def _beside(parameter: Tensor, kind: str, moment: Tensor) -> Tensor:
    """A copy of a moment where its parameter is; as in torch, a count of steps stays where it
    was."""
    return moment.to(moment.device if kind == "step" else parameter.device, copy=True)
