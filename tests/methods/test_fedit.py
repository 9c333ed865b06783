"""FedIT: which layers carry a pair, what the pairs do, and what the server makes of them."""

from typing import Any

import pytest
import torch
from torch import nn

from coterie.adapters import detach
from coterie.methods.averaging import FedIT
from coterie.testing.rounds import joined, step

LAYERS = {"gpt2": {"c_attn"}, "llama": {"q_proj", "v_proj"}}


@pytest.mark.parametrize("family", LAYERS)
def test_queries_and_values_carry_pairs_that_count_alpha_over_rank(config, bases, family) -> None:
    method = FedIT.model_validate({"attention": {"rank": 4}, "lora": {"alpha": 12.0}})
    local = joined(config(base=str(bases / family), method=method))
    local.open(local.config.turn(0), ["poet"])
    client: Any = local.clients["poet"]
    upload = step(local, "poet", 0)
    assert set(upload.groups) == {"adapter"}
    pairs = upload["adapter"]
    assert {name.split(".")[-2] for name in pairs} == LAYERS[family]
    assert {name.split("/")[0] for name in pairs} == {"dense"}
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = client.model()(input_ids=ids).logits
        base = client.context.base.model
        detach(base)
        for name in {name.removesuffix(".A").removesuffix(".B") for name in pairs}:
            linear = base.get_submodule(name.removeprefix("dense/"))
            A, B = (pairs[f"{name}.{end}"] for end in "AB")
            update = 12.0 / 4 * B @ A
            linear.weight += update if isinstance(linear, nn.Linear) else update.T
        assert torch.allclose(base(input_ids=ids).logits, expected, atol=1e-5)
