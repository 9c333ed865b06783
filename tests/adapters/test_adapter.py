"""Adapters of different clients over one base: names, first values, attaching and detaching."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from coterie.adapters import Adapter, Layout, detach, of_roles
from coterie.errors import CoterieError

ALL: tuple[str, ...] = ("dense", "generalist", "specialist", "router")


def adapter_of(base: nn.Module, client: str = "ada", layout: Layout | None = None) -> Adapter:
    return Adapter(
        base,
        layout or Layout(),
        seed=3,
        client=client,
        common=lambda parameter: parameter.role in ("generalist", "dense"),
    )


def roles(adapter: Adapter) -> dict[str, str]:
    return {name: part.role for name, part in adapter.parameters().items()}


def randomise(adapter: Adapter, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for parameter in adapter.tensors().values():
        parameter.data.normal_(std=0.3, generator=chance)


def test_names_roles_and_shapes(base: PreTrainedModel) -> None:
    adapter = adapter_of(base, layout=Layout(1, 2, rank=5, attention_rank=3))
    parameters = adapter.tensors()
    assert list(parameters) == sorted(parameters)
    assert roles(adapter) == {name: name.split("/")[0].split(".")[0] for name in parameters}
    up = "transformer.h.0.mlp.c_fc"
    attention = "transformer.h.1.attn.c_attn"
    if base.config.model_type == "llama":
        up, attention = "model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.q_proj"
    mlp = up.rpartition(".")[0]
    assert parameters[f"specialist.1/{up}.A"].shape == (5, 12)
    assert parameters[f"generalist.0/{up}.B"].shape == (20, 5)
    assert parameters[f"dense/{attention}.A"].shape == (3, 12)
    assert parameters[f"router/{mlp}.weight"].shape == (3, 12)
    assert {n for n in parameters if n.startswith("generalist.0/")} == set(
        adapter.tensors(of_roles("generalist"))
    )
    linears = 2 if base.config.model_type == "gpt2" else 3
    assert len(adapter.tensors(of_roles("specialist"))) == 2 * 2 * linears * 2
    assert set(adapter.tensors(of_roles("router", "dense"))) == {
        name for name, role in roles(adapter).items() if role in ("router", "dense")
    }


def test_first_values(base: PreTrainedModel) -> None:
    ada, bob = adapter_of(base, "ada"), adapter_of(base, "bob")
    for name, mine in ada.tensors().items():
        other = bob.tensors()[name]
        if name.endswith(".B"):
            assert not mine.any()
        elif roles(ada)[name] in ("generalist", "dense"):
            assert torch.equal(mine, other)
        else:
            assert not torch.equal(mine, other)
        if name.endswith(".A"):
            bound = mine.shape[1] ** -0.5  # Kaiming uniform with a = sqrt 5
            assert 0.5 * bound < mine.abs().max().item() <= bound
        assert torch.equal(mine, adapter_of(base, "ada").tensors()[name])
    routers = torch.cat([p.flatten() for p in ada.tensors(of_roles("router")).values()])
    assert 0.01 < routers.std().item() < 0.03


def test_first_values_do_not_depend_on_the_rest_of_the_layout(base: PreTrainedModel) -> None:
    small, large = adapter_of(base), adapter_of(base, layout=Layout(1, 3, attention_rank=0))
    shared = set(small.tensors(of_roles("generalist", "specialist")))
    for name in shared:
        assert torch.equal(small.tensors()[name], large.tensors()[name])


def test_a_fresh_adapter_changes_nothing(base: PreTrainedModel, ids: Tensor) -> None:
    bare = base(ids).logits
    for layout in (Layout(), Layout(2, 3), Layout(1, 0), Layout(2, 0, routed=False)):
        adapter_of(base, layout=layout).attach(base)
        torch.testing.assert_close(base(ids).logits, bare, rtol=0, atol=1e-12)


def test_many_adapters_over_one_base(base: PreTrainedModel, ids: Tensor) -> None:
    bare, state = base(ids).logits, {n: p.clone() for n, p in base.state_dict().items()}
    layouts = (Layout(), Layout(2, 2), Layout(0, 0), Layout(1, 0, attention_rank=0))
    adapters = [adapter_of(base, f"client {i}", layout) for i, layout in enumerate(layouts)]
    alone = []
    for i, adapter in enumerate(adapters):
        randomise(adapter, i)
        adapter.attach(base)
        alone.append(base(ids).logits)
        detach(base)
        assert torch.equal(base(ids).logits, bare)
    for i in (0, 1, 1, 0, 2, 3, 1, 3, 0):
        adapters[i].attach(base)
        assert torch.equal(base(ids).logits, alone[i])
    # An adapter made while another is attached is made for the bare base.
    late = adapter_of(base, "client 1", layouts[1])
    assert list(late.tensors()) == list(adapters[1].tensors())
    detach(base)
    assert torch.equal(base(ids).logits, bare)
    assert base.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    assert not torch.equal(alone[0], alone[1])


def test_only_the_roles_asked_for_are_trained(base: PreTrainedModel, ids: Tensor) -> None:
    own = dict(base.named_parameters())
    adapter = adapter_of(base)
    randomise(adapter, 0)
    adapter.attach(base)
    choices: list[tuple[str, ...]] = [("router",), ("dense", "specialist"), ALL]
    for chosen in choices:
        adapter.require_grad(of_roles(*chosen))
        base(ids, labels=ids).loss.backward()
        for name, parameter in adapter.tensors().items():
            assert (parameter.grad is not None) == (roles(adapter)[name] in chosen)
            parameter.grad = None
        assert all(p.grad is None and not p.requires_grad for p in own.values())


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2)], ids=["two", "four, top 2"])
def test_generation_with_cache_equals_without(
    base: PreTrainedModel, ids: Tensor, layout: Layout
) -> None:
    adapter = adapter_of(base, layout=layout)
    randomise(adapter, 0)
    adapter.attach(base)
    base.eval()
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    cached, plain = (base.generate(ids, use_cache=use, **options) for use in (True, False))  # pyright: ignore
    assert cached.shape == (3, 17)
    assert torch.equal(cached, plain)


def test_a_base_without_values_teaches_names_and_shapes(
    make: Callable[[], PreTrainedModel], ids: Tensor
) -> None:
    base = make()
    with torch.device("meta"):
        hollow = make()
    mine, theirs = adapter_of(base), adapter_of(hollow)
    assert roles(mine) == roles(theirs)
    for name, parameter in theirs.tensors().items():
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, mine.tensors()[name])
        parameter.data.add_(0.1)
        mine.tensors()[name].data.add_(0.1)
    mine.attach(base)
    expected = base(ids).logits
    theirs.attach(base)
    assert torch.equal(base(ids).logits, expected)


def test_an_unknown_model_is_refused_by_name() -> None:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9
    )
    with pytest.raises(CoterieError, match="BertForMaskedLM has no MLP or other block"):
        adapter_of(BertForMaskedLM(config))
