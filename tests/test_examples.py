"""The methods in examples/, each a file outside the package, keep the contract."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from coterie import CoterieError
from coterie.config.plugins import load_plugin
from coterie.data.windows import sample_batch
from coterie.engines.session import Session
from coterie.losses.tokens import Batch, language_model_loss
from coterie.methods.adapter import copied
from coterie.seeding import generator
from coterie.testing import MethodContract
from coterie.testing.rounds import joined, one_round
from coterie.training.schedule import learning_rate

EXAMPLES = Path(__file__).parents[1] / "examples"
[FedSALora] = load_plugin(EXAMPLES / "fedsa_lora.py")
[Scaffold] = load_plugin(EXAMPLES / "scaffold.py")
[Alternating] = load_plugin(EXAMPLES / "alternating.py")
SGD = {"steps": 2, "batch": 2, "precision": "fp32", "optimiser": "sgd", "learning_rate": 0.5}


@pytest.mark.slow
class TestFedSALora(MethodContract):
    method = FedSALora()


class TestScaffold(MethodContract):
    method = Scaffold()
    changes: ClassVar[dict[str, Any]] = {"training": SGD}


class TestAlternating(MethodContract):
    method = Alternating()


def test_one_factor_is_trained_and_sent_in_a_round(config) -> None:
    local: Any = joined(config(method=Alternating()))
    for round, factor in enumerate("BAB"):
        client, before = local.clients["poet"], copied(local.server.shared)
        uploads = one_round(local, round)
        assert {name.rsplit(".", 1)[1] for name in uploads["poet"]["adapter"]} == {factor}
        after = client.adapter.parameters()
        assert {n.rsplit(".", 1)[1] for n, t in before.items() if not t.equal(after[n])} == {factor}
        for name, tensor in local.server.shared.items():
            uploaded = [upload["adapter"].get(name, before[name]) for upload in uploads.values()]
            torch.testing.assert_close(tensor, sum(uploaded) / len(uploaded))


@pytest.mark.parametrize(
    ("name", "lines"), [("fedsa_lora", 30), ("alternating", 70), ("scaffold", 80)]
)
def test_an_example_is_short(name, lines) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= lines


def test_a_travels_and_b_stays(config) -> None:
    local = joined(config(method=FedSALora(), rounds=1))
    uploads = one_round(local, 0)
    sent = {name.rsplit(".", 1)[1] for name in uploads["poet"]["adapter"]}
    assert sent == {"A"}


def test_scaffold_is_algorithm_1(config) -> None:
    """Two rounds, of which one client misses the second, against the paper's algorithm."""
    local: Any = joined(config(method=Scaffold(), training=SGD))
    names = sorted(local.clients)
    x = {n: t.clone() for n, t in local.server.shared.items()}
    c = {n: torch.zeros_like(t) for n, t in x.items()}
    own = {name: {n: torch.zeros_like(t) for n, t in x.items()} for name in names}
    for round, present in enumerate((names, names[1:])):
        ends, changes = {}, {}
        for name in present:
            ends[name], gradients = _descent(local, name, round, x, c, own[name])
            changes[name] = {n: gradients[n] - own[name][n] for n in x}
            own[name] = gradients
        one_round(local, round, present)
        x = {n: sum(ends[name][n] for name in present) / len(present) for n in x}
        c = {n: c[n] + sum(changes[name][n] for name in present) / len(names) for n in x}
        for n in x:
            torch.testing.assert_close(local.server.shared[n], x[n], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(local.server.kept["control"][n], c[n], rtol=1e-3, atol=1e-6)
    assert any(change.abs().max() > 1e-4 for change in c.values())


def _descent(local, name, round, x, c, c_i):
    """Where plain corrected descent from x ends, and the mean gradient on the way."""
    client = local.clients[name]
    context, adapter = client.context, client.adapter
    before = client.state()
    model = adapter.attach(context.base.model)
    y = dict(client.shared)
    with torch.no_grad():
        for n, p in y.items():
            p.copy_(x[n])
    adapter.require_grad("dense", "generalist")
    rate, total = learning_rate(context.training, context.rounds), 0.0
    mean = {n: torch.zeros_like(t) for n, t in x.items()}
    for step in range(2 * round, 2 * round + 2):
        chance = generator(context.seed, "batch", name, "joint", step, 0)
        batch = sample_batch(context.data.train, 2, context.window, chance)
        assert isinstance(batch, Batch)
        loss = language_model_loss(model, *batch)
        gradients = torch.autograd.grad(loss, list(y.values()))
        total += rate(step)
        with torch.no_grad():
            for (n, p), g in zip(y.items(), gradients, strict=True):
                mean[n] += rate(step) * g
                p -= rate(step) * (g + c[n] - c_i[n])
    ends = {n: p.detach().clone() for n, p in y.items()}
    client.restore(before)
    return ends, {n: t / total for n, t in mean.items()}


def test_scaffold_refuses_another_optimiser(config) -> None:
    run = config(method=Scaffold())
    with pytest.raises(CoterieError, match=r"set training\.optimiser=sgd"):
        Session(run).check(run)
