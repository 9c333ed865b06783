"""An existing LoRA adapter of PEFT that is merged into a base when it is loaded."""

import json
import logging
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folders import write_lora
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from coterie.bases import BaseSpec, load_base
from coterie.bases.checks import check_weights
from coterie.config.run import parse
from coterie.config.values import apply_setting
from coterie.errors import CoterieError

CLIENTS = {"clients": [{"name": "poet", "path": "poet.txt"}]}
IDS = torch.arange(40)[None]
PATTERNS: dict[str, Any] = {"rank_pattern": {"0.*q_proj": 6}, "alpha_pattern": {"1.*down_proj": 3}}


@pytest.fixture(scope="module")
def adapter(bases, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return write_lora(folder, bases / "llama", use_rslora=True, **PATTERNS)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits.float()


def spec(base: Path, adapter: Path, **more: str) -> BaseSpec:
    return BaseSpec.model_validate({"name": str(base), "adapter": str(adapter), **more})


ADAPTERS = {
    "patterns and rslora": ("llama", {"use_rslora": True, **PATTERNS}),
    "one layer": ("llama", {"target_modules": "all-linear", "exclude_modules": r".*layers\.0.*"}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize(("base", "settings"), ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapted_base_computes_what_peft_computes(base, settings, bases, tmp_path) -> None:
    write_lora(tmp_path, bases / base, **settings)
    plain: Any = AutoModelForCausalLM.from_pretrained(bases / base)
    changed = logits(PeftModel.from_pretrained(plain, str(tmp_path)))
    loaded = load_base(spec(bases / base, tmp_path), "fp32", 64)
    assert (logits(loaded.model) - changed).abs().max() < 1e-5
    without = load_base(str(bases / base), "fp32", 64)
    assert (logits(without.model) - changed).abs().max() > 0.01
    assert loaded.digest != without.digest
    assert type(loaded.model) is type(without.model)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.state_dict().keys() == without.model.state_dict().keys()


def test_the_base_s_files_stay_unchanged(bases, adapter) -> None:
    # Weights are mapped from the file if their format is kept, and merging changes them in place.
    file = bases / "llama" / "model.safetensors"
    before = sha256(file.read_bytes()).hexdigest()
    load_base(spec(bases / "llama", adapter), "fp32", 64)
    assert sha256(file.read_bytes()).hexdigest() == before
    check_weights(bases / "llama")


@pytest.mark.parametrize(("size", "warned"), [(1e-4, True), (0.5, False)])
def test_an_adapter_that_rounding_loses_is_warned_of(size, warned, bases, tmp_path, caplog) -> None:
    write_lora(tmp_path, bases / "llama", size)
    with caplog.at_level(logging.WARNING, "coterie"):
        bf16 = load_base(spec(bases / "llama", tmp_path, weights="bf16"), "bf16", 64)
        share = [r.message for r in caplog.records if "Rounding to bfloat16 changes" in r.message]
        assert bool(share) == warned
        caplog.clear()
        load_base(spec(bases / "llama", tmp_path), "fp32", 64)
        assert not caplog.records
    assert bf16.model.dtype == torch.bfloat16


def test_an_adapter_of_another_base_s_name_is_warned_of(bases, adapter, tmp_path, caplog) -> None:
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "someone/else"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    load_base(spec(bases / "llama", tmp_path), "fp32", 64)
    [record] = caplog.records
    assert "was trained on someone/else, but the base is" in record.message


def rewrite(folder: Path, base: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Write an adapter whose weights are changed."""
    weights = load_file(write_lora(folder, base) / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


def prompt(folder: Path, base: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, config).save_pretrained(str(folder))


def cut(folder: Path, base: Path) -> None:
    write_lora(folder, base)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights[:300])


def a_of(layer: int) -> str:
    """Return the name of a matrix A of an adapter."""
    return f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f, b: f.rmdir(), "`adapter`: there is no folder .*; correct the path"),
        (lambda f, b: None, r"the file adapter_config\.json is missing"),
        (
            lambda f, b: (write_lora(f, b) / "adapter_model.safetensors").rename(f / "a.bin"),
            r"the file adapter_model\.safetensors is missing",
        ),
        (cut, r"adapter_model\.safetensors is damaged or incomplete"),
        (prompt, "the type 'PROMPT_TUNING'; `adapter` accepts only LoRA"),
        (lambda f, b: write_lora(f, b, use_dora=True), "more than plain LoRA .use_dora: True"),
        (lambda f, b: write_lora(f, b, modules_to_save=["lm_head"]), "LoRA .modules_to_save"),
        (lambda f, b: write_lora(f, b, bias="all"), "more than plain LoRA .bias: 'all'"),
        (
            lambda f, b: write_lora(f, b, init_lora_weights="pissa"),
            "LoRA .init_lora_weights: 'pissa'",
        ),
        (
            lambda f, b: rewrite(f, b, lambda w: w.update({a_of(7): torch.zeros(4, 32)})),
            r"does not fit the base .*layers\.7\.self_attn\.q_proj\.lora_A",
        ),
        (
            lambda f, b: rewrite(f, b, lambda w: w.pop(a_of(0))),
            r"does not fit the base .* lacks the tensor .*lora_A",
        ),
        (
            lambda f, b: rewrite(f, b, lambda w: w[a_of(0)].fill_(float("nan"))),
            "damaged: it contains values that are not finite",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_what_is_no_usable_adapter_is_said_in_a_sentence(make, words, bases, tmp_path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    make(folder, bases / "llama")
    with pytest.raises(CoterieError, match=words):
        load_base(spec(bases / "llama", folder), "fp32", 64)


def test_an_adapter_of_another_base_is_refused(bases, adapter, other) -> None:
    for base in (bases / "gpt2", Path(other)):
        with pytest.raises(CoterieError, match="does not fit the base"):
            load_base(spec(base, adapter), "fp32", 64)


def test_a_tied_embedding_is_not_changed_twice(bases, tmp_path) -> None:
    # PEFT would also change the output head.
    write_lora(tmp_path, bases / "gpt2", target_modules=["wte"], fan_in_fan_out=True)
    with pytest.raises(CoterieError, match=r"changes transformer\.wte, whose weights the base"):
        load_base(spec(bases / "gpt2", tmp_path), "fp32", 64)


def test_a_quantised_base_takes_no_adapter(bases, adapter) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra quantised is not installed")
    with pytest.raises(CoterieError, match="cannot be merged into a base in nf4"):
        load_base(spec(bases / "llama", adapter, weights="nf4"), "bf16", 64)


def test_the_key_beside_base_is_short_for_the_key_in_it() -> None:
    long = parse({**CLIENTS, "base": {"name": "gpt2", "adapter": "first"}})
    short = parse({**CLIENTS, "base": "gpt2", "adapter": "first"})
    assert short.as_dict() == long.as_dict()
    assert short.digest() == long.digest() != parse({**CLIENTS, "base": "gpt2"}).digest()
    assert str(short.base) == "gpt2 with the adapter first"
    assert parse({**CLIENTS, "adapter": "first"}).base.name == "tiny-gpt2"
    assert parse({**CLIENTS, "adapter": None}).as_dict()["base"] == "tiny-gpt2"
    assert parse(short.as_dict()) == short
    values: dict[str, Any] = {**CLIENTS, "base": "gpt2"}
    apply_setting(values, "adapter=first")
    assert parse(values) == short
    with pytest.raises(CoterieError, match=r"`adapter` and `base\.adapter` contradict"):
        parse({**CLIENTS, "base": {"name": "gpt2", "adapter": "second"}, "adapter": "first"})
    with pytest.raises(CoterieError, match="adapter should be text, not 3"):
        parse({**CLIENTS, "adapter": 3})
