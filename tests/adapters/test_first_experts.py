"""Each token's first expert is the one that the router scores highest."""

from typing import Any

import pytest
import torch
from torch import nn

from coterie.adapters import (
    Adapter,
    Layout,
    Mixture,
    expert_roles,
    first_experts,
    fix_factors,
    role_weights,
)


def attached(base, **layout: Any) -> Adapter:
    """Attach an adapter with three experts, unless the layout has another number."""
    numbers: dict[str, Any] = {"generalists": 1, "specialists": 2}
    adapter = Adapter(base, Layout(**numbers | layout), seed=0, client="a", common=lambda _: False)
    adapter.attach(base)
    return adapter


def test_first_experts_are_the_routers_highest_scores(base) -> None:
    attached(base, top_k=2)
    seen: dict[str, torch.Tensor] = {}
    named: Any = base.named_modules()
    mixtures = {path: module for path, module in named if isinstance(module, Mixture)}
    for path, mixture in mixtures.items():

        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...], path: str = path) -> None:
            seen[path] = inputs[0]

        mixture.register_forward_pre_hook(see)
    base(input_ids=torch.arange(24).view(2, 12))
    first = first_experts(base)
    assert list(first) == list(mixtures)
    for path, mixture in mixtures.items():
        scores = torch.einsum("btd,nd->btn", seen[path], mixture.router)
        assert first[path].tolist() == scores.argmax(-1).flatten().tolist()
    assert len({expert for experts in first.values() for expert in experts.tolist()}) > 1


def test_without_a_router_there_is_none(base) -> None:
    attached(base, routed=False)
    assert first_experts(base) == {}


def test_role_weights_are_the_sums_of_the_experts_weights(base) -> None:
    # With top-2 of three experts, the weight of the third is 0.
    adapter = attached(base, top_k=2)
    for parameter in adapter.parameters().values():
        if parameter.role == "router":
            torch.nn.init.normal_(parameter.tensor)
    base(input_ids=torch.arange(24).view(2, 12))
    weights = role_weights(base)
    assert expert_roles(base) == ("generalist", "specialist", "specialist")
    sizes = {role: [*w.shape] for role, w in weights.items()}
    assert sizes == {"generalist": [24], "specialist": [24]}
    means = torch.stack(list(adapter.routing().values())).mean(0)
    torch.testing.assert_close(weights["generalist"].mean(), means[0])
    torch.testing.assert_close(weights["specialist"].mean(), means[1:].sum())
    assert weights["generalist"].std() > 0


@pytest.mark.parametrize("top_k", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fixing_the_factors_changes_no_output(top_k, dtype, base) -> None:
    base.to(dtype)
    adapter = attached(base, top_k=top_k)
    for parameter in adapter.parameters().values():
        torch.nn.init.normal_(parameter.tensor, std=0.1)
    inputs = [torch.arange(24).view(2, 12), torch.arange(7)[None]]
    expected = [base(input_ids=ids).logits for ids in inputs]
    fix_factors(base)
    pairs = [p for p in adapter.parameters().values() if p.factor is not None]
    assert {p.tensor.dtype for p in pairs} == {dtype}
    for _ in range(2):
        for ids, logits in zip(inputs, expected, strict=True):
            assert torch.equal(base(input_ids=ids).logits, logits)
    for parameter in pairs:
        parameter.tensor.data.zero_()  # mixtures join the factors only once
    assert not torch.equal(base(input_ids=inputs[0]).logits, expected[0])  # those of the attention
    mixtures = [m for m in base.modules() if isinstance(m, Mixture)]
    assert all(len(m.fixed or ()) == len(m.shape.linears) for m in mixtures)
