"""Adapters of different clients over one base: names, first values, attaching and detaching."""

from typing import Any

import pytest
import torch
from tensors import equal, fill
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from coterie.adapters import Adapter, Layout, detach, of_roles
from coterie.errors import CoterieError


def adapter_of(base: nn.Module, client: str = "ada", layout: Layout | None = None) -> Adapter:
    shared = of_roles("generalist", "dense")
    return Adapter(base, layout or Layout(), seed=3, client=client, common=shared)


def roles(adapter: Adapter) -> dict[str, str]:
    return {name: part.role for name, part in adapter.parameters().items()}


def test_first_values(base: PreTrainedModel) -> None:
    ada, bob = adapter_of(base, "ada"), adapter_of(base, "bob")
    for name, tensor in ada.tensors().items():
        other = bob.tensors()[name]
        if name.endswith(".B"):
            assert not tensor.any()
        elif roles(ada)[name] in ("generalist", "dense"):
            assert torch.equal(tensor, other)
        else:
            assert not torch.equal(tensor, other)
        if name.endswith(".A"):
            bound = tensor.shape[1] ** -0.5  # Kaiming uniform with a = sqrt 5
            assert 0.5 * bound < tensor.abs().max().item() <= bound
        assert torch.equal(tensor, adapter_of(base, "ada").tensors()[name])
    routers = torch.cat([p.flatten() for p in ada.tensors(of_roles("router")).values()])
    assert 0.01 < routers.std().item() < 0.03


def test_first_values_do_not_depend_on_the_rest_of_the_layout(base: PreTrainedModel) -> None:
    small, large = adapter_of(base), adapter_of(base, layout=Layout(1, 3, attention_rank=0))
    for name in small.tensors(of_roles("generalist", "specialist")):
        assert torch.equal(small.tensors()[name], large.tensors()[name])


def test_many_adapters_over_one_base(base: PreTrainedModel, ids: Tensor) -> None:
    bare, state = base(ids).logits, {n: p.clone() for n, p in base.state_dict().items()}
    layouts = (Layout(), Layout(2, 3), Layout(1, 0, attention_rank=0), Layout(2, 0, routed=False))
    adapters = [adapter_of(base, f"client {i}", layout) for i, layout in enumerate(layouts)]
    alone = []
    for i, adapter in enumerate(adapters):
        adapter.attach(base)
        torch.testing.assert_close(base(ids).logits, bare, rtol=0, atol=1e-12)
        fill(adapter.tensors(), 0.3, i)
        alone.append(base(ids).logits)
        detach(base)
        assert torch.equal(base(ids).logits, bare)
    for i in (0, 1, 1, 0, 2, 3, 1, 3, 0):
        adapters[i].attach(base)
        assert torch.equal(base(ids).logits, alone[i])
    # An adapter made while another is attached is made for the bare base.
    assert list(adapter_of(base, "client 1", layouts[1]).tensors()) == list(adapters[1].tensors())
    detach(base)
    assert torch.equal(base(ids).logits, bare)
    assert equal(base.state_dict(), state)
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2)], ids=["two", "four, top 2"])
def test_a_cache_changes_no_text(base: PreTrainedModel, ids: Tensor, layout: Layout) -> None:
    adapter = adapter_of(base, layout=layout)
    fill(adapter.tensors(), 0.3, 0)
    adapter.attach(base)
    base.eval()
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    cached, plain = (base.generate(ids, use_cache=use, **options) for use in (True, False))  # pyright: ignore
    assert cached.shape == (3, 17)
    assert torch.equal(cached, plain)


def test_an_unknown_model_is_refused_by_name() -> None:
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 9}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    with pytest.raises(CoterieError, match="BertForMaskedLM has no MLP or other block"):
        adapter_of(BertForMaskedLM(config))
