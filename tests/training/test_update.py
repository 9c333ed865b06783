"""The update loop against torch's own, whichever optimiser; and its moments come back."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensors import equal
from torch import Tensor, nn

from coterie import CoterieError
from coterie.adapters import Parameter, Selects, of_roles
from coterie.messages import State
from coterie.methods.tensors import copied, copy
from coterie.training.context import ClientContext
from coterie.training.optimiser import REFUSED, classes
from coterie.training.spec import OptimiserSpec, TrainingSpec
from coterie.training.update import Piece, Updater

KINDS: dict[str, Any] = {name: name for name in sorted(classes().keys() - REFUSED)} | {
    "sgd, momentum": {"name": "sgd", "momentum": 0.9},
    "rmsprop, all": {"name": "rmsprop", "momentum": 0.5, "centered": True},
    "adam, amsgrad": {"name": "adam", "amsgrad": True},
    "adagrad, begun": {"name": "adagrad", "initial_accumulator_value": 0.5},
}
ROLES: dict[str, str] = {"a": "dense", "b": "dense", "c": "router"}


class Weights:
    """A `Trainable`, as far as updates need one: matrices (4, 3), by name."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self.all = {
            name: nn.Parameter(torch.randn(4, 3, generator=chance)) for name in sorted(ROLES)
        }

    def described(self) -> dict[str, Parameter]:
        return {n: Parameter(n, ROLES[n], tensor, "zero") for n, tensor in self.all.items()}

    def tensors(self, selects: Selects = lambda _: True) -> dict[str, nn.Parameter]:
        return {name: p.tensor for name, p in self.described().items() if selects(p)}

    def require_grad(self, selects: Selects) -> None:
        for parameter in self.described().values():
            parameter.tensor.requires_grad_(selects(parameter))

    def values(self) -> dict[str, Tensor]:
        return copied(self.all)


def updater_of(weights: Weights, *roles: str, **training: Any) -> Updater:
    base = SimpleNamespace(precision="fp32", device=torch.device("cpu"))
    spec = TrainingSpec(precision="fp32", **training)
    context = SimpleNamespace(name="poet", base=base, training=spec)
    selects = of_roles(*roles or ("dense", "router"))
    return Updater(cast(ClientContext, context), cast(Any, weights), selects)


def loss_of(parameters: dict[str, nn.Parameter], step: int) -> Tensor:
    """Return the loss of a linear model on the batch of a step."""
    chance = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=chance), torch.randn(8, 3, generator=chance)
    predicted = torch.stack([(x @ p).tanh() for p in parameters.values()]).sum(0)
    return (predicted - y).square().mean()


def rate(step: int) -> float:
    return 0.05 / (1 + step)


def work(updater: Updater, weights: Weights, steps: range, penalty: Any = None) -> list[float]:
    return [
        updater.update(
            lambda s=s: loss_of(weights.all, s), rate(s), penalty, where=f"at step {s + 1}"
        )
        for s in steps
    ]


@pytest.mark.parametrize("most", [None, 0.05, 1e6])
@pytest.mark.parametrize("penalised", [False, True])
def test_updates_are_torch_s_adamw_on_the_same_loss(most: float | None, penalised: bool) -> None:
    # The loop is that of torch's documentation, with an explicit scaling of the gradient's norm.

    def term(weights: Weights) -> Callable[[], Tensor] | None:
        return (lambda: 0.3 * weights.all["b"].pow(4).sum()) if penalised else None

    own, others = Weights(), Weights()
    updater = updater_of(own, max_grad_norm=most)
    adamw = torch.optim.AdamW(others.all.values(), betas=(0.9, 0.95), weight_decay=0.01)
    losses, expected = work(updater, own, range(6), term(own)), []
    for step in range(6):
        adamw.param_groups[0]["lr"] = rate(step)
        adamw.zero_grad()
        loss, extra = loss_of(others.all, step), term(others)
        (loss + extra() if extra else loss).backward()
        grads = [p.grad for p in others.all.values() if p.grad is not None]
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        if most is not None and norm > most:
            for grad in grads:
                grad.mul_(most / norm)
        adamw.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)  # without the penalty
    for name, parameter in own.all.items():
        torch.testing.assert_close(parameter, others.all[name], rtol=1e-5, atol=1e-6)
        assert parameter.grad is None


def test_a_longer_gradient_is_scaled_to_the_largest_norm() -> None:
    # A step of SGD at rate 1 moves the weights by the gradient itself.
    moves = {}
    for most in (None, 0.25, 100.0):
        weights = Weights()
        before = weights.values()
        updater = updater_of(weights, optimiser=OptimiserSpec(name="sgd"), max_grad_norm=most)
        updater.update(lambda w=weights: loss_of(w.all, 0) * 10, 1.0, where="at step 1")
        moves[most] = torch.stack([p.detach() - before[n] for n, p in weights.all.items()])
    assert moves[None].norm() > 0.25
    assert torch.equal(moves[None], moves[100.0])
    torch.testing.assert_close(moves[0.25], moves[None] * 0.25 / moves[None].norm())


def test_only_the_roles_are_updated() -> None:
    weights = Weights()
    before = weights.values()
    work(updater_of(weights, "router"), weights, range(3))
    moved = {name for name, p in weights.all.items() if not torch.equal(p, before[name])}
    assert moved == {"c"}
    assert all(p.grad is None for p in weights.all.values())
    assert updater_of(weights, "router").parameters.keys() == {"c"}


@pytest.mark.parametrize("kind", KINDS)
def test_moments_come_back_through_their_bytes(kind: str) -> None:
    spec = OptimiserSpec.model_validate(KINDS[kind])
    weights = Weights()
    updater = updater_of(weights, optimiser=spec)
    work(updater, weights, range(3))
    values, data = weights.values(), updater.state().encode()
    losses = work(updater, weights, range(3, 6))
    after, moments = weights.values(), updater.state().encode()

    other = Weights()
    fresh = updater_of(other, optimiser=spec)
    for late, its in ((fresh, other), (updater, weights)):
        copy(values, its.all)
        late.restore(State.decode(data))
        assert late.state().encode() == data
        assert work(late, its, range(3, 6)) == losses
        assert equal(its.values(), after)
        assert late.state().encode() == moments


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["reset", "restore"])
def test_what_has_no_moments_starts_afresh(kind: str, way: str) -> None:
    spec = OptimiserSpec.model_validate(KINDS[kind])
    weights, other = Weights(), Weights()
    updater, fresh = updater_of(weights, optimiser=spec), updater_of(other, optimiser=spec)
    beginning = fresh.state().encode()
    work(updater, weights, range(3))
    if way == "reset":
        updater.reset()
    else:
        updater.restore(State())
    assert updater.state().encode() == beginning
    copy(other.all, weights.all)
    assert work(updater, weights, range(3)) == work(fresh, other, range(3))
    assert equal(weights.values(), other.values())


def test_a_state_is_a_copy_grouped_by_kind() -> None:
    # Restored moments overwrite the existing ones.
    weights = Weights()
    updater = updater_of(weights)
    assert updater.state() == State()
    work(updater, weights, range(2))
    state = updater.state()
    assert state.groups.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(group.keys() == weights.all.keys() for group in state.groups.values())
    assert {step.item() for step in state["step"].values()} == {2}
    before = copied(state["exp_avg"])
    places = {n: updater.optimiser.state[p]["exp_avg"].data_ptr() for n, p in weights.all.items()}
    for _ in range(2):
        work(updater, weights, range(2, 4))
        assert equal(state["exp_avg"], before)
        updater.restore(state)
        moments = {n: updater.optimiser.state[p]["exp_avg"] for n, p in weights.all.items()}
        assert equal(moments, before)
        assert {n: tensor.data_ptr() for n, tensor in moments.items()} == places


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_is_a_sentence_and_changes_nothing(value: float | None) -> None:
    # None is a loss in two pieces, of which the later one is not finite.
    weights = Weights()
    updater = updater_of(weights)
    work(updater, weights, range(2))
    before, state = weights.values(), updater.state().encode()
    parts = [Piece(lambda s=s: loss_of(weights.all, s) / (1 - s), 1) for s in (0, 1)]
    loss: Any = parts if value is None else lambda: loss_of(weights.all, 2) * value
    with pytest.raises(CoterieError) as error:
        updater.update(loss, 0.1, where="at step 3")
    assert str(error.value) == (
        "The loss of 'poet' is not finite at step 3; a lower training.learning_rate may help."
    )
    assert equal(weights.values(), before)
    assert updater.state().encode() == state
    assert all(p.grad is None for p in weights.all.values())


@pytest.mark.parametrize(
    ("micro_batch", "quantised", "stores", "helps"),
    [
        (None, False, False, "training.micro_batch: 32 or training.checkpointing: true"),
        (2, True, False, "training.micro_batch: 1 or training.checkpointing: true"),
        (1, False, False, "training.checkpointing: true or base.weights: nf4"),
        (1, True, False, "training.checkpointing: true or data.window to less than 16"),
        (2, True, True, "training.micro_batch: 1 or training.store_activations: false"),
    ],
)
def test_too_little_memory_is_a_sentence_and_changes_nothing(
    micro_batch: int | None, quantised: bool, stores: bool, helps: str
) -> None:
    weights = Weights()
    updater = updater_of(weights, micro_batch=micro_batch, store_activations=stores)
    config = SimpleNamespace(**({"quantization_config": {}} if quantised else {}))
    updater.context.window = 16  # pyright: ignore
    updater.context.base.model = SimpleNamespace(config=config)  # pyright: ignore

    def full() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pieces = [Piece(lambda: loss_of(weights.all, 2), 1), Piece(full, 1)]
    with pytest.raises(CoterieError) as error:
        updater.update(pieces, 0.1, where="at step 3")
    assert str(error.value) == f"The GPU has too little memory for a training step; set {helps}."
    assert all(parameter.grad is None for parameter in weights.all.values())


def test_pieces_weigh_by_their_tokens_and_the_penalty_counts_once() -> None:
    # A step of SGD at rate 1 moves the weights by the gradient itself.

    def moved(loss: Any) -> dict[str, Tensor]:
        weights = Weights()
        before = weights.values()
        updater = updater_of(weights, optimiser=OptimiserSpec(name="sgd"))
        penalty = lambda: 0.3 * weights.all["b"].pow(4).sum()  # noqa: E731
        value = updater.update(loss(weights), 1.0, penalty, where="at step 1")
        assert value == pytest.approx((3 * first + 5 * second) / 8)
        return {n: p.detach() - before[n] for n, p in weights.all.items()}

    first, second = (loss_of(Weights().all, step).item() for step in (0, 1))
    whole = moved(lambda w: lambda: (3 * loss_of(w.all, 0) + 5 * loss_of(w.all, 1)) / 8)
    pieces = moved(
        lambda w: [Piece(lambda: loss_of(w.all, 0), 3), Piece(lambda: loss_of(w.all, 1), 5)]
    )
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_go_where_their_parameters_are(kind: str) -> None:
    # The meta device stands for a GPU; the loaded state is on the CPU.
    spec = OptimiserSpec.model_validate(KINDS[kind])
    weights, moved = Weights(), Weights()
    updater = updater_of(weights, optimiser=spec)
    work(updater, weights, range(2))
    moved.all = {n: nn.Parameter(torch.empty(4, 3, device="meta")) for n in weights.all}
    other = updater_of(moved, optimiser=spec)
    other.restore(updater.state())
    states = [other.optimiser.state[parameter] for parameter in moved.all.values()]
    assert [len(s) for s in states] == [
        len(updater.optimiser.state[p]) for p in weights.all.values()
    ]
    for state in states:
        wrong = {k for k, t in state.items() if t.device.type != ("cpu" if k == "step" else "meta")}
        assert not wrong
