"""A base's own dropout: as in transformers' training mode, and gone afterwards."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from coterie import CoterieError
from coterie.adapters import Adapter, Layout
from coterie.bases.dropout import base_dropout

RATE = 0.2
SIZES: dict[str, Any] = {"vocab_size": 61}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
IDS = torch.arange(3, 35).view(2, 16)


def gpt2(rate: float) -> PreTrainedModel:
    rates: dict[str, Any] = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, **SIZES, **rates))


def llama(rate: float) -> PreTrainedModel:
    config = LlamaConfig(intermediate_size=24, attention_dropout=rate, **SIZES, **LAYERS)
    return LlamaForCausalLM(config)


def opt(rate: float) -> PreTrainedModel:
    config = OPTConfig(
        ffn_dim=24, word_embed_proj_dim=16, dropout=rate, attention_dropout=rate, **SIZES, **LAYERS
    )
    return OPTForCausalLM(config)


def bloom(rate: float) -> PreTrainedModel:
    rates: dict[str, Any] = {"hidden_dropout": rate, "attention_dropout": rate}
    return BloomForCausalLM(BloomConfig(n_layer=2, hidden_size=16, n_head=2, **SIZES, **rates))


def made(kind: Any, rate: float) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(rate).eval()


@pytest.mark.parametrize("kind", [gpt2, llama, opt, bloom])
def test_it_is_that_of_transformers(kind: Any) -> None:
    base, other = made(kind, 0.0), made(kind, RATE).train()
    plain = base(IDS).logits
    torch.manual_seed(7)
    wanted = other(IDS).logits
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with base_dropout(base, RATE, 7):
        assert torch.equal(base(IDS).logits, wanted)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(base(IDS).logits, plain)
    with pytest.raises(KeyError), base_dropout(base, RATE, 7):
        raise KeyError
    assert torch.equal(base(IDS).logits, plain)
    with base_dropout(base, 0.0, 7):
        assert torch.equal(base(IDS).logits, plain)
    assert not torch.equal(wanted, plain)


@pytest.mark.parametrize("kind", [gpt2, llama])
def test_a_mixture_drops_out_where_its_mlp_does(kind: Any) -> None:
    """Pairs begin as zero, so nothing but dropout tells them from the base."""
    base, other = made(kind, 0.0), made(kind, RATE).train()
    Adapter(base, Layout(), 0, "ada", lambda _: True).attach(base)
    torch.manual_seed(7)
    wanted = other(IDS).logits
    with base_dropout(base, RATE, 7):
        torch.testing.assert_close(base(IDS).logits, wanted)


def test_a_base_without_dropout_is_told() -> None:
    bare = cast(PreTrainedModel, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CoterieError, match=r"has no dropout of its own; remove training\.base"):
        base_dropout(bare, RATE, 7).__enter__()
