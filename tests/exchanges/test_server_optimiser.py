"""Server optimisers against the papers' algorithms, written out number by number; and in runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from both_ends import exchange_of
from tensors import close_to, mean_of
from torch import Tensor

import coterie
from coterie import CoterieError
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.engines.session import Session
from coterie.exchanges.codec import EXCHANGE
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.mean import weighted_mean
from coterie.exchanges.optimiser import stepped
from coterie.exchanges.spec import AggregationSpec, ServerOptimiserSpec
from coterie.messages import Field, Message, Schema, State, Tensors
from coterie.methods.adapter import AdapterServer
from coterie.methods.averaging import FedAvg
from coterie.runs import RunFolder
from coterie.testing.rounds import joined, one_round
from coterie.transforms.context import Contribution, Memory
from coterie.turn import Turn

FIELD = Field("adapter", "pairs", reduce="mean")
SPECS: dict[str, dict[str, Any]] = {
    "fedavgm": {"name": "fedavgm", "momentum": 0.8, "learning_rate": 0.5},
    "fedavgm, plain": {"name": "fedavgm"},
    "fedadagrad": {"name": "fedadagrad", "momentum": 0.0, "tau": 0.01, "learning_rate": 0.3},
    "fedyogi": {"name": "fedyogi", "momentum": 0.7, "beta2": 0.6, "tau": 0.1},
    "fedadam": {"name": "fedadam", "momentum": 0.7, "beta2": 0.6, "tau": 0.1, "learning_rate": 2},
    "fedadam, plain": {"name": "fedadam"},
}
SMALL: dict[str, Any] = {"name": "fedavg", "mlp": {"rank": 2, "sets": 1}, "attention": None}
EXAMPLES = Path(__file__).parents[2] / "examples"


class Paper:
    """One number x on a server. Algorithm 2 of arXiv 2003.00295; for fedavgm arXiv 1909.06335."""

    def __init__(self, x: float, name: str, **given: float) -> None:
        self.x, self.name = x, name
        self.eta = given.get("learning_rate", 1.0 if name == "fedavgm" else 0.01)
        self.beta, self.beta2 = given.get("momentum", 0.9), given.get("beta2", 0.99)
        self.tau = given.get("tau", 1e-3)
        self.m, self.v = 0.0, self.tau**2

    def round(self, ends: list[float], weights: list[float]) -> None:
        """Update the parameters from the ends of clients' trainings."""
        total = sum(weights)
        delta = sum(w / total * (end - self.x) for end, w in zip(ends, weights, strict=True))
        if self.name == "fedavgm":
            self.m = self.beta * self.m + delta
            self.x += self.eta * self.m
            return
        self.m = self.beta * self.m + (1 - self.beta) * delta
        if self.name == "fedadagrad":
            self.v = self.v + delta**2
        elif self.name == "fedyogi":
            sign = (self.v > delta**2) - (self.v < delta**2)
            self.v = self.v - (1 - self.beta2) * delta**2 * sign
        else:
            self.v = self.beta2 * self.v + (1 - self.beta2) * delta**2
        self.x += self.eta * self.m / (math.sqrt(self.v) + self.tau)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_is_the_papers_algorithm(spec: dict[str, Any]) -> None:
    # Of three clients with different weights, one is absent in some of the eight rounds. Moments
    # are saved and restored after each round.
    chance = torch.Generator().manual_seed(0)
    optimiser, memory = ServerOptimiserSpec.model_validate(spec), Memory()
    x = torch.randn(5, generator=chance)
    papers = [Paper(value, **spec) for value in x.tolist()]
    for round in range(8):
        present = (0, 1, 2) if round % 3 else (0, 2)
        ends = {k: x + torch.randn(5, generator=chance) for k in present}
        each = [Contribution(str(k), {"adapter": {"x": ends[k]}}, float(k + 1)) for k in ends]
        mean = weighted_mean(each)["adapter"]
        x = stepped(optimiser, "adapter", mean, {"x": x}, memory)["x"]
        memory = Memory.of(State.decode(memory.state().encode()))
        assert x.dtype == torch.float32
        for i, paper in enumerate(papers):
            paper.round([end[i].item() for end in ends.values()], [k + 1.0 for k in ends])
        expected = torch.tensor([paper.x for paper in papers])
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_only_what_replaces_parameters_is_stepped_and_what_nobody_held_waits() -> None:
    optimiser, memory = ServerOptimiserSpec(name="fedavgm", momentum=0.5), Memory()
    ones = torch.ones(2)
    start = {"a": ones, "b": ones}

    def step(mean: Tensors) -> dict[str, Tensor]:
        return stepped(optimiser, "adapter", mean, start, memory)

    after = step({"a": 2 * ones, "b": 3 * ones, "statistic": 9 * ones})
    assert torch.equal(after["statistic"], 9 * ones)
    assert torch.equal(after["b"], 3 * ones)
    after = step({"a": 2 * ones})
    assert after.keys() == {"a"}
    assert torch.equal(after["a"], 2.5 * ones)  # 1 + 0.5 * 1 + 1
    assert torch.equal(step({"b": ones})["b"], 2 * ones)  # 1 + 0.5 * 2 + 0: as in the round after
    assert torch.equal(ones, torch.ones(2))


def test_an_exchange_steps_once_and_a_repeated_one_from_equal_moments() -> None:
    rules = AggregationSpec(optimiser=ServerOptimiserSpec(name="fedavgm", momentum=0.5))
    exchange, start = exchange_of(Schema(up=(FIELD,)), rules=rules), {"x": torch.zeros(2)}
    for number, expected in enumerate((1.0, 1.5, 1.75)):  # 1 + 0.5 + 0.25
        exchange.open(Turn(number, number, number), ["ada"])
        exchange.begin()
        exchange.put("ada", Message(0, {"adapter": {"x": torch.ones(2)}}), lambda *_: {})
        for _ in range(2):
            exchange.repeat()
            exchange.settle()
            for _ in range(2):
                assert torch.equal(exchange.mean("adapter", start)["x"], expected * torch.ones(2))
        exchange.transforms.commit(["ada"])


def run_with(config: Any, optimiser: Any = "fedyogi", **changes: Any) -> coterie.RunConfig:
    limits = {"train": 600, "validation": 100, "test": 34}
    small = {"method": SMALL, "data": {"window": 16, "limits": limits}}
    return config(**small | {"aggregation": {"optimiser": optimiser}} | changes)


@pytest.mark.parametrize("method", [SMALL, {"name": "fedamole", "attention": {"rank": 2}}],
                         ids=["fedavg", "fedamole"])  # fmt: skip
def test_rounds_of_a_method(config, method) -> None:
    # With FedAvgM, each tensor has its momentum, from the first values that all clients share.
    optimiser = {"name": "fedavgm", "learning_rate": 0.5}
    sides: Any = joined(run_with(config, optimiser, method=method))
    x = {n: t.double().clone() for n, t in sides.value.adapter.items()}
    m = {n: torch.zeros_like(t) for n, t in x.items()}
    for round in range(3):
        for n, mean in mean_of(u["adapter"] for u in one_round(sides, round).values()).items():
            m[n] = 0.9 * m[n] + mean - x[n]
            x[n] = x[n] + 0.5 * m[n]
        for n, tensor in sides.value.adapter.items():
            torch.testing.assert_close(tensor.double(), x[n], rtol=1e-5, atol=1e-7)
    assert any(tensor.abs().max() > 1e-4 for tensor in m.values())


def test_control_variates_stay_a_plain_mean(config) -> None:
    [scaffold] = load_plugin(EXAMPLES / "scaffold.py")
    training = {"steps": 2, "batch": 2, "precision": "fp32", "optimiser": "sgd"}
    sides: Any = joined(run_with(config, method=scaffold(), training=training))
    change = mean_of(u["change"] for u in one_round(sides, 0).values())
    assert close_to(sides.value.control, change, atol=1e-8)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("local", "with the method 'local', whose server computes no mean over all clients"),
        ("pcl-2", "has no effect with the method 'pcl-2'"),
        ({"name": "hetlora", "attention": None}, "because no parameter is replaced by a mean"),
        ({"name": "flexlora", "attention": None}, "because no parameter is replaced by a mean"),
        ("fdlora", "'fdlora' has a server optimiser of its own"),
        ({"name": "fedavg", "exact": True}, "`exact: true` and aggregation.optimiser are incomp"),
    ],
)
def test_where_it_cannot_act_it_is_refused(config, method, sentence) -> None:
    run = run_with(config, method=method)
    with pytest.raises(CoterieError) as error:
        Session(run).check(run)
    assert sentence in str(error.value)


class Forgetful(FedAvg):
    """Its server does not say which parameters a mean replaces."""

    name: ClassVar[str] = "forgetful"
    summary: ClassVar[str] = "forgetful"

    def server(self, context: Any) -> Any:
        class Forgetting(AdapterServer):
            def aggregate(self, value: Any, exchange: Exchange) -> Any:
                return replace(value, adapter={**value.adapter, **exchange.mean("adapter")})

        return Forgetting(self, context)


def test_where_nothing_is_replaced_it_is_refused(config) -> None:
    sides = joined(run_with(config, method=Forgetful()))
    before = sides.value
    with pytest.raises(CoterieError, match="server replaces none of its parameters"):
        one_round(sides, 0)
    assert sides.value is before


@pytest.mark.parametrize(
    ("optimiser", "sentence"),
    [
        ("fedadm", "aggregation.optimiser should be 'fedavgm', 'fedadam', 'fedyogi' or"),
        ({"name": "fedavgm", "tau": 0.1}, "tau has no effect with fedavgm; remove it"),
        ({"name": "fedadagrad", "beta2": 0.5}, "beta2 has no effect with fedadagrad"),
        ({"name": "fedadam", "beta3": 0.5}, "Did you mean 'aggregation.optimiser.beta2'?"),
        ({"momentum": 0.5}, "aggregation.optimiser.name is missing"),
    ],
)
def test_a_wrong_setting_is_one_sentence(values, optimiser, sentence) -> None:
    with pytest.raises(CoterieError) as error:
        parse(values(aggregation={"optimiser": optimiser}))
    assert sentence in str(error.value)


def test_compared_methods_without_a_mean_have_no_server_optimiser(config) -> None:
    run = run_with(config, "fedadam")
    assert run.with_method("fedprox").aggregation == run.aggregation
    for name in ("local", "pretrained", "pcl-2", "centralized"):
        assert run.with_method(name).aggregation == AggregationSpec()
    assert parse(run.as_dict()) == run


def test_exchanges_without_a_mean_are_not_refused(teachers, tmp_path) -> None:
    # FedMKT-FedAvg averages adapters in every second exchange.
    method, aggregation = {"name": "fedmkt-fedavg"}, {"optimiser": "fedadam"}
    run = teachers(rounds=1, method=method, aggregation=aggregation)
    done = coterie.run(run, out=tmp_path / "run")
    assert RunFolder(done.path).load("transforms").parts["own"].parts[EXCHANGE]["m.adapter"]
