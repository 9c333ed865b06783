"""The methods in examples/ keep the contract; SCAFFOLD and RoLoRA against their algorithms."""

import runpy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import coterie
from coterie import CoterieError
from coterie.adapters import of_roles
from coterie.config.plugins import load_plugin
from coterie.data.windows import sample_batch
from coterie.engines.session import Session
from coterie.losses.tokens import Batch, language_model_loss
from coterie.runs import RunFolder
from coterie.seeding import generator
from coterie.testing import MethodContract
from coterie.testing.rounds import joined, one_round
from coterie.training import local
from coterie.training.schedule import learning_rate

EXAMPLES = Path(__file__).parents[1] / "examples"
fedavg = runpy.run_path(str(EXAMPLES / "fedavg_loop.py"))["fedavg"]
[FedSALora] = load_plugin(EXAMPLES / "fedsa_lora.py")
[Scaffold] = load_plugin(EXAMPLES / "scaffold.py")
SGD = {"steps": 2, "batch": 2, "precision": "fp32", "optimiser": "sgd", "learning_rate": 0.5}


@pytest.mark.slow
class TestFedSALora(MethodContract):
    method = FedSALora()


class TestScaffold(MethodContract):
    method = Scaffold()
    changes: ClassVar[dict[str, Any]] = {"training": SGD}


def test_rolora_trains_and_averages_one_factor_in_turn(config) -> None:
    sides: Any = joined(config(method="rolora", training=SGD))
    names = sorted(sides.clients)
    x, turn = {n: t.clone() for n, t in sides.value.adapter.items()}, set()
    for round, factor in enumerate("BAB"):
        turn = {n for n, p in sides.server.parameters.items() if p.factor == factor}
        zero = {n: torch.zeros_like(x[n]) for n in turn}
        ends = [_descent(sides, n, round, x, zero, zero, factor)[0] for n in names]
        assert one_round(sides, round)["poet"]["adapter"].keys() == turn
        for name, tensor in sides.value.adapter.items():
            if name in turn:
                x[name] = sum(end[name] for end in ends) / len(ends)
            torch.testing.assert_close(tensor, x[name], rtol=1e-4, atol=1e-6)
    assert len(turn) == len(x) / 2


def test_a_level_continues_its_epoch_in_its_next_exchange(config, monkeypatch) -> None:
    run = joined(config(method="rolora", training={**SGD, "sampling": "epochs"}))
    drawn: dict[str, list[int]] = {"B": [], "A": []}
    original = local.epoch_batch

    def recorded(tokens, batch, window, number, chance):
        drawn[chance.args[-1]].append(number)
        return original(tokens, batch, window, number, chance)

    monkeypatch.setattr(local, "epoch_batch", recorded)
    for exchange in range(3):
        one_round(run, exchange, ["poet"])
    assert drawn == {"B": [0, 1, 2, 3], "A": [0, 1]}


@pytest.mark.parametrize(
    ("name", "lines"), [("fedsa_lora", 30), ("fedavg_loop", 50), ("scaffold", 85)]
)
def test_an_example_is_short(name, lines) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= lines


def test_the_loop_by_hand_ends_in_the_bits_of_a_run(config, tmp_path) -> None:
    run = config(method="fedavg")
    folder = RunFolder(coterie.run(run, out=tmp_path / "run").path)
    for name, client in fedavg(run).items():
        ended = folder.load(f"client-{name}")["adapter"]
        shared = client.state()["adapter"]
        assert shared.keys() == ended.keys()
        assert all(torch.equal(tensor, ended[n]) for n, tensor in shared.items())


def test_a_travels_and_b_stays(config) -> None:
    uploads = one_round(joined(config(method=FedSALora(), rounds=1)), 0)
    assert {name.rsplit(".", 1)[1] for name in uploads["poet"]["adapter"]} == {"A"}


def test_scaffold_is_algorithm_1(config) -> None:
    """Compare two rounds with the paper's algorithm; one client misses the second."""
    sides: Any = joined(config(method=Scaffold(), training=SGD))
    names = sorted(sides.clients)
    x = {n: t.clone() for n, t in sides.value.adapter.items()}
    c = {n: torch.zeros_like(t) for n, t in x.items()}
    own = {name: {n: torch.zeros_like(t) for n, t in x.items()} for name in names}
    for round, present in enumerate((names, names[1:])):
        ends, changes = {}, {}
        for name in present:
            ends[name], gradients = _descent(sides, name, round, x, c, own[name])
            changes[name] = {n: gradients[n] - own[name][n] for n in x}
            own[name] = gradients
        one_round(sides, round, present)
        x = {n: sum(ends[name][n] for name in present) / len(present) for n in x}
        c = {n: c[n] + sum(changes[name][n] for name in present) / len(names) for n in x}
        for n in x:
            torch.testing.assert_close(sides.value.adapter[n], x[n], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(sides.value.control[n], c[n], rtol=1e-3, atol=1e-6)
    assert any(change.abs().max() > 1e-4 for change in c.values())


def _descent(sides, name, round, x, c, c_i, level="joint"):
    """Return the end of plain corrected descent from x, and the mean gradient of its steps.

    Parameters without a correction are not trained.
    """
    client = sides.clients[name]
    context, adapter = client.context, client.adapter
    before = client.state()
    model = adapter.attach(context.base.model)
    with torch.no_grad():
        for n, p in client.shared.items():
            p.copy_(x[n])
    y = {n: p for n, p in client.shared.items() if n in c}
    adapter.require_grad(of_roles("dense", "generalist"))
    rate, total = learning_rate(context.training, context.rounds), 0.0
    mean = {n: torch.zeros_like(t) for n, t in y.items()}
    for step in range(2 * round, 2 * round + 2):
        chance = generator(context.seed, "batch", name, level, step, 0)
        batch = sample_batch(context.data.train, 2, context.window, chance)
        assert isinstance(batch, Batch)
        gradients = torch.autograd.grad(language_model_loss(model, *batch), list(y.values()))
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
