"""A base in a run file: by its name, or with a format and a revision."""

from typing import Any

import pytest

from coterie import CoterieError
from coterie.bases import BaseSpec
from coterie.config.run import parse
from coterie.config.values import apply_setting

CLIENTS = {"clients": [{"name": "poet", "path": "poet.txt"}]}
NF4, BF16 = ({"name": "gpt2", "weights": weights} for weights in ("nf4", "bf16"))


def test_a_name_alone_stays_one_wherever_it_is_written() -> None:
    plain, long = parse({**CLIENTS, "base": "gpt2"}), parse({**CLIENTS, "base": {"name": "gpt2"}})
    assert plain.base == long.base == BaseSpec(name="gpt2")
    assert plain.as_dict()["base"] == long.as_dict()["base"] == "gpt2"
    assert (plain.visible_to("poet")["base"], plain.digest()) == ("gpt2", long.digest())
    assert parse(CLIENTS).as_dict()["base"] == "tiny-gpt2"


def test_a_format_is_kept_told_and_another_run() -> None:
    run = parse({**CLIENTS, "base": NF4, "bases": {"poet": {"name": "gpt2", "revision": "v1"}}})
    assert (run.as_dict()["base"], parse(run.as_dict())) == (NF4, run)
    assert run.visible_to("poet")["base"] == {"name": "gpt2", "revision": "v1"}
    assert run.digest() != parse({**CLIENTS, "base": "gpt2", "bases": {"poet": "gpt2"}}).digest()
    assert len({run.base, run.base_of("poet"), BaseSpec.model_validate(NF4)}) == 2
    assert parse({**CLIENTS, "server": {"base": NF4}}).base_of("server") == run.base


def test_it_reads_well_in_a_sentence() -> None:
    specs: list[Any] = [{"name": "gpt2"}, NF4, BF16 | {"revision": "v1"}]
    texts = [str(BaseSpec.model_validate(spec)) for spec in specs]
    assert texts == ["gpt2", "gpt2 in nf4", "gpt2 in bf16 at revision v1"]


WRONG_BASES = [
    (3, "base: give a name, or a mapping with the key `name` and, optionally, `weights`, "),
    ({"weights": "nf4"}, "base.name is missing."),
    ({"name": "gpt2", "wieghts": "nf4"}, "Did you mean 'base.weights'?"),
    ({"name": "gpt2", "weights": "int4"}, "base.weights should be 'fp32', 'bf16', 'int8' or"),
]


@pytest.mark.parametrize(("base", "message"), WRONG_BASES)
def test_what_is_no_base_is_said_in_a_sentence(base, message) -> None:
    with pytest.raises(CoterieError) as refused:
        parse({**CLIENTS, "base": base})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "bases", [{"base": BF16}, {"bases": {"poet": BF16}}, {"server": {"base": BF16}}]
)
def test_bf16_weights_contradict_training_in_fp32(bases) -> None:
    assert parse({**CLIENTS, **bases})
    refusal = r"precision: fp32` contradicts `weights: bf16` of a base"
    with pytest.raises(CoterieError, match=refusal):
        parse({**CLIENTS, **bases, "training": {"precision": "fp32"}})


def test_a_format_can_be_set_where_a_name_stands() -> None:
    values = {"base": "gpt2", "server": {"base": "other"}}
    for setting in ("base.weights=nf4", "server.base.weights=bf16"):
        apply_setting(values, setting)
    assert values["base"] == NF4
    assert values["server"] == {"base": {"name": "other", "weights": "bf16"}}
