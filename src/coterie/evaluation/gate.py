"""The gate of a client: whether the client's model or the base answers a prompt.

A model that is trained for a few steps on one kind of text treats every prompt as text of this
kind. The base's hidden states tell this kind from others better than the trained model does, so a
linear classifier of these states decides. The base, unchanged, answers the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from coterie.adapters import detached
from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.errors import CoterieError
from coterie.evaluation.generation import generate_answers
from coterie.losses.tokens import Batch, hidden_states
from coterie.messages import State
from coterie.messages.schema import check_shapes

T = TypeVar("T")
GATE = "gate"
"""The name of the gate in the state of a client."""
AT_ONCE = 16
"""The number of prompts per forward pass."""
PENALTY = 0.3
"""The ridge penalty, as a multiple of the mean squared norm of the weighted states."""
DEVIATIONS = 2.0
"""The largest distance of the threshold below the mean score of validation prompts, in standard
deviations."""
MARGIN = 1.0
"""The smallest distance of the threshold from the mean scores of validation and general prompts,
likewise."""


@dataclass(frozen=True)
class Gate:
    """A linear classifier of prompts by the base's last hidden states; see `prompt_states`.

    The base's hidden size is called dim.
    """

    weights: Tensor
    """A weight for each entry of a state, shaped (2 dim,), float64."""
    threshold: float
    """The client's model answers prompts whose states have at least this weighted sum."""

    @classmethod
    def fitted(cls, train: Tensor, validation: Tensor, general: Tensor) -> "Gate | None":
        """Compute a gate by ridge regression on states, with targets +1 (own) and -1 (general).

        The states are standardised. Own and general prompts have the same total weight. So do, of
        the own ones, training and validation prompts, because the latter most resemble later
        prompts. Every prompt is then scored by the regression on all others. The threshold is
        `DEVIATIONS` standard deviations (of validation or training scores, whichever is larger)
        below the mean score of the validation prompts, so that most of their kind are accepted; but
        at least `MARGIN` standard deviations of the general prompts' scores above their mean.

        Args:
            train: The states of the client's training prompts, shaped (prompts, 2 dim), float64.
            validation: The states of the client's validation prompts, likewise.
            general: The states of general prompts, likewise.

        Returns:
            The gate; None if the client's model should answer everything, because one of the three
            arguments has fewer than two prompts, or the threshold is less than `MARGIN` standard
            deviations below the mean score of the validation prompts.
        """
        kinds = (train, validation, general)
        sizes = [len(kind) for kind in kinds]
        if min(sizes) < 2:
            return None
        counts = torch.tensor(sizes)
        target = train.new_tensor([1.0, 1.0, -1.0]).repeat_interleave(counts)
        share = (train.new_tensor([0.25, 0.25, 0.5]) / counts).repeat_interleave(counts)
        states = torch.cat(kinds)
        mean, scale = share @ states, states.std(0).clamp_min(1e-6)
        rows = (states - mean) / scale * share.sqrt()[:, None]
        kernel = rows @ rows.t()
        ridge = PENALTY * kernel.diagonal().mean() * torch.eye(len(kernel), dtype=kernel.dtype)
        inverse = torch.linalg.inv(kernel + ridge)
        weights = rows.t() @ (inverse @ (target * share.sqrt())) / scale
        # The score of a row by the regression without this row, with the same mean and scale
        own = (kernel @ inverse).diagonal()
        scores = ((states - mean) @ weights - own * target) / (1 - own)
        trained, accepted, refused = scores.split(sizes)
        # A few validation prompts may lie close together by chance.
        deviation = torch.maximum(accepted.std(), trained.std())
        low = accepted.mean() - DEVIATIONS * deviation
        threshold = torch.maximum(low, refused.mean() + MARGIN * refused.std())
        if threshold > accepted.mean() - MARGIN * deviation:
            return None
        return cls(weights, (threshold + mean @ weights).item())

    @classmethod
    def restored(cls, state: State | None, base: Base) -> "Gate | None":
        """Return the gate that `state()` saved in a state; None if there is no state.

        Raises:
            CoterieError: The state is damaged, or belongs to a base with another hidden size.
        """
        if state is None:
            return None
        dim = base.model.config.get_text_config().hidden_size
        check_shapes(state[GATE], {"weights": (2 * dim,)})
        weights, threshold = state[GATE]["weights"], state.values.get("threshold")
        if not isinstance(threshold, float) or not weights.isfinite().all():
            raise CoterieError("The gate of the client is damaged.")
        return cls(weights.double(), threshold)

    def state(self) -> State:
        """Return the gate as a state."""
        return State({GATE: {"weights": self.weights}}, {"threshold": self.threshold})

    @property
    def digest(self) -> str:
        """A hash of the gate."""
        return blake2b(self.state().encode(), digest_size=16).hexdigest()

    def accepts(self, base: Base, prompts: Sequence[Tensor]) -> list[bool]:
        """Return for each prompt whether the client's model answers it.

        Args:
            base: The client's base.
            prompts: The token ids of each prompt, shaped (n,) with n > 0.
        """
        return (prompt_states(base, prompts) @ self.weights >= self.threshold).tolist()


@torch.no_grad()
def prompt_states(base: Base, prompts: Sequence[Tensor]) -> Tensor:
    """Compute, for each prompt, the mean of the base's last hidden states, and the last token's.

    Args:
        base: The base. An attached adapter has no effect, and is still attached afterwards.
        prompts: The token ids of each prompt, shaped (n,) with n > 0.

    Returns:
        The states, shaped (prompts, 2 dim), float64, on the CPU.
    """
    rows = [tuple(prompt.tolist()) for prompt in prompts]
    distinct = sorted(dict.fromkeys(rows), key=len)
    states: dict[tuple[int, ...], Tensor] = {}
    with detached(base.model) as bare, autocast(base.precision, base.device.type):
        for start in range(0, len(distinct), AT_ONCE):
            part = distinct[start : start + AT_ONCE]
            lengths = [len(row) for row in part]
            # A batch's last column is only predicted, so each prompt has a further token.
            ids = pad_sequence([torch.tensor([*row, 0]) for row in part], batch_first=True)
            real = torch.arange(1, ids.shape[1]) <= torch.tensor(lengths)[:, None]
            hidden = hidden_states(bare, Batch(ids, real, real).to(base.device)).cpu().double()
            for row, tokens in zip(part, hidden.split(lengths), strict=True):
                states[row] = torch.cat([tokens.mean(0), tokens[-1]])
    return torch.stack([states[row] for row in rows])


def answered(
    gate: Gate | None,
    base: Base,
    model: PreTrainedModel,
    rows: Examples,
    score: Callable[[PreTrainedModel, Examples], Sequence[T]],
) -> list[T]:
    """Apply a function to samples, each with the model that answers it: the client's or the base.

    Args:
        gate: The client's gate; None if the client's model answers all prompts.
        base: The base, to which the client's adapter is attached.
        model: The client's model.
        rows: The samples.
        score: Function that takes a model and samples, and returns a value for each sample.

    Returns:
        The values, in the order of the samples.
    """
    if gate is None:
        return list(score(model, rows))
    accepted = gate.accepts(base, rows.prompts(base))
    values: dict[int, T] = {}
    if own := [number for number, own in enumerate(accepted) if own]:
        values |= zip(own, score(model, rows.only(own)), strict=True)
    if others := [number for number, own in enumerate(accepted) if not own]:
        with detached(base.model) as bare:
            values |= zip(others, score(bare, rows.only(others)), strict=True)
    return [values[number] for number in range(len(accepted))]


def gated_answers(
    gate: Gate | None,
    base: Base,
    model: PreTrainedModel,
    rows: Examples,
    new_tokens: int,
    batch: int,
) -> list[str]:
    """Answer each sample's prompt like `generate_answers`, by the model that the gate selects."""

    def texts(answerer: PreTrainedModel, part: Examples) -> list[str]:
        return generate_answers(base, answerer, part, new_tokens, batch)

    return answered(gate, base, model, rows, texts)


@contextmanager
def answering(
    gate: Gate | None, base: Base, model: PreTrainedModel, prompt: Tensor
) -> Iterator[PreTrainedModel]:
    """Yield the model that answers a prompt: the client's, or the base until the block ends.

    Args:
        gate: The client's gate; None if the client's model answers all prompts.
        base: The base, to which the client's adapter is attached.
        model: The client's model.
        prompt: The prompt's token ids, shaped (n,) with n > 0.
    """
    if gate is None or gate.accepts(base, [prompt])[0]:
        yield model
    else:
        with detached(base.model) as bare:
            yield bare
