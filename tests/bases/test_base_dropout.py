"""A base's own dropout: as in transformers' training mode, and gone afterwards."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coterie import CoterieError
from coterie.adapters import Adapter, Layout
from coterie.bases.dropout import base_dropout

RATE = 0.2
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
HEADS = {"n_layer": 2, "n_head": 2}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt2": ({**HEADS, "n_embd": 16}, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "llama": ({"intermediate_size": 24, **LAYERS}, ("attention_dropout",)),
    "opt": ({"ffn_dim": 24, "word_embed_proj_dim": 16, **LAYERS}, ("dropout", "attention_dropout")),
    "bloom": ({**HEADS, "hidden_size": 16}, ("hidden_dropout", "attention_dropout")),
}
"""The settings of a base, and the names of its dropout rates."""
IDS = torch.arange(3, 35).view(2, 16)


def made(kind: str, rate: float) -> PreTrainedModel:
    settings, names = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=61, **settings, **dict.fromkeys(names, rate))
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_transformers(kind) -> None:
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


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_mixture_drops_out_where_its_mlp_does(kind) -> None:
    base, other = made(kind, 0.0), made(kind, RATE).train()
    # The output of an untrained adapter is zero, so that only dropout changes the base's output.
    Adapter(base, Layout(), 0, "ada", lambda _: True).attach(base)
    torch.manual_seed(7)
    wanted = other(IDS).logits
    with base_dropout(base, RATE, 7):
        torch.testing.assert_close(base(IDS).logits, wanted)


def test_a_base_without_dropout_is_told() -> None:
    bare = cast(PreTrainedModel, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CoterieError, match=r"has no dropout of its own; remove training\.base"):
        base_dropout(bare, RATE, 7).__enter__()
