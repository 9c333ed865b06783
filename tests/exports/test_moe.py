"""Mixture-of-experts checkpoints, read by transformers, compute what the mixtures compute."""

from typing import Any

import pytest
import torch
from safetensors import safe_open
from sources import check, logits, random_source
from transformers import AutoModelForCausalLM

from coterie.adapters import Layout
from coterie.exports.moe import MOE

THREE: dict[str, Any] = {"generalists": 1, "specialists": 2, "rank": 4, "attention_rank": 4}
LAYOUTS = {
    "one of two": Layout(rank=4, attention_rank=4, top_k=1),
    "both": Layout(rank=4, attention_rank=0),
    "two of three": Layout(**THREE, scale="rank"),
    "all three": Layout(**THREE, top_k=3),
    "no router": Layout(rank=4, attention_rank=4, routed=False),
}
BIASED = {"attention_bias": True}
BASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, None),
    "wide heads": ("llama", {"head_dim": 16, "rms_norm_eps": 1e-3}, "mixtral"),
    "mistral": ("mistral", {"sliding_window": 4}, "mixtral"),
    "phi3": ("phi3", {"sliding_window": None}, None),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, None),
    "qwen3": ("qwen3", {"head_dim": 8}, None),
    "qwen3, biased": ("qwen3", {"head_dim": 16, **BIASED}, None),
}
"""Architecture and settings of a base; and the only target that represents it, or None for any."""


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("base", BASES)
def test_the_checkpoint_computes_the_same(base: str, experts: str, config, tmp_path) -> None:
    name, settings, only = BASES[base]
    source = random_source(name, LAYOUTS[experts], config(), **settings)
    randomise_biases(source.base.model)
    expected = logits(source.attach())
    if only == "mixtral" and LAYOUTS[experts].slots == 1:
        assert "qwen2_moe has no" in (MOE.refusal(source) or "")
        return
    assert MOE.refusal(source) is None
    MOE.write(source, tmp_path)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = read
    assert not any(report.values())
    assert "Moe" in type(model).__name__ or "Mixtral" in type(model).__name__
    check(source, model, expected)


def randomise_biases(model: torch.nn.Module) -> None:
    """Draw biases and norms, whose initial zeros and ones would hide an omission."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
            assert "bias" in name or "norm" in name


def test_the_names_of_the_tensors_are_those_of_published_checkpoints(config, tmp_path) -> None:
    """Check the names that vLLM and the converter of llama.cpp read."""
    MOE.write(random_source("llama", LAYOUTS["both"], config()), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    block = "model.layers.1.block_sparse_moe"
    assert {f"{block}.gate.weight", f"{block}.experts.1.w3.weight"} <= names


@pytest.mark.parametrize(
    ("base", "settings", "layout", "reason"),
    [
        ("gpt2", {}, Layout(), "not gated or have biases"),
        ("llama", {"mlp_bias": True}, Layout(), "not gated or have biases"),
        ("llama", {}, Layout(placement="beside"), "not inside MLPs"),
        ("opt", {}, Layout(), "not inside MLPs"),
        ("llama", {}, Layout(1, 0), "at least two experts"),
        ("llama", {}, Layout(0, 0), "at least two experts"),
        ("llama", BIASED, Layout(), "mixtral has no equivalent of `attention_bias: True`"),
        ("gemma", {}, Layout(), "computes what gemma computes"),
        ("granite", {}, Layout(), "computes what granite computes"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            Layout(),
            "qwen2_moe has no equivalent of `use_sliding_window: True`",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            Layout(),
            "position embeddings of this phi3",
        ),
    ],
)
def test_what_the_block_does_not_compute_is_refused(base, settings, layout, reason, config) -> None:
    assert reason in (MOE.refusal(random_source(base, layout, config(), **settings)) or "")
