"""The update loop against torch's own, whichever optimiser; and its moments come back."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensors import equal
from torch import Tensor, nn

from coterie import CoterieError
from coterie.adapters import Parameter, Selects, of_roles
from coterie.messages import State
from coterie.methods.tensors import copied, copy
from coterie.training.general import GeneralSamples, Replay
from coterie.training.optimiser import REFUSED, classes
from coterie.training.spec import ReplaySpec, TrainingSpec
from coterie.training.update import Piece, Updater

KINDS: dict[str, Any] = {name: name for name in sorted(classes().keys() - REFUSED)} | {
    "sgd, momentum": {"name": "sgd", "momentum": 0.9},
    "rmsprop, all": {"name": "rmsprop", "momentum": 0.5, "centered": True},
    "adam, amsgrad": {"name": "adam", "amsgrad": True},
    "adagrad, begun": {"name": "adagrad", "initial_accumulator_value": 0.5},
}
ROLES: dict[str, str] = {"a": "dense", "b": "dense", "c": "router"}


class Weights:
    """A `Trainable`, as far as updates need one: matrices (4, 3), by name; and their updater."""

    def __init__(self, *roles: str, device: str = "cpu", ratio: float = 1, **training: Any) -> None:
        chance = torch.Generator().manual_seed(0)
        values = {n: torch.randn(4, 3, generator=chance) for n in sorted(ROLES)}
        self.all = {n: nn.Parameter(tensor.to(device)) for n, tensor in values.items()}
        base = SimpleNamespace(precision="fp32", device=torch.device("cpu"))
        spec = TrainingSpec(precision="fp32", **training)
        replay = Replay(ReplaySpec(max_grad_ratio=ratio), GeneralSamples((), ()))
        context: Any = SimpleNamespace(name="poet", base=base, training=spec, replay=replay)
        owner: Any = self
        self.updater = Updater(context, owner, of_roles(*roles or ("dense", "router")))

    def described(self) -> dict[str, Parameter]:
        return {n: Parameter(n, ROLES[n], tensor, "zero") for n, tensor in self.all.items()}

    def tensors(self, selects: Selects = lambda _: True) -> dict[str, nn.Parameter]:
        return {name: p.tensor for name, p in self.described().items() if selects(p)}

    def require_grad(self, selects: Selects) -> None:
        for parameter in self.described().values():
            parameter.tensor.requires_grad_(selects(parameter))

    def values(self) -> dict[str, Tensor]:
        return copied(self.all)


def loss_of(parameters: Mapping[str, Tensor], step: int) -> Tensor:
    """Return the loss of a linear model on the batch of a step."""
    chance = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=chance), torch.randn(8, 3, generator=chance)
    predicted = torch.stack([(x @ p).tanh() for p in parameters.values()]).sum(0)
    return (predicted - y).square().mean()


def rate(step: int) -> float:
    return 0.05 / (1 + step)


def work(weights: Weights, steps: range, penalty: Any = None) -> list[float]:
    def update(step: int) -> float:
        loss = lambda: loss_of(weights.all, step)  # noqa: E731
        return weights.updater.update(loss, rate(step), penalty, where=f"at step {step + 1}")

    return [update(step) for step in steps]


@pytest.mark.parametrize("most", [None, 0.05, 1e6])
@pytest.mark.parametrize("penalised", [False, True])
def test_updates_are_torch_s_adamw_on_the_same_loss(most: float | None, penalised: bool) -> None:
    # The loop is that of torch's documentation, with an explicit scaling of the gradient's norm.

    def term(weights: Weights) -> Callable[[], Tensor] | None:
        return (lambda: 0.3 * weights.all["b"].pow(4).sum()) if penalised else None

    own, others = Weights(max_grad_norm=most), Weights()
    adamw = torch.optim.AdamW(others.all.values(), betas=(0.9, 0.95), weight_decay=0.01)
    losses, expected = work(own, range(6), term(own)), []
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
        weights = Weights(optimiser="sgd", max_grad_norm=most)
        before = weights.values()
        weights.updater.update(lambda w=weights: loss_of(w.all, 0) * 10, 1.0, where="at step 1")
        moves[most] = torch.stack([p.detach() - before[n] for n, p in weights.all.items()])
    assert moves[None].norm() > 0.25
    assert torch.equal(moves[None], moves[100.0])
    torch.testing.assert_close(moves[0.25], moves[None] * 0.25 / moves[None].norm())


def test_only_the_roles_are_updated() -> None:
    weights = Weights("router")
    before = weights.values()
    work(weights, range(3))
    moved = {name for name, p in weights.all.items() if not torch.equal(p, before[name])}
    assert moved == {"c"}
    assert all(p.grad is None for p in weights.all.values())
    assert weights.updater.parameters.keys() == {"c"}


@pytest.mark.parametrize("kind", KINDS)
def test_moments_come_back_through_their_bytes(kind: str) -> None:
    weights, fresh = (Weights(optimiser=KINDS[kind]) for _ in range(2))
    work(weights, range(3))
    values, data = weights.values(), weights.updater.state().encode()
    losses = work(weights, range(3, 6))
    after, moments = weights.values(), weights.updater.state().encode()
    for each in (fresh, weights):
        copy(values, each.all)
        each.updater.restore(State.decode(data))
        assert each.updater.state().encode() == data
        assert work(each, range(3, 6)) == losses
        assert equal(each.values(), after)
        assert each.updater.state().encode() == moments


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["reset", "restore"])
def test_what_has_no_moments_starts_afresh(kind: str, way: str) -> None:
    weights, fresh = (Weights(optimiser=KINDS[kind]) for _ in range(2))
    beginning = fresh.updater.state().encode()
    work(weights, range(3))
    if way == "reset":
        weights.updater.reset()
    else:
        weights.updater.restore(State())
    assert weights.updater.state().encode() == beginning
    copy(fresh.all, weights.all)
    assert work(weights, range(3)) == work(fresh, range(3))
    assert equal(weights.values(), fresh.values())


def test_a_state_is_a_copy_grouped_by_kind() -> None:
    # Restored moments overwrite the existing ones.
    weights = Weights()
    updater = weights.updater
    assert updater.state() == State()
    work(weights, range(2))
    state = updater.state()
    assert state.groups.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(group.keys() == weights.all.keys() for group in state.groups.values())
    assert {step.item() for step in state["step"].values()} == {2}
    before = copied(state["exp_avg"])
    places = {n: updater.optimiser.state[p]["exp_avg"].data_ptr() for n, p in weights.all.items()}
    for _ in range(2):
        work(weights, range(2, 4))
        assert equal(state["exp_avg"], before)
        updater.restore(state)
        moments = {n: updater.optimiser.state[p]["exp_avg"] for n, p in weights.all.items()}
        assert equal(moments, before)
        assert {n: tensor.data_ptr() for n, tensor in moments.items()} == places


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_is_a_sentence_and_changes_nothing(value: float | None) -> None:
    # None is a loss in two pieces, of which the later one is not finite.
    weights = Weights()
    updater = weights.updater
    work(weights, range(2))
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
    weights = Weights(micro_batch=micro_batch, store_activations=stores)
    config = SimpleNamespace(**({"quantization_config": {}} if quantised else {}))
    context: Any = weights.updater.context
    context.window, context.base.model = 16, SimpleNamespace(config=config)

    def full() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pieces = [Piece(lambda: loss_of(weights.all, 2), 1), Piece(full, 1)]
    with pytest.raises(CoterieError) as error:
        weights.updater.update(pieces, 0.1, where="at step 3")
    assert str(error.value) == f"The GPU has too little memory for a training step; set {helps}."
    assert all(parameter.grad is None for parameter in weights.all.values())


def test_pieces_weigh_by_their_tokens_and_the_penalty_counts_once() -> None:
    # A step of SGD at rate 1 moves the weights by the gradient itself.

    def moved(loss: Any) -> dict[str, Tensor]:
        weights = Weights(optimiser="sgd")
        before = weights.values()
        penalty = lambda: 0.3 * weights.all["b"].pow(4).sum()  # noqa: E731
        value = weights.updater.update(loss(weights), 1.0, penalty, where="at step 1")
        assert value == pytest.approx((3 * first + 5 * second) / 8)
        return {n: p.detach() - before[n] for n, p in weights.all.items()}

    first, second = (loss_of(Weights().all, step).item() for step in (0, 1))
    whole = moved(lambda w: lambda: (3 * loss_of(w.all, 0) + 5 * loss_of(w.all, 1)) / 8)
    parts = ((0, 3), (1, 5))
    pieces = moved(lambda w: [Piece(lambda s=s: loss_of(w.all, s), n) for s, n in parts])
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_go_where_their_parameters_are(kind: str) -> None:
    # The meta device stands for a GPU; the loaded state is on the CPU.
    weights, moved = (Weights(optimiser=KINDS[kind], device=d) for d in ("cpu", "meta"))
    work(weights, range(2))
    moved.updater.restore(weights.updater.state())
    both = (weights, moved)
    states, restored = ([w.updater.optimiser.state[p] for p in w.all.values()] for w in both)
    assert [*map(len, states)] == [*map(len, restored)]
    for state in restored:
        wrong = {k for k, t in state.items() if t.device.type != ("cpu" if k == "step" else "meta")}
        assert not wrong


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_parameters_with_targets_are_pulled_after_the_step(optimiser: str) -> None:
    own, others = (Weights(optimiser=optimiser, max_grad_norm=0.05) for _ in range(2))
    b, c = torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.float64)
    pull = lambda: (2.0, {"b": b, "c": c, "of another level": b})  # noqa: E731
    for step in range(3):
        work(others, range(step, step + 1))
        for name, target in (("b", b), ("c", c.float())):
            x = others.all[name]
            x.data = x.data - rate(step) * 2.0 * (x.data - target)
        loss = lambda step=step: loss_of(own.all, step)  # noqa: E731
        own.updater.update(loss, rate(step), pull=pull, where="")
        for name, x in others.all.items():
            torch.testing.assert_close(own.all[name], x, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in own.all.values())


@pytest.mark.parametrize("eta", [1e-2, 1e-3])
def test_a_pull_is_to_first_order_a_penalty_of_gradient_descent(eta: float) -> None:
    # The difference is eta^2 strength times the gradient.
    pulled, penalised = (Weights(optimiser="sgd", max_grad_norm=None) for _ in range(2))
    first, target = gradients(pulled, 0), torch.ones(4, 3)
    term = lambda: 1.5 / 2 * (penalised.all["b"] - target).square().sum()  # noqa: E731
    pulled.updater.update(
        lambda: loss_of(pulled.all, 0), eta, pull=lambda: (1.5, {"b": target}), where=""
    )
    penalised.updater.update(lambda: loss_of(penalised.all, 0), eta, term, where="")
    for name, x in pulled.values().items():
        expected = eta**2 * 1.5 * first[name] * (name == "b")
        torch.testing.assert_close(x - penalised.values()[name], expected, rtol=0.1, atol=3e-7)


def test_a_pull_moves_parameters_at_most_to_their_targets() -> None:
    weights, target = Weights("dense"), torch.ones(4, 3)
    before = weights.values()
    targets = {"a": target, "c": target}
    loss = lambda: loss_of(weights.all, 0)  # noqa: E731
    weights.updater.update(loss, 0.1, pull=lambda: (30.0, targets), where="")
    assert torch.equal(weights.all["a"], target)
    assert torch.equal(weights.all["c"], before["c"])  # not selected


def gradients(weights: Weights, step: int) -> dict[str, Tensor]:
    tensors = weights.tensors()
    loss = loss_of(tensors, step)
    return dict(zip(tensors, torch.autograd.grad(loss, [*tensors.values()]), strict=True))


def norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()


@pytest.mark.parametrize("ratio", [0.2, 100])
def test_the_gradient_of_a_second_loss_is_shortened_and_added(ratio: float) -> None:
    weights = Weights(learning_rate=0.1, optimiser="sgd", ratio=ratio)
    before, first = weights.values(), gradients(weights, 0)
    parts = [gradients(weights, step) for step in (1, 2)]
    second = {name: 0.75 * parts[0][name] + 0.25 * parts[1][name] for name in first}
    factor = min(1, ratio * norm(first) / norm(second))
    assert (factor < 1) == (ratio < 1)
    pieces = [Piece(lambda n=n: loss_of(weights.all, n), terms) for n, terms in ((1, 3), (2, 1))]
    loss = weights.updater.update(lambda: loss_of(weights.all, 0), 0.1, where="", beside=pieces)
    assert loss == pytest.approx(loss_of(before, 0).item())
    for name, tensor in weights.values().items():
        step = first[name] + factor * second[name]
        torch.testing.assert_close(tensor, before[name] - 0.1 * step)


def test_gradients_that_other_updates_left_are_not_shortened() -> None:
    weights = Weights(learning_rate=0.1, optimiser="sgd")
    before, left, first = weights.values(), gradients(weights, 3), gradients(weights, 0)
    second = gradients(weights, 1)
    for name, tensor in weights.tensors().items():
        tensor.grad = left[name].clone()
    own = {name: left[name] + first[name] for name in left}
    factor = min(1, norm(own) / norm(second))
    beside = [Piece(lambda: loss_of(weights.all, 1), 1)]
    weights.updater.update(lambda: loss_of(weights.all, 0), 0.1, where="", beside=beside)
    for name, tensor in weights.values().items():
        step = own[name] + factor * second[name]
        torch.testing.assert_close(tensor, before[name] - 0.1 * step)


def test_gradients_that_only_a_second_loss_has_count_in_its_norm() -> None:
    weights = Weights(learning_rate=0.1, optimiser="sgd", ratio=0.2)
    before = weights.values()
    first = {name: g for name, g in gradients(weights, 0).items() if name != "c"}
    second = {name: 5 * gradient for name, gradient in gradients(weights, 1).items()}

    def without_c() -> Tensor:
        return loss_of({**weights.all, "c": weights.all["c"].detach()}, 0)

    beside = [Piece(lambda: 5 * loss_of(weights.all, 1), 1)]
    weights.updater.update(without_c, 0.1, where="", beside=beside)
    factor = 0.2 * norm(first) / norm(second)
    for name, tensor in weights.values().items():
        step = factor * second[name] + first.get(name, 0)
        torch.testing.assert_close(tensor, before[name] - 0.1 * step)


def test_a_second_loss_that_is_not_finite_changes_nothing() -> None:
    weights = Weights()
    before = weights.values()
    beside = [Piece(lambda: loss_of(weights.all, 1) * math.inf, 1)]
    with pytest.raises(CoterieError, match="not finite"):
        weights.updater.update(lambda: loss_of(weights.all, 0), 0.1, where="", beside=beside)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.values().items())
