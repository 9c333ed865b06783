"""A role in a file of one's own: examples/biases.py in runs, tables and checks."""

from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie import CoterieError, Role
from coterie.adapters import ROLES, Parameter, of_roles, trained
from coterie.adapters.coverage import coverage
from coterie.adapters.parameter import initialise
from coterie.analysis.audit import audit_run
from coterie.bases.sites import attention_linears
from coterie.config.plugins import load_plugin
from coterie.testing.rounds import joined, one_round

EXAMPLE = Path(__file__).parents[2] / "examples" / "biases.py"
UNKNOWN = "There is no role 'biass'. To add a role of your own, use --plugin FILE.py or coterie."


NO_SUMMARY = "role 'mine' needs a `summary`: a description of"


@pytest.fixture
def loaded() -> None:
    load_plugin(EXAMPLE)


def test_parameters_with_a_role_of_a_plugin_are_trained_and_averaged(loaded, config) -> None:
    run = joined(config(method="fed-bias", rounds=1))
    uploads = [upload["adapter"] for upload in one_round(run, 0).values()]
    parameters = run.clients["poet"].parameters()
    assert {parameter.kind for parameter in parameters.values()} == {ROLES.get("bias")}
    for name in parameters:
        biases = torch.stack([upload[name] for upload in uploads])
        assert biases.any()
        torch.testing.assert_close(run.value.adapter[name], biases.mean(0))


def test_the_audit_has_the_summary_and_name_of_a_role(loaded, config) -> None:
    tables = audit_run(config(method="fed-bias", rounds=1))
    cells = [str(cell) for table in tables for row in table.rows for cell in row]
    assert "biases that are added to the linear layers of attention" in cells
    assert any(cell.startswith("bias, attention.") for cell in cells)


def test_a_role_tells_checks_what_they_must_know(base) -> None:
    @coterie.register
    class Kept(Role):
        name = "kept"
        summary = "pairs that keep their initial values"
        trained = False
        pairs = ("experts", "on")
        replaces_weights = True

    path = next(iter(attention_linears(base)))
    owner, _, name = path.rpartition(".")
    clients = [
        Parameter(f"{path}.B", "kept", nn.Parameter(torch.ones(2, 3)), "kaiming", path, "B")
        for _ in range(2)
    ]
    for client, parameter in zip(("anna", "ben"), clients, strict=True):
        initialise([parameter], 0, client, common=lambda _: False)
    assert torch.equal(clients[0].tensor, clients[1].tensor)
    assert not trained(clients[0])
    assert coverage(base, clients).lines()[:2] == (
        "all weights",
        f"experts on {type(base.get_submodule(owner)).__name__} ({name}) in 1 of 2 layers",
    )


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: Parameter("x", "biass", nn.Parameter(torch.zeros(1)), "zero"), UNKNOWN),
        (lambda: of_roles("dense", "biass"), UNKNOWN),
        (lambda: coterie.register(type("Mine", (Role,), {"name": "mine"})), NO_SUMMARY),
    ],
)
def test_an_unknown_role_or_one_without_a_summary_is_refused(use, sentence) -> None:
    with pytest.raises(CoterieError) as error:
        use()
    assert sentence in str(error.value)


def test_an_unknown_shared_role_is_one_sentence(loaded, config) -> None:
    kind = type(config(method="fed-bias").method)
    typo = type("Typo", (kind,), {"name": "typo", "shared_roles": ("biases",)})
    with pytest.raises(CoterieError, match=r"no role 'biases'\. Did you mean 'bias'\?"):
        typo().schema()
