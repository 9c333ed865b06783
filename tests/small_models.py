"""Tiny random models of two layers, without dropout, and a base with a chat template."""

import shutil
from pathlib import Path
from typing import Any

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from coterie.bases import EMBEDDED

VOCABULARY = 61


def gpt2(layers: int = 2) -> PreTrainedModel:
    sizes: dict[str, Any] = {"n_embd": 12, "n_head": 2, "n_inner": 20, "n_positions": 32}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    sizes |= {"n_layer": layers, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def llama(layers: int = 2, tied: bool = False) -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def write_assistant(path: str | Path) -> str:
    """Write a base that has a chat template of its own, and return its path."""
    shutil.copytree(EMBEDDED / "tiny-gpt2", path, dirs_exist_ok=True)
    shutil.copy(EMBEDDED / "chat.jinja", Path(path, "chat_template.jinja"))
    return str(path)
