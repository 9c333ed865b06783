"""Operations: the counter against a count by hand, and how steps become rounds."""

import json

import pytest
import torch

from coterie.analysis.experiments import experiments
from coterie.analysis.flops import counting_base, round_cost, step_flops
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import Participant, client_context
from coterie.report.cost import Operations
from coterie.report.style import LeftOut, Picture

CLIENTS = ["diarist", "poet", "whaler"]
APART = {client: [client] for client in CLIENTS}


def prepared(config):
    base = counting_base(config)
    nothing = Tokens(torch.zeros(0, dtype=torch.int32), 0)
    participant = Participant("poet", ClientData(nothing, nothing, nothing), {"poet": nothing})
    side = config.method.client(client_context(config, base, participant, lambda *_: None))
    side.adapter.attach(base.model)
    return base, side


def by_hand(T: int, d: int, V: int, layers: int, n: int, r: int) -> int:
    """Return the operations of a step with n averaged experts and attention pairs of rank r."""
    w = 4 * d
    # Attention: frozen c_attn and c_proj, their pairs, and the two products of a head.
    attention, pairs, heads = T * d * 4 * d, T * r * (d + 3 * d) + T * r * (d + d), 2 * T * T * d
    mlp = 2 * T * d * w
    low_up, up, low_down, down = T * d * n * r, n * T * r * w, n * T * w * r, T * n * r * d
    head = T * d * V
    forward = layers * (attention + pairs + heads + mlp + low_up + up + low_down + down) + head
    # Backward: frozen products give the gradient of their input, all others of both factors; the
    # experts' middle part makes its pre-activations again; nothing goes below the first c_attn.
    wide = 5 * n * T * r * w
    backward = layers * (attention + 2 * pairs + 2 * heads + mlp + 2 * low_up + wide + 2 * down)
    backward += head - T * d * 3 * d - T * d * r
    return 2 * (forward + backward)


@pytest.mark.parametrize("rank", [2, 4])
def test_a_step_is_what_a_count_by_hand_gives(config, rank) -> None:
    run = config(method={"name": "fedavg", "mlp": {"rank": rank}, "attention": {"rank": rank}})
    base, side = prepared(run)
    (level,) = side.training.levels
    counted = step_flops(base, side.adapter, level, window=16)
    assert counted == by_hand(16, 32, base.model.config.vocab_size, layers=2, n=2, r=rank)


def test_a_round_counts_every_clients_steps_and_the_routers_in_their_turn(config) -> None:
    run = config(
        method={"name": "comigs-1g1s", "router": {"every": 8, "steps": 3}},
        training={"steps": 2, "batch": 5, "precision": "fp32"},
        rounds=5,
    )
    base, side = prepared(run)
    experts, routers = (step_flops(base, side.adapter, x, 16) for x in side.training.levels)
    cost = round_cost(run, base, APART)
    assert cost is not None
    assert cost == {"experts": 3 * 5 * 2 * experts, "routers": 3 * 5 * 3 / 5 * routers}
    short = round_cost(run.model_copy(update={"rounds": 3}), base, APART)
    assert short["routers"] == 0  # 6 steps, and none is the eighth
    assert 0 < routers < experts  # the same products, but for the pairs' gradients


def test_a_pooled_client_works_as_much_as_all_clients_apart(values) -> None:
    local, pooled = (parse(values(method=name)) for name in ("local", "centralized"))
    base = counting_base(local)
    assert round_cost(local, base, APART) == round_cost(pooled, base, {"everyone": CLIENTS})


def test_a_method_that_does_not_train_has_no_cost(config) -> None:
    run = config(method="pretrained")
    assert round_cost(run, counting_base(run), APART) is None


@pytest.mark.parametrize(
    ("names", "last"), [(("fedavg", "local"), ["+0.0 %"] * 2), (("local",), None)]
)
def test_costs_are_relative_to_fedavg_if_it_ran(names, last, written, values, tmp_path) -> None:
    for name in names:
        method = {"name": name, "mlp": {"sets": 1}}
        folder = written(f"runs/{name}", method, figures=[(0, "anna", "loss/joint", 4.0)])
        about = json.loads((folder / "run.json").read_text())
        about["config"] = parse(values(method=method)).as_dict()
        (folder / "run.json").write_text(json.dumps(about))
    (experiment,) = experiments([tmp_path / "runs"])
    (picture,) = Operations().pictures(experiment)
    assert isinstance(picture, Picture)
    assert ("relative to fedavg" in picture.table.columns) == bool(last)
    assert ("relative to FedAvg" in picture.caption) == bool(last)
    if last is None:
        assert not any("%" in cell for row in picture.table.rows for cell in row)
    else:
        assert [row[-1] for row in picture.table.rows] == last


@pytest.mark.parametrize("own", [{"server": {"base": None}}, {"bases": {"anna": "other"}}])
def test_models_with_bases_of_their_own_are_not_counted_on_the_runs(own, written) -> None:
    folder = written("run", {"name": "local"}, figures=[(0, "anna", "loss/joint", 4.0)], **own)
    (experiment,) = experiments([folder])
    (left_out,) = Operations().pictures(experiment)
    assert isinstance(left_out, LeftOut)
    assert "cannot be counted" in left_out.why
