"""The tables of the run file's keys and of each method's settings, in code and documentation."""

from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
from every_method import METHODS
from pydantic import ValidationError

from coterie import CoterieError
from coterie.analysis.settings import keys, method_table, run_file_keys
from coterie.bases.sites import QUERY_VALUE
from coterie.config.sections import RunFile
from coterie.methods.contract import RunFacts
from coterie.methods.registry import available, method_from

PAGE = Path(__file__).parents[2] / "docs" / "use" / "run-file-keys.md"


def test_the_page_documents_every_key_as_it_is() -> None:
    assert run_file_keys() in PAGE.read_text(encoding="utf-8"), (
        "docs/use/run-file-keys.md is behind; run scripts/document_run_file.py"
    )


def test_every_key_has_a_meaning_and_sections_are_taken_apart() -> None:
    rows = {key: (default, meaning) for key, default, meaning in keys(RunFile)}
    assert all(meaning for _, meaning in rows.values())
    assert rows["training.batch"][0] == "64"
    adamw = "{name: adamw, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.01}"
    assert (rows["training.optimiser"][0], rows["clients[].name"][0]) == (adamw, "required")
    assert rows["method"][0] == "auto"
    assert {"data.limits.train", "divide.by", "evaluation.every", "seed"} <= rows.keys()


@pytest.mark.parametrize("name", available())
def test_every_method_explains_all_of_its_settings(name) -> None:
    table = method_table(name)
    named = {row[0].split(".")[0] for row in table.rows} - {"none"}
    assert named == set(available()[name].model_fields)
    assert all(row[2] for row in table.rows)
    assert len({row[0] for row in table.rows}) == len(table.rows)


def test_choices_are_listed() -> None:
    rows = {row[0]: row[2] for row in method_table("comigs-1g1s").rows}
    assert rows["router.load_balance"].endswith("(none, uniform, generalist)")


def test_parts_are_explained_with_the_methods_own_defaults() -> None:
    tables = {n: {row[0]: row[1:] for row in method_table(n).rows} for n in available()}
    for name, rank, sets in (("fedavg", "8", "2"), ("hetlora", "16", "1"), ("ffa-lora", "16", "1")):
        assert (tables[name]["mlp.rank"][0], tables[name]["mlp.sets"][0]) == (rank, sets)
    assert tables["fedit"]["attention.targets"][0] == QUERY_VALUE
    assert tables["fedavg"]["attention.targets"][0] == ""
    assert (tables["fedit"]["lora.scale"][0], tables["fedavg"]["lora.scale"][0]) == ("rank", "sqrt")
    for key, name, other in (
        ("router.every", "comigs-2g", "pfedmoe"),
        ("trusted.top", "pcl-3", "pcl-uniform"),
    ):
        assert key in tables[name].keys() - tables[other].keys()
    privacy = tables["fedamole"]["embeddings.privacy"][1]
    assert privacy == "differential privacy of the mean embeddings; null: none"
    assert next(iter(tables["comigs-1g1s"])) == "mlp"


def test_a_table_marks_optional_and_client_specific_settings() -> None:
    for name in ("fedavg", "comigs-1g1s", "fedit"):
        rows = {row[0]: row[2] for row in method_table(name).rows}
        method = available()[name]
        for part in {"mlp", "attention"} & method.model_fields.keys():
            optional = type(None) in get_args(method.model_fields[part].annotation)
            assert rows[part].endswith("; null: none") is optional


@pytest.mark.parametrize("name", available())
def test_a_number_per_client_is_offered_where_the_method_accepts_it(name) -> None:
    rows = {row[0]: row[2] for row in method_table(name).rows}
    offered = {key for key, text in rows.items() if text.endswith("{CLIENT: N, others: N}")}
    settings = METHODS[name]
    facts = RunFacts(("poet", "diarist", "whaler"), public=True, server=True, instructions=True)
    method_from(settings).check(facts)  # the settings are valid for these clients
    for key in rows:
        if (field := key.removeprefix("mlp.")) == key or field in ("placement",):
            assert key not in offered
            continue
        mlp = {**settings.get("mlp", {}), field: {"poet": 1, "others": 2}}
        with nullcontext() if key in offered else pytest.raises((CoterieError, ValidationError)):
            method_from({**settings, "mlp": mlp}).check(facts)


def test_an_unknown_method_and_the_pooled_one() -> None:
    with pytest.raises(CoterieError, match="Did you mean 'fedavg'"):
        method_table("fedavgg")
    with pytest.raises(CoterieError, match="settings of the method `local`"):
        method_table("centralized")
