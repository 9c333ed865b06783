"""Bases that are exported models: merged ones, and sparse mixtures of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from every_method import METHODS
from lora_folders import write_lora
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

import coterie
from coterie.bases import BaseSpec, load_base, load_tokenizer
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from coterie.testing.small import TOKENS, write_tokenizer

IDS = torch.arange(30)[None]
LAST = {"keep": "last"}


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def mixture(request, tmp_path_factory) -> Path:
    """A folder as transformers writes it, where each expert has files' names of its own."""
    experts = {"num_experts": 2, "num_local_experts": 2, "norm_topk_prob": True}
    settings = ARCHITECTURES[request.param] | experts | {"vocab_size": TOKENS}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **settings))
    folder = tmp_path_factory.mktemp("mixtures") / request.param
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", ["comigs-1g1s", "fedit", "local-full"])
def test_a_mixture_can_be_trained_further(name, mixture, config, resumed) -> None:
    finished = resumed(config(base=str(mixture), method=METHODS[name], evaluation=LAST)).path
    base: Any = AutoModelForCausalLM.from_pretrained(mixture)
    with torch.no_grad():
        change = coterie.load(finished, "poet")(IDS).logits - base(IDS).logits
    assert change.abs().max() > 1e-3


def test_experts_are_trained_beside_a_mixture_and_not_inside(mixture, config, tmp_path) -> None:
    layout = {"name": "comigs-1g1s", "mlp": {"placement": "inside"}}
    with pytest.raises(CoterieError, match="has no MLP to which experts can be attached"):
        coterie.run(config(base=str(mixture), method=layout), out=tmp_path / "inside")


def test_a_saved_model_is_a_base_with_its_score(config, bases, tmp_path) -> None:
    first = coterie.run(config(method="fedit", evaluation=LAST), out=tmp_path / "first").path
    coterie.load(first, "poet", merge=True).save_pretrained(tmp_path / "merged")
    load_tokenizer(str(bases / "gpt2")).save_pretrained(tmp_path / "merged")
    again = config(method="pretrained", base=str(tmp_path / "merged"))
    second = coterie.run(again, out=tmp_path / "second").path
    scores = [(RunFolder(path).outcome or {})["trained"]["poet"] for path in (first, second)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_an_adapter_of_experts_and_gate_is_merged(mixture, tmp_path) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    settings = {"target_modules": ["q_proj"], "target_parameters": parameters}
    ranks = {"rank_pattern": {"mlp.experts.gate_up_proj": 8}, "lora_dropout": 0.0}
    write_lora(tmp_path, mixture, 0.05, **settings, **ranks)
    base: Any = AutoModelForCausalLM.from_pretrained(mixture)
    plain = base(IDS).logits
    expected = PeftModel.from_pretrained(base, str(tmp_path))(IDS).logits
    spec = BaseSpec(name=str(mixture), adapter=str(tmp_path))
    actual = load_base(spec, "fp32", 64).model(IDS).logits
    assert (expected - plain).abs().max() > 0.01
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
