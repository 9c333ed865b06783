"""Tiny random bases, in float64 so that equal formulas agree to rounding."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 61


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        n_layer=2, n_embd=12, n_head=2, n_inner=20, n_positions=32, vocab_size=VOCABULARY,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=12, intermediate_size=20, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def make(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    return request.param


@pytest.fixture
def base(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().double()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
