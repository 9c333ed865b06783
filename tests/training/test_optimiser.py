"""Any dense optimiser of torch can be chosen, and its settings are checked at once."""

from typing import Any

import pytest
import torch

import coterie
from coterie import CoterieError
from coterie.config.read import load_config
from coterie.config.run import parse
from coterie.training.optimiser import REFUSED, build, classes
from coterie.training.spec import ADAMW, OptimiserSpec


@pytest.fixture(scope="module")
def make(values):
    """A run of two rounds with a given optimiser."""

    def made(**optimiser: Any) -> coterie.RunConfig:
        training = {"steps": 2, "batch": 2, "precision": "fp32", **optimiser}
        return parse(values(method="fedavg", rounds=2, training=training))

    return made


def test_adamw_has_its_defaults_however_it_is_called(config, make) -> None:
    usual = OptimiserSpec().settings
    assert usual == ADAMW == {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    runs = [make(optimiser=o) for o in ("AdamW", {"name": "adamw"}, {}, {"eps": "1e-8"})]
    assert {run.digest() for run in runs} == {make().digest()}
    changed = make(optimiser={"betas": [0.8, 0.9]})
    assert changed.training.optimiser.settings == usual | {"betas": (0.8, 0.9)}
    assert parse(changed.as_dict()) == changed
    assert changed.digest() != make().digest()
    assert make(optimiser="sgd").training.optimiser.settings == {}


@pytest.mark.parametrize("name", sorted(classes().keys() - REFUSED))
def test_every_optimiser_can_be_chosen_by_its_name_alone(name) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    optimiser = build(OptimiserSpec.model_validate(name.upper()), [weight], 0.125)
    assert (type(optimiser), optimiser.param_groups[0]["lr"]) == (classes()[name], 0.125)
    weight.grad = torch.ones_like(weight)
    optimiser.step()
    assert not torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("optimiser", "sentence"),
    [
        ("adamq", "training.optimiser: torch has no optimiser 'adamq'. Did you mean 'adam"),
        ("qqqq", "torch has no optimiser 'qqqq'. Available: adadelta, "),
        ("lbfgs", "training.optimiser cannot be lbfgs"),
        ("SparseAdam", "training.optimiser cannot be sparseadam"),
        (3, "training.optimiser: give a name, such as sgd, or a mapping"),
        ({"name": "sgd", "momentun": 1}, "Did you mean 'training.optimiser.momentum'?"),
        ({"name": "sgd", "betas": [1, 1]}, "Unknown key 'training.optimiser.betas'. Known keys:"),
        ({"name": "sgd", "lr": 1}, "optimiser.lr is not supported; set training.learning_rate"),
        ({"name": "sgd", "params": []}, "Unknown key 'training.optimiser.params'."),
        ({"name": "sgd", "nesterov": True}, "optimiser: sgd rejected its settings: Nesterov"),
        ({"name": "sgd", "nesterov": 1}, "optimiser.nesterov should be true or false, not 1."),
        ({"weight_decay": -1}, "adamw rejected its settings: Invalid weight_decay value: -1."),
        ({"weight_decay": "much"}, "optimiser.weight_decay should be a number, not 'much'."),
        ({"betas": [0.9]}, "optimiser.betas should be a list of 2 numbers, not [0.9]."),
        ({"betas": ["a", "b"]}, "training.optimiser: adamw rejected its settings: "),
        ({"differentiable": True}, "training.optimiser: adamw rejected its settings: "),
    ],
)
def test_what_an_optimiser_does_not_take_is_told_at_once(optimiser, sentence, make) -> None:
    with pytest.raises(CoterieError) as error:
        make(optimiser=optimiser)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_an_optimiser_that_cannot_deal_with_the_parameters_says_so() -> None:
    with pytest.raises(CoterieError, match=r"training\.optimiser: muon rejected its settings: M"):
        build(OptimiserSpec(name="muon"), [torch.zeros(3, requires_grad=True)], 1e-3)


def test_settings_of_an_optimiser_can_be_set_one_by_one() -> None:
    for given, expected in (
        (["=sgd", ".momentum=0.5"], ("sgd", {"momentum": 0.5})),
        ([".eps=1e-6"], ("adamw", ADAMW | {"eps": 1e-6})),
    ):
        values = [f"training.optimiser{value}" for value in given]
        optimiser = load_config(None, values).training.optimiser
        assert (optimiser.name, optimiser.settings) == expected
