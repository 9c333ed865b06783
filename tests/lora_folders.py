"""LoRA adapters of random values, as PEFT saves them after training."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

LLAMA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 8}


def write_lora(folder: Path, base: Path, size: float = 0.2, **settings: Any) -> Path:
    """Write an adapter for a base, by default on some of a Llama's linear layers.

    Args:
        folder: The folder for the adapter.
        base: The folder of the base.
        size: Standard deviation of the factors that PEFT initialises to zero.
        **settings: Settings of PEFT's LoraConfig.

    Returns:
        The folder of the adapter.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **LLAMA | settings))
    torch.manual_seed(0)
    for name, values in adapted.named_parameters():
        if values.requires_grad and ".lora_A." not in name and ".lora_embedding_B." not in name:
            values.data.normal_(0, size)
    adapted.save_pretrained(str(folder))
    return folder
