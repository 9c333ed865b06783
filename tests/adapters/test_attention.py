"""Low-rank pairs on the attention of models whose MLPs no mixture knows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from coterie.adapters import Adapter, Layout, of_roles
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss, token_losses

CONFIGS = {
    "opt": OPTConfig(
        vocab_size=61, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0,
    ),
    "bloom": BloomConfig(vocab_size=61, hidden_size=16, n_layer=2, n_head=2),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    ),
}  # fmt: skip
PAIRS = Layout(0, 0, attention_rank=3, scale="rank", routed=False)


def base_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pairs_add_a_low_rank_product_to_the_weights(config: PreTrainedConfig) -> None:
    base, merged = base_of(config), base_of(config)
    adapter = Adapter(base, PAIRS, seed=0, client="ada", common=lambda _: False)
    chance = torch.Generator().manual_seed(1)
    for parameter in adapter.tensors().values():
        parameter.data = torch.randn(parameter.shape, generator=chance).double() / 3
    ids = torch.randint(4, 61, (3, 9), generator=chance)
    parts = adapter.tensors()
    for path in {name.removeprefix("dense/")[:-2] for name in parts}:
        weight = merged.get_submodule(path).weight
        assert isinstance(weight, torch.nn.Parameter)
        weight.data += 16 / 3 * parts[f"dense/{path}.B"] @ parts[f"dense/{path}.A"]
    adapter.attach(base)
    adapter.require_grad(of_roles("dense"))
    loss = language_model_loss(base, ids)
    wanted = F.cross_entropy(merged(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in parts.values())
    padded = torch.cat([ids, torch.full((3, 4), 1)], 1)
    torch.testing.assert_close(token_losses(base, ids), token_losses(base, padded)[:, :8])


def test_unknown_architectures_are_named() -> None:
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2))
    for layer in rwkv.rwkv.blocks:
        layer.attention = nn.Identity()
    with pytest.raises(CoterieError, match="RwkvForCausalLM has no supported attention"):
        Adapter(rwkv, PAIRS, 0, "ada", lambda _: False)
    with pytest.raises(CoterieError, match="RwkvForCausalLM has no MLP to which experts"):
        Adapter(rwkv, Layout(placement="inside"), 0, "ada", lambda _: False)
