"""GGUF files of several architectures: read with the same logits, or refused."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_gguf import add_tokenizer, cache, finish, permuted
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coterie.bases.gguf import load_model
from coterie.errors import CoterieError

__all__ = ["cache"]
SIZES: dict[str, Any] = {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"initializer_range": 0.2, "sliding_window": None},
}
WINDOW = {"head_dim": 256, "sliding_window": 64}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 768, "norm_topk_prob": True}
ROUTED = {"expert_count": 4, "expert_used_count": 2}
FREQUENCY = {"rope.freq_base": 10000.0}
HEADS = {"attention.key_length": 256, "attention.value_length": 256}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {RMS: 1e-6, **FREQUENCY}),
    "qwen2": ("qwen2", {}, {RMS: 1e-6, **FREQUENCY}),
    "gemma2": ("gemma2", WINDOW, {RMS: 1e-6, **HEADS, "attention.sliding_window": 64}),
    "starcoder2": ("starcoder2", {}, {LAYER: 1e-5, **FREQUENCY}),
    "qwen3moe": ("qwen3_moe", EXPERTS, {RMS: 1e-6, **FREQUENCY, **ROUTED}),
}
"""The name in transformers, settings of the model and keys of the file, by the name in GGUF."""


def small(name: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | settings)
    return AutoModelForCausalLM.from_config(config).float().eval()


def stored(arch: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors as llama.cpp's converter stores them."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names, tensors = gguf.get_tensor_name_map(numbers[arch], 2), dict[str, torch.Tensor]()
    for name, weight in model.named_parameters():
        weights = {name: weight.detach()}
        if name.endswith("gate_up_proj"):
            halves = zip(("gate", "up"), weight.detach().chunk(2, dim=1), strict=True)
            weights = {name.replace("gate_up", part): half for part, half in halves}
        for part, values in weights.items():
            short = names.get_name(part, (".weight", ".bias"))
            assert short is not None
            if arch == "llama" and short.split(".")[-2] in ("attn_q", "attn_k"):
                values = permuted(values, 4 if "attn_q" in short else 2)
            if arch == "gemma2" and "norm" in short:
                values = values + 1
            tensors[short if "exps" not in short else f"{short}.weight"] = values
    return tensors


def write(path: Path, arch: str, model: PreTrainedModel, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"context_length": 128, "embedding_length": 64, "block_count": 2}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in {**sizes, "feed_forward_length": 96, **heads, **keys}.items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer, path.parent)
    for name, tensor in stored(arch, model).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    return finish(writer, path)


@pytest.mark.parametrize("arch", KINDS)
def test_logits_are_those_of_the_model(arch, tmp_path) -> None:
    name, settings, keys = KINDS[arch]
    model: Any = small(name, **settings)
    read: Any = load_model(write(tmp_path / "small.gguf", arch, model, keys), torch.float32)
    ids = torch.arange(40)[None] * 7 % 1024
    with torch.no_grad():
        assert torch.equal(read.eval()(ids).logits, model(ids).logits)


IGNORED = [
    ("gemma2", {"head_dim": 16}, {"attention.key_length": 16}, "would use 256"),
    ("gemma2", {}, {"final_logit_softcapping": 10.0}, r"would use 30\.0"),
    ("starcoder2", {}, {"attention.sliding_window": 64}, "would use 0"),
]


@pytest.mark.parametrize(("arch", "settings", "keys", "message"), IGNORED)
def test_settings_transformers_ignores_are_refused(arch, settings, keys, message, tmp_path) -> None:
    name, sizes, sound = KINDS[arch]
    file = write(tmp_path / "small.gguf", arch, small(name, **sizes | settings), sound | keys)
    with pytest.raises(CoterieError, match=message):
        load_model(file, torch.float32)


USED = [
    ("gemma2", "attention.sliding_window", "sliding_window"),
    ("qwen3moe", "expert_used_count", "num_experts_per_tok"),
]


@pytest.mark.parametrize(("arch", "key", "attribute"), USED)
def test_a_setting_of_the_file_is_used(arch, key, attribute, tmp_path) -> None:
    name, sizes, sound = KINDS[arch]
    file = write(tmp_path / "small.gguf", arch, small(name, **sizes), sound | {key: 3})
    assert getattr(load_model(file, torch.float32).config, attribute) == 3
