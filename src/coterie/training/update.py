"""Updates of an adapter's parameters, for local training and for distillation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from coterie.adapters import Selects, Trainable
from coterie.bases.precision import autocast
from coterie.errors import CoterieError, Diverged, enough_memory
from coterie.messages import State
from coterie.training.context import ClientContext
from coterie.training.optimiser import build
from coterie.training.schedule import Penalty, Pull


@dataclass(frozen=True)
class Piece:
    """A piece of a step's batch that fits in memory."""

    loss: Callable[[], Tensor]
    """Function that returns the mean loss over the piece's tokens or pairs, with a gradient."""
    terms: int
    """The number of tokens or pairs in the mean."""


class Updater:
    """An optimiser for selected parameters of an adapter.

    Args:
        context: The client's context.
        adapter: The adapter whose parameters are updated.
        selects: Function that returns whether a parameter is updated.
        leaves: Function that returns whether this `Updater` leaves a given parameter to another
            `Updater`. This `Updater` then only accumulates the parameter's gradient. The other
            `Updater` uses the accumulated gradient in its next update.
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
        """Reset the optimiser's state."""
        self.optimiser = self._new_optimiser()

    def update(
        self,
        loss: Callable[[], Tensor] | Sequence[Piece],
        learning_rate: float,
        penalty: Penalty | None = None,
        *,
        where: str,
        beside: Sequence[Piece] = (),
        pull: Pull | None = None,
    ) -> float:
        """Take one optimiser step to minimise the sum of the loss, the penalty and a second loss.

        After the step, parameters are pulled towards their targets, if they have any.

        Args:
            loss: A function that returns the loss, or the pieces of a batch. The loss of a batch is
                the mean over the tokens or pairs of all pieces.
            learning_rate: The learning rate of the step.
            penalty: A function that returns a penalty; None for no penalty. It is called after the
                forward pass of each piece, and the mean over the pieces is used. A load-balancing
                penalty is therefore computed within each piece.
            where: The point in training that error messages mention, such as "at step 12".
            beside: The pieces of the second loss, which is the mean over their terms. Its gradient
                is shortened to at most `training.replay.max_grad_ratio` times the norm of the other
                gradient. The pieces are computed first, so that after the update, the adapter's
                records of the last forward pass are those of the batch.
            pull: A function that returns the strength of a pull and its targets; None for no pull.

        Returns:
            The first loss, without the penalty. Its unit is nats per token, except for the loss of
            DPO.

        Raises:
            Diverged: A loss or the penalty is not finite. No parameter has changed, but the
                gradients of the parameters that this updater trains may have changed.
        """
        pieces = [Piece(loss, 1)] if callable(loss) else loss
        training = self.context.training
        terms, extra_terms = (sum(piece.terms for piece in part) for part in (pieces, beside))
        self.adapter.require_grad(lambda p: self.selects(p) or self.leaves(p))
        try:
            with enough_memory("a training step", self._memory_settings):
                earlier = self._exchanged({}) if beside else {}
                extra = [self._add_gradient(p, p.terms / extra_terms, None) for p in beside]
                second = self._exchanged(earlier) if beside else {}
                losses = [self._add_gradient(p, p.terms / terms, penalty) for p in pieces]
                self._add_shortened(second)
                # Reading a value synchronises a GPU, so all values are read together at the end.
                values: list[list[float]] = torch.stack([*losses, *extra]).tolist()
            if not all(math.isfinite(value) for pair in values for value in pair):
                raise Diverged(
                    f"The loss of {self.context.name!r} is not finite {where}; a lower "
                    "training.learning_rate may help."
                )
        except CoterieError:
            self.optimiser.zero_grad()  # discards the gradients of earlier pieces
            raise
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), training.max_grad_norm)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        if pull is not None:
            self._pull(*pull(), learning_rate)
        pairs = zip(pieces, values[: len(pieces)], strict=True)
        return sum(loss * (piece.terms / terms) for piece, (loss, _) in pairs)

    def _add_gradient(self, piece: Piece, share: float, penalty: Penalty | None) -> Tensor:
        """Add a piece's contribution to the gradients.

        Args:
            piece: The piece.
            share: The piece's share of the batch's tokens or pairs, by which gradients are
                multiplied.
            penalty: A function that returns a penalty; None for no penalty.

        Returns:
            The loss without and with the penalty, shaped (2,), on the device of the loss.
        """
        base = self.context.base
        with autocast(base.precision, base.device.type):
            loss = piece.loss()
            total = loss if penalty is None else loss + penalty().to(loss.device)
        (total * share).backward()
        return torch.stack([loss.detach(), total.detach().to(loss.dtype)])

    def _exchanged(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace the gradients of all parameters, and return the replaced gradients."""
        tensors = self.adapter.tensors()
        replaced = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        for name, parameter in tensors.items():
            parameter.grad = gradients.get(name)
        return replaced

    def _add_shortened(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of replay, shortened in proportion to those that are there.

        Without this, they would often be the longer ones, and an optimiser that divides by the
        gradients' size, such as AdamW, would then learn the private text more slowly.
        """
        if not gradients:
            return
        replay = self.context.replay
        assert replay is not None, "only replay adds a second loss"
        own = get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        norm = get_total_norm([gradients[name] for name in self.parameters if name in gradients])
        most = replay.spec.max_grad_ratio * own / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        factor = most.clamp_max(1)
        for name, parameter in self.adapter.tensors().items():
            if (gradient := gradients.get(name)) is not None:
                added = gradient * factor.to(gradient.device)
                parameter.grad = added if parameter.grad is None else parameter.grad.add_(added)

    @torch.no_grad()
    def _pull(self, strength: float, targets: Mapping[str, Tensor], learning_rate: float) -> None:
        """Move parameters towards their targets; see `schedule.Pull`."""
        for name, parameter in self.parameters.items():
            if (target := targets.get(name)) is not None:
                parameter.lerp_(target.to(parameter), min(1, learning_rate * strength))

    def _memory_settings(self) -> list[str]:
        """Return texts that name settings with which a training step needs less memory.

        The most effective setting comes first. Each text is the continuation of an error message
        after the word "set".
        """
        training = self.context.training
        samples, config = training.at_once, self.context.base.model.config
        window = f"data.window to less than {self.context.window}"
        recompute = [] if training.checkpointing else ["training.checkpointing: true"]
        if training.store_activations:
            recompute = ["training.store_activations: false"]
        return [
            *([f"training.micro_batch: {samples // 2}"] if samples > 1 else []),
            *recompute,
            *([] if hasattr(config, "quantization_config") else ["base.weights: nf4"]),
            window,
            "`base` to a smaller one",
        ]

    def state(self) -> State:
        """Return a copy of the optimiser's state, with a group for each kind of moment."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimiser.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    groups.setdefault(kind, {})[name] = value.detach().clone()
        return State(groups)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`.

        Moments that are missing from the state are initialised. Existing moments are overwritten in
        place, because new allocations for each client and evaluation would fragment the heap
        and waste memory (900 MiB with 32 clients that train GPT-2).
        """
        initial = self._new_optimiser().state  # Adagrad, for example, begins with moments
        for name, parameter in self.parameters.items():
            current = self.optimiser.state.pop(parameter, {})
            saved = {kind: group[name] for kind, group in state.groups.items() if name in group}
            moments = {
                kind: current[kind].copy_(value)
                if kind in current
                else _copied(parameter, kind, value)
                for kind, value in (saved or initial.get(parameter, {})).items()
            }
            if moments:
                self.optimiser.state[parameter] = moments

    def _new_optimiser(self) -> torch.optim.Optimizer:
        training = self.context.training
        return build(training.optimiser, self.parameters.values(), training.learning_rate)


def _copied(parameter: Tensor, kind: str, moment: Tensor) -> Tensor:
    """Copy a moment to the device of its parameter.

    A step count stays on its current device, because torch keeps step counts on the CPU.
    """
    return moment.to(moment.device if kind == "step" else parameter.device, copy=True)
