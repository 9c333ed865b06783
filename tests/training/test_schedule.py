"""The bi-level schedule: which parameters move on which text, and when."""

import math
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

import coterie
from coterie.adapters import of_roles
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.losses import tokens as losses
from coterie.runs import RunFolder
from coterie.training.schedule import Level, learning_rate, learning_rate_beside
from coterie.training.spec import TrainingSpec


def test_router_phases_follow_the_steps_of_the_run(config, tmp_path) -> None:
    run = config(method={"name": "comigs-1g1s", "router": {"every": 3, "steps": 2}}, rounds=3)
    session = Session(run)
    folder = RunFolder.create(tmp_path / "run", session.description(run, session.participants(run)))
    local_run(run, session.base, session.participants(run), folder).run()
    lines = [(line["name"], line) for line in folder.metrics()]
    poet = [(name, line["round"]) for name, line in lines if line["client"] == "poet"]
    names = [(round, name) for name, round in poet if name.startswith("loss/")]
    weights = [line["value"] for name, line in lines if name.startswith("routing/")]
    assert len(weights) == 3 * 3 * 2  # rounds, clients, layers
    assert all(len(w) == 2 and sum(w) == pytest.approx(1, abs=1e-5) for w in weights)
    e, r = "loss/experts", "loss/routers"  # steps 1 2 | 3 r r 4 | 5 6 r r
    assert names == [
        *[(0, e), (0, e)],
        *[(1, e), (1, r), (1, r), (1, e)],
        *[(2, e), (2, e), (2, r), (2, r)],
    ]


def test_a_loss_that_is_not_finite_is_one_sentence(config, tmp_path, monkeypatch) -> None:
    def broken(*batch):
        return original(*batch) * float("nan")

    original = losses.language_model_loss
    monkeypatch.setattr(losses, "language_model_loss", broken)
    why = r"^No client is left in round 1: the loss of 'diarist' is not finite at step 1; a lower "
    with pytest.raises(coterie.CoterieError, match=why):
        coterie.run(config(), out=tmp_path / "run")


def torch_rates(kind: Any, steps: int, **settings: Any) -> list[float]:
    """Return the learning rates that a scheduler of torch sets, step by step."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-3)
    scheduler, rates = kind(optimiser, **settings), []
    for _ in range(steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def rates_of(steps: int, rounds: int = 1, **training: Any) -> list[float]:
    rate = learning_rate(TrainingSpec(steps=steps, **training), rounds)
    return [rate(step) for step in range(steps * rounds)]


@pytest.mark.parametrize("warmup", [0.3, 0.02, 0.025, 0.5])
@pytest.mark.parametrize("steps", [100, 37, 3])
def test_one_cycle_is_torch_s(warmup: float, steps: int) -> None:
    kind = torch.optim.lr_scheduler.OneCycleLR
    settings: dict[str, Any] = {"max_lr": 2e-3, "pct_start": warmup, "cycle_momentum": False}
    for rounds, start, end, given in (
        (1, 25, 0.2, {"final_learning_rate": 4e-4}),
        (2, 100, 1e4, {"initial_learning_rate": 2e-5, "final_learning_rate": 2e-9}),
    ):
        total = rounds * steps
        if rounds == 1 and warmup * steps == 1:  # there torch divides by zero
            continue
        factors = {"div_factor": start, "final_div_factor": end}
        expected = torch_rates(kind, total, total_steps=total, **factors, **settings)
        rates = rates_of(steps, rounds, schedule="one-cycle", warmup=warmup, **given)
        assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("warmup", [0.0, 0.008, 0.1, 0.95])
def test_a_warm_up_and_a_cosine_are_transformers(warmup: float) -> None:
    def scheduler(optimiser):
        # Theirs ends one step after the number that it is given, ours at the last step.
        return get_cosine_schedule_with_warmup(optimiser, math.ceil(60 * warmup), 59)

    expected = torch_rates(scheduler, 60)
    assert rates_of(30, 2, warmup=warmup, final_learning_rate=0) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
@pytest.mark.parametrize("final", [0.0, 3e-4, 4e-3])
@pytest.mark.parametrize(
    ("steps", "rounds", "warmup"),
    [(2, 1, 0.9), (10, 1, 0.1), (10, 1, 0.95), (1, 7, 0.3), (5, 3, 0.2)],
)
def test_the_last_step_has_the_final_rate(
    schedule: Any, final: float, steps: int, rounds: int, warmup: float
) -> None:
    given: dict[str, Any] = {"final_learning_rate": final, "warmup": warmup, "schedule": schedule}
    rates = rates_of(steps, rounds, **given)
    assert rates[-1] == final
    if final:  # else it is the rate at the start of the warm-up, too
        assert all(rate != final for rate in rates[:-1])
    for round in range(rounds if steps > 1 else 0):
        last = round * steps + steps - 1
        assert rates_of(steps, rounds, restart=True, **given)[last] == final
    beside = TrainingSpec(steps=steps, restart=True, **given)
    assert learning_rate_beside(beside, rounds, rounds - 1, 4)(3) == final


CONSTANT = {"warmup": 0.4, "schedule": "constant", "initial_learning_rate": 1e-3}
DECAYING = {"warmup": 0.4, "restart": True, "learning_rate_decay": 0.5}
FINAL = {"final_learning_rate": 0.0, "schedule": "one-cycle"}
RATES: list[tuple[int, int, dict[str, Any], list[float]]] = [
    (3, 1, {"final_learning_rate": 1e-3}, [2e-3, 1.5e-3, 1e-3]),
    (5, 2, CONSTANT, [1e-3, 1.25e-3, 1.5e-3, 1.75e-3, *[2e-3] * 6]),
    (5, 2, DECAYING, [0, 1e-3, *[2e-3] * 3, 0, 0.5e-3, *[1e-3] * 3]),
    (5, 2, {"learning_rate_decay": 0.5}, [2e-3] * 5 + [1e-3] * 5),
    *((10, 3, {"warmup": 0.2, "restart": True, **kind}, rates_of(10, 1, warmup=0.2, **kind) * 3)
      for kind in ({}, {"schedule": "one-cycle"})),
    # In a schedule of one step, a final rate of 0 would train nothing.
    *((1, rounds, {**FINAL, "warmup": warmup, "restart": rounds > 1, **kind}, [2e-3] * rounds)
      for rounds in (1, 3) for warmup in (0.5, 0.999) for kind in ({}, {"schedule": "cosine"})),
]  # fmt: skip
"""Steps, rounds and settings, and the rates of all steps."""


@pytest.mark.parametrize(("steps", "rounds", "training", "rates"), RATES)
def test_rates_of_short_schedules(steps, rounds, training, rates) -> None:
    assert rates_of(steps, rounds, **training) == pytest.approx(rates)


def test_updates_beside_the_local_steps_have_the_schedule_if_it_restarts() -> None:
    spec = TrainingSpec(steps=10, warmup=0.5, restart=True, final_learning_rate=0)
    rate = learning_rate_beside(spec, 3, 2, 4)
    assert [rate(n) for n in range(4)] == pytest.approx([0, 1e-3, 2e-3, 0])
    rate = learning_rate_beside(TrainingSpec(steps=10, warmup=0.5), 2, 0, 4)
    assert [rate(n) for n in range(4)] == [2e-3] * 4  # not the 0 of a warm-up's first step
    whole = learning_rate(TrainingSpec(steps=10), 2)
    assert learning_rate_beside(TrainingSpec(steps=10), 2, 1, 4)(3) == whole(10)
    assert whole(10_000) == pytest.approx(2e-4)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_turns_are_those_of_the_levels_exchanges(every: int) -> None:
    steps = 4
    level = Level("x", of_roles(), "train", lambda _: 0.1, every, active=lambda e: e % 2 == 0)
    turns = [s // steps for s in range(12 * steps) if (s + 1) % every == 0]
    for exchanges in range(12):
        wanted = sum(e < exchanges and e % 2 == 0 for e in turns)
        assert level.turns(exchanges, steps) == wanted
