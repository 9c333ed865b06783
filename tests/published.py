"""Bases without weights, with the shapes of published models from 0.5 to 8 billion parameters."""

import json
from pathlib import Path
from typing import Any

from coterie.bases import load_tokenizer

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
QWEN: dict[str, Any] = {"hidden_act": "silu", "vocab_size": 151936, "dtype": "bfloat16"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def write_published(folder: Path, name: str) -> Path:
    """Write the configuration of a published model, with the tokenizer of a built-in base."""
    path = folder / name
    load_tokenizer("tiny-gpt2").save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
    return path
