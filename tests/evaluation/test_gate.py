"""Gates: how they are fitted, which prompts they accept, and who answers."""

from typing import Any

import pytest
import torch
from tensors import fill
from torch import Tensor

from coterie.adapters import Adapter, attached
from coterie.adapters.layout import Layout
from coterie.bases import Base, load_base
from coterie.data.chat import chat_template
from coterie.errors import CoterieError
from coterie.evaluation import gate as module
from coterie.evaluation.answers import answer_losses
from coterie.evaluation.evaluate import ModelScorer
from coterie.evaluation.gate import Gate, answering, gated_answers, prompt_states
from coterie.evaluation.generation import generate_answers
from coterie.inference.questions import encoded, in_form
from coterie.messages import MessageError, State
from coterie.methods.pretrained import bare


def kinds(distance: float, count: int = 30, spread: float = 1) -> list[Tensor]:
    """Return states of training, validation and general prompts, whose means are apart."""
    chance = torch.Generator().manual_seed(1)
    shift = distance * torch.eye(6, dtype=torch.float64)[0]
    rows = [torch.randn(n, 6, generator=chance).double() for n in (count, 9, 2 * count)]
    return [rows[0] + shift, spread * rows[1] + shift / 2, rows[2]]


def naive_weights(states: Tensor, target: Tensor, share: Tensor, penalty: float) -> Tensor:
    """Return the weights of a ridge regression, by a step of Newton's method."""
    w = torch.zeros(states.shape[1]).double().requires_grad_()
    loss = (share * (target - states @ w) ** 2).sum() + penalty * w.square().sum()
    [first] = torch.autograd.grad(loss, w, create_graph=True)
    second = torch.stack([torch.autograd.grad(g, w, retain_graph=True)[0] for g in first])
    return torch.linalg.solve(second, -first.detach())


@pytest.mark.parametrize(
    ("deviations", "spread"),  # the spread of validation prompts
    [(2, 1), (2, 0.1), (100, 1)],
)
def test_a_gate_is_a_ridge_regression(deviations, spread, monkeypatch) -> None:
    monkeypatch.setattr(module, "DEVIATIONS", deviations)
    kind = kinds(8, spread=spread)
    gate = Gate.fitted(*kind)
    assert gate is not None
    states = torch.cat(kind)
    share = torch.tensor([0.25 / 30] * 30 + [0.25 / 9] * 9 + [0.5 / 60] * 60, dtype=torch.float64)
    mean, scale = (share[:, None] * states).sum(0), states.std(0)
    z = (states - mean) / scale
    target = torch.tensor([1.0] * 39 + [-1.0] * 60).double()
    penalty = module.PENALTY * float((share * z.square().sum(1)).mean())
    naive = naive_weights(z, target, share, penalty)
    torch.testing.assert_close(gate.weights, naive / scale, rtol=1e-9, atol=1e-12)
    scores = []
    for number, row in enumerate(z):
        others = [n for n in range(99) if n != number]
        without = naive_weights(z[others], target[others], share[others], penalty)
        scores.append(float(row @ without))
    train, own, general = torch.tensor(scores).double().split([30, 9, 60])
    assert (own.std() > train.std()) == (spread == 1)
    low = float(own.mean() - deviations * max(own.std(), train.std()))
    least = float(general.mean() + general.std())
    assert (low > least) == (deviations == 2)
    assert gate.threshold - float(mean @ gate.weights) == pytest.approx(max(low, least))


@pytest.mark.parametrize(("distance", "count"), [(0.1, 30), (-8, 30), (8, 1)])
def test_kinds_that_cannot_be_told_apart_have_no_gate(distance, count) -> None:
    train, validation, general = kinds(distance, count)
    if distance < 0:  # the validation prompts are like general ones
        validation, general = general[:9], general[9:]
    assert Gate.fitted(train, validation, general) is None


def test_the_margin_decides_whether_there_is_a_gate(monkeypatch) -> None:
    states = kinds(6)
    monkeypatch.setattr(module, "MARGIN", 100)
    assert Gate.fitted(*states) is None
    monkeypatch.setattr(module, "MARGIN", 0)
    assert Gate.fitted(*states) is not None


def test_a_gate_is_restored_or_refused() -> None:
    base = load_base("tiny-gpt2", "fp32", 8)
    weights = torch.arange(2 * base.model.config.hidden_size).double()
    gate = Gate(weights, 0.5)
    restored = Gate.restored(State.decode(gate.state().encode()), base)
    assert restored is not None
    assert restored.digest == gate.digest != Gate(weights, 0.25).digest
    assert Gate.restored(None, base) is None
    for damaged, error in (
        (Gate(weights[1:], 0.5).state(), MessageError),
        (Gate(weights / 0, 0.5).state(), CoterieError),
        (State(gate.state().groups, {"threshold": "much"}), CoterieError),
        (State(), MessageError),
    ):
        with pytest.raises(error):
            Gate.restored(damaged, base)


class Sea:
    """A gate that accepts prompts with the word Sea."""

    def accepts(self, base: Base, prompts: Any) -> list[bool]:
        return ["Sea" in str(base.tokenizer.decode(prompt)) for prompt in prompts]


SEA: Any = Sea()
TEXTS = ("Who?", "Sea, which", "Where is it, then?", "The Sea")


@pytest.fixture
def adapted() -> tuple[Base, Any, Any, Adapter]:
    """A base, its model with an adapter, conversations, and the adapter."""
    base = load_base("tiny-gpt2", "fp32", 40)
    adapter = Adapter(base.model, Layout(), seed=0, client="ada", common=lambda _: False)
    fill(adapter.tensors(), 0.2, 5)
    model = adapter.attach(base.model)
    template = chat_template(base.tokenizer, None)
    data: Any = None
    return base, model, encoded(base, in_form(data, template, TEXTS), template), adapter


def test_states_are_those_of_the_base_alone(adapted) -> None:
    base, model, rows, adapter = adapted
    prompts = rows.prompts(base)
    states = prompt_states(base, prompts)
    assert attached(base.model) is adapter
    assert states.dtype == torch.float64
    ids = prompts[2][None]
    adapted_state = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    for state, prompt in zip(states, prompts, strict=True):
        with torch.no_grad():
            hidden = bare(base)(prompt[None], output_hidden_states=True).hidden_states[-1][0]
        expected = torch.cat([hidden.mean(0), hidden[-1]])
        torch.testing.assert_close(state.float(), expected, rtol=1e-4, atol=1e-4)
    assert (adapted_state - states[2][len(adapted_state) :]).abs().max() > 0.1
    weights = states[1] - states[0]
    middle = float((states[:2] @ weights).mean())
    assert Gate(weights, middle).accepts(base, prompts[:2]) == [False, True]


def test_the_base_answers_what_a_gate_does_not_accept(adapted) -> None:
    base, model, rows, adapter = adapted
    own, nats = generate_answers(base, model, rows, 5, 4), answer_losses(base, model, rows, 4)
    assert gated_answers(None, base, model, rows, 5, 4) == own
    mixed = gated_answers(SEA, base, model, rows, 5, 4)
    scorer = ModelScorer(base, model, 40, 4, generate=5, gate=SEA)
    losses = scorer.losses(rows, 4)
    assert scorer.texts(rows) == mixed
    prompts = rows.prompts(base)
    for prompt, of_base in ((prompts[0], True), (prompts[1], False)):
        with answering(SEA, base, model, prompt):
            assert (attached(base.model) is None) == of_base
    assert attached(base.model) is adapter
    untrained = bare(base)
    general = generate_answers(base, untrained, rows, 5, 4)
    assert own[0] != general[0]
    assert own[1] != general[1]
    assert mixed == [general[0], own[1], general[2], own[3]]
    base_nats = answer_losses(base, untrained, rows, 4)
    expected = torch.stack([base_nats[0], nats[1], base_nats[2], nats[3]])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
