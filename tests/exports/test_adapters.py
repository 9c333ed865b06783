"""PEFT adapters, merged models and bundles compute what the trained models compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_model
from peft import PeftModel
from sources import check, logits, random_source, randomise, source_of
from transformers import AutoModelForCausalLM

from coterie.adapters import Adapter, AmoleAdapter, AmoleLayout, Layout, Trainable, detach
from coterie.adapters.full import FullAdapter
from coterie.adapters.merging import adapted
from coterie.adapters.portable import packed, unpacked
from coterie.adapters.prompt import PromptAdapter, SoftPrompt, prompt_encoder, soft_prompt
from coterie.exports.merged import MERGED
from coterie.exports.peft import PEFT
from coterie.exports.source import Source
from coterie.messages import State

ATTENTION = Layout(0, 0, attention_rank=4)
ONE = Layout(1, 0, rank=4, attention_rank=2)
PLAIN: dict[str, Layout] = {
    "rank-stabilised": ATTENTION,
    "divided by the rank": Layout(0, 0, attention_rank=4, scale="rank", freeze_A=True),
    "one expert": ONE,
    "one expert, divided by the rank": Layout(0, 1, rank=3, attention_rank=0, scale="rank"),
    "named layers": Layout(0, 0, attention_rank=2, targets=r"attention\.(qkv|v)|mlp\.down"),
}
BASES = ["llama", "gpt2", "phi3", "falcon", "opt", "gemma"]


def check_merged(source: Source, folder: Path, expected: torch.Tensor) -> None:
    """Check that a source's merged model computes what the source computes."""
    assert MERGED.refusal(source) is None
    MERGED.write(source, folder)
    written = AutoModelForCausalLM.from_pretrained(folder)
    assert (logits(written) - expected).abs().max() < 2e-5 * expected.abs().max()


def loaded(source: Source, folder: Path) -> Any:
    """Load the model of a PEFT folder on an unmodified copy of the base."""
    detach(source.base.model)
    source.base.model.save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return PeftModel.from_pretrained(base, str(folder))


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("base", BASES)
def test_lora_as_a_peft_adapter_and_merged(base: str, layout: str, config, tmp_path) -> None:
    source = random_source(base, PLAIN[layout], config())
    expected = logits(source.attach())
    assert PEFT.refusal(source) is None
    PEFT.write(source, tmp_path)
    check(source, loaded(source, tmp_path), expected)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "somebody/base"
    assert written["use_rslora"] == (PLAIN[layout].scale == "sqrt")
    assert written["fan_in_fan_out"] == (base == "gpt2")
    check_merged(source, tmp_path / "merged", expected)


def test_a_pair_with_a_residual_keeps_its_scale_and_is_restored(config, tmp_path) -> None:
    source = random_source("llama", ONE, config())
    [(_, first), *_] = adapted(source.attach())
    # PEFT would divide alpha by the larger rank of this pair.
    first.residual_A, first.residual_B = torch.randn(3, 32) / 3, torch.randn(32, 3) / 3
    expected, model = logits(source.attach()), source.base.model
    assert source.adapter is not None
    assert torch.equal(logits(unpacked(packed(source.adapter), model).attach(model)), expected)
    PEFT.write(source, tmp_path)
    assert len(json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"]) > 0
    check(source, loaded(source, tmp_path), expected)


def test_the_names_of_adapted_layers_are_short_if_they_are_unambiguous(config, tmp_path) -> None:
    for base, layout, names in [
        ("llama", ATTENTION, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt2", Layout(0, 0, attention_rank=2, targets="c_attn"), {"c_attn"}),
    ]:
        PEFT.write(random_source(base, layout, config()), tmp_path)
        written = json.loads((tmp_path / "adapter_config.json").read_text())
        assert set(written["target_modules"]) == names
    PEFT.write(random_source("gpt2", ATTENTION, config()), tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "transformer.h.0.attn.c_proj" in written["target_modules"]  # the MLP has a c_proj, too


def test_experts_are_neither_merged_nor_a_peft_adapter(config) -> None:
    for layout in (Layout(), Layout(1, 0, placement="beside")):
        source = random_source("llama", layout, config())
        assert "one LoRA pair" in (PEFT.refusal(source) or "")
        assert "one LoRA pair" in (MERGED.refusal(source) or "")


def test_full_fine_tuning_is_merged_once_into_tied_weights(config, tmp_path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    adapter = FullAdapter(model)
    randomise(adapter)
    source = source_of(model, adapter, config())
    expected = logits(source.attach())
    assert "one LoRA pair" in (PEFT.refusal(source) or "")
    check_merged(source, tmp_path, expected)


def test_the_untrained_base_is_merged_as_it_is(config, tmp_path) -> None:
    source = source_of(small_model("gpt2"), None, config())
    assert "the untrained base" in (PEFT.refusal(source) or "")
    MERGED.write(source, tmp_path)
    written = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(written), logits(source.base.model))
    assert "is the base itself" in MERGED.notes(source)[0]


def prompt(base: Any, encoded: bool) -> PromptAdapter:
    """Return a soft prompt with the embeddings of a text, or a prompt encoder."""
    if encoded:
        return prompt_encoder(base, 3, 24, 0)
    adapter = soft_prompt(base, 3, 0, 0.0)
    assert isinstance(adapter.encoder, SoftPrompt)
    adapter.encoder.start_from(base.get_input_embeddings(), [4, 8])
    return adapter


@pytest.mark.parametrize("encoded", [False, True])
def test_soft_prompts_are_peft_folders(encoded: bool, config, tmp_path) -> None:
    model = small_model("llama")
    source = source_of(model, prompt(model, encoded), config())
    assert source.adapter is not None
    randomise(source.adapter)
    expected = logits(source.attach())
    assert PEFT.refusal(source) is None
    assert MERGED.refusal(source) is not None
    PEFT.write(source, tmp_path)
    check(source, loaded(source, tmp_path), expected)


HELD = {f"model.layers.{layer}.self_attn.{n}_proj": [1, 3] for layer in (0, 1) for n in "qv"}
ADAPTERS: dict[str, Any] = {
    "mixture": lambda base: Adapter(base, Layout(1, 2, rank=3), 0, "", bool),
    "beside": lambda base: Adapter(base, Layout(placement="beside"), 0, "", bool),
    "amole": lambda base: AmoleAdapter(base, AmoleLayout(4), 0, HELD),
    "vanilla": lambda base: AmoleAdapter(base, AmoleLayout(4, router="vanilla"), 0, HELD),
    "full": FullAdapter,
    "prompt": lambda base: prompt(base, False),
    "prompt encoder": lambda base: prompt(base, True),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_rebuilt_from_its_state(kind: str) -> None:
    model = small_model("llama")
    adapter: Trainable = ADAPTERS[kind](model)
    randomise(adapter)
    expected = logits(adapter.attach(model))
    again = unpacked(State.decode(packed(adapter).encode()), model)
    assert type(again) is type(adapter)
    assert torch.equal(logits(again.attach(model)), expected)
    detach(model)
    assert not torch.allclose(logits(model), expected, atol=1e-3)
