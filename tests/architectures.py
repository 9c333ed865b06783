"""Small random models of the architectures that people bring, by transformers' names."""

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coterie.adapters import Adapter, Layout
from coterie.adapters.coverage import coverage

SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 64},
    **{"vocab_size": 128, "max_position_embeddings": 64},
}
GPT = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 64}
MIXED = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
HEADS = {"head_dim": 8}
PADDED = {"pad_token_id": 0}
HYBRID = {
    **HEADS,
    "num_hidden_layers": 4,  # of which the last has attention
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
ROUTED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8}
GROUPS = {"d_ssm": 64, "n_heads": 8, "d_head": 8, "n_groups": 1, "d_state": 8, "chunk_size": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neo": {
        **{"num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
        **{"vocab_size": 128, "max_position_embeddings": 64},
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {**GPT, "rotary_dim": 8},
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128},
    "falcon": {**SMALL, "new_decoder_architecture": False, "multi_query": True},
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, **HEADS},
    "qwen3_5_text": {**SMALL, **HYBRID},
    "gemma": {**SMALL, **HEADS},
    "gemma2": {**SMALL, **HEADS},
    "gemma3_text": {**SMALL, **HEADS},
    "gemma4_text": {**SMALL, **HEADS},
    "phi": SMALL,
    "phi3": {**SMALL, **PADDED},
    "smollm3": {**SMALL, **PADDED},
    "olmo2": SMALL,
    "stablelm": SMALL,
    "granite": SMALL,
    "cohere": SMALL,
    "starcoder2": SMALL,
    "glm4": {**SMALL, **HEADS, **PADDED},
    "mixtral": {**SMALL, **MIXED},
    "qwen3_moe": {**SMALL, **HEADS, **MIXED, **ROUTED},
    "qwen3_5_moe_text": {**SMALL, **HYBRID, **MIXED, **ROUTED},
    "gpt_oss": {**SMALL, **HEADS, **MIXED},
    "mamba": MAMBA,
    "mamba2": {**MAMBA, **HEADS, "num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_h1": {
        **SMALL,
        **{f"mamba_{name}": size for name, size in GROUPS.items()},
        "mlp_multipliers": [0.5, 0.25],
    },
}
"""Settings of a small one, by the name of the architecture."""

WITHOUT_MLP = ("mixtral", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "mamba", "mamba2")
"""Whose layers hold a mixture of experts, or no MLP at all."""


def small_model(name: str, **settings: Any) -> PreTrainedModel:
    """Return a random model of an architecture, in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**ARCHITECTURES[name], **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def table() -> str:
    """Return a Markdown table of the layers with adapters; equal architectures share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in ARCHITECTURES:
        config = AutoConfig.for_model(name, **ARCHITECTURES[name])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        places = stands(model, Layout())
        experts = re.sub(r"beside \w+", "beside the block", places["experts"])
        experts = re.sub(r"inside \w+", "inside", experts)
        lora = re.sub(r"\w+ \((.*?)\)", r"\1", places["LoRA"])
        lora = re.sub(r", (\d+) in (\d+)", r" in \1 of \2 layers", lora)
        rows.setdefault((experts, lora), []).append(name)
    lines = ["| architecture | experts (`mlp`) | LoRA (`attention`) |\n", "| --- | --- | --- |\n"]
    lines += [f"| {', '.join(n)} | {experts} | {lora} |\n" for (experts, lora), n in rows.items()]
    return "".join(lines)


def stands(model: PreTrainedModel, layout: Layout) -> dict[str, str]:
    """Return the layers of an adapter as a cell of a table, by kind of adapter."""
    covered = coverage(model, Adapter(model, layout, 0, "", lambda _: True).parameters().values())
    places_of: dict[str, list[str]] = {}
    for (kind, where), numbers in covered.covered.items():
        some = "" if len(numbers) == covered.total else f", {len(numbers)} in {covered.total}"
        places_of.setdefault(kind, []).append(where.removeprefix("on ") + some)
    assert not covered.others
    return {kind: "; ".join(places) for kind, places in places_of.items()}
