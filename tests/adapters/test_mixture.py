"""The fused mixture against the published way: a full MLP per expert, weighed by the router."""

from itertools import product
from typing import Any

import pytest
import torch
from naive_mixture import LAYOUTS, naive_mixture
from tensors import fill
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from coterie.adapters import Adapter, Layout, Mixture, first_experts, of_roles
from coterie.bases.padding import real_tokens
from coterie.errors import CoterieError


def filled(base: nn.Module, layout: Layout) -> Adapter:
    """Return an adapter whose B are not zero, and whose routers are not nearly uniform."""
    adapter = Adapter(base, layout, seed=3, client="ada", common=lambda _: False)
    fill(adapter.tensors(), 0.3, 5)
    adapter.require_grad(of_roles("dense", "generalist", "specialist", "router"))
    return adapter


def attached(base: PreTrainedModel, layout: Layout) -> Adapter:
    adapter = filled(base, layout)
    adapter.attach(base)
    return adapter


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_output_and_gradients_equal_naive_ones(base: PreTrainedModel, layout: Layout) -> None:
    adapter = filled(base, layout)
    path = next(name for name, _ in base.named_modules() if name.endswith("1.mlp"))
    base_mlp = base.get_submodule(path)
    base.requires_grad_(False)
    chance = torch.Generator().manual_seed(7)
    for name, parameter in base_mlp.named_parameters():
        if name.endswith("bias"):  # new models have biases of zero
            parameter.normal_(std=0.3, generator=chance)
    x = torch.randn(3, 5, 12, dtype=torch.float64, generator=chance).requires_grad_()
    dy = torch.randn(3, 5, 12, dtype=torch.float64, generator=chance)
    parameters = {n: p for n, p in adapter.tensors().items() if path in n}
    y = naive_mixture(base_mlp, layout, path, parameters, x)
    wanted = [x, *parameters.values()]
    expected = torch.autograd.grad(y, wanted, dy)
    adapter.attach(base)
    mixture = base.get_submodule(path)
    torch.testing.assert_close(mixture(x), y, rtol=0, atol=1e-9)
    got = torch.autograd.grad(mixture(x), wanted, dy)
    for name, a, b in zip(["x", *parameters], got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("role", ["generalist", "router"])
def test_gradients_depend_on_no_other_role(base: PreTrainedModel, ids: Tensor, role: str) -> None:
    # Steps of experts and steps of routers skip parts of the explicit gradient.
    adapter = attached(base, Layout(2, 2, rank=3))
    base(ids, labels=ids).loss.backward()
    everything = {n: p.grad for n, p in adapter.tensors().items()}
    for parameter in adapter.tensors().values():
        parameter.grad = None
    adapter.require_grad(of_roles(role))
    base(ids, labels=ids).loss.backward()
    for name, parameter in adapter.tensors().items():
        if adapter.parameters()[name].role == role:
            torch.testing.assert_close(parameter.grad, everything[name], rtol=0, atol=1e-12)
        else:
            assert parameter.grad is None
    trained = {*map(id, adapter.tensors().values())}
    assert not any(p.requires_grad for p in base.parameters() if id(p) not in trained)


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_new", "silu", "quick_gelu", "gelu_fast"])
def test_every_activation_is_the_bases_own(base: PreTrainedModel, ids: Tensor, act: str) -> None:
    for mlp in [module for name, module in base.named_modules() if name.endswith(".mlp")]:
        setattr(mlp, "act" if hasattr(mlp, "act") else "act_fn", ACT2FN[act])
    weight: Any = base.get_input_embeddings().weight
    logits = base(ids).logits
    expected = torch.autograd.grad(logits.square().mean(), weight)[0]
    Adapter(base, Layout(), seed=0, client="ada", common=lambda _: False).attach(base)
    weight.requires_grad_(True)
    torch.testing.assert_close(base(ids).logits, logits, rtol=0, atol=1e-10)
    got = torch.autograd.grad(base(ids).logits.square().mean(), weight)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def routed_with(logits: Tensor, top_k: int, base: PreTrainedModel) -> Mixture:
    """Return a mixture whose last forward pass had these router logits, (tokens, experts)."""
    layout = Layout(1, logits.shape[1] - 1, top_k=top_k)
    adapter = Adapter(base, layout, seed=0, client="ada", common=lambda _: False)
    adapter.attach(base)
    mixture: Any = next(m for m in base.modules() if isinstance(m, Mixture))
    x = torch.zeros(len(logits), 12, dtype=torch.float64)
    x[:, : len(logits[0])] = logits
    mixture.router.data = torch.eye(12, dtype=torch.float64)[: len(logits[0])]
    mixture(x)
    return mixture


def test_load_balance_equals_its_formula(base: PreTrainedModel) -> None:
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mixture = routed_with(logits, 2, base)
    f = [0.0] * 4
    for row in logits.tolist():
        for j in sorted(range(4), key=lambda j: -row[j])[:2]:
            f[j] += 1 / (2 * 40)
    P = logits.softmax(-1).mean(0).tolist()
    uniform = 4 * sum(a * b for a, b in zip(f, P, strict=True))
    generalist = 2 * f[0] * P[0] + 2 * 3 * sum(f[j] * P[j] for j in (1, 2, 3))
    balances = [mixture.load_balance(f).item() for f in ("uniform", "generalist")]
    assert balances == pytest.approx([uniform, generalist], abs=1e-12)
    weights = torch.zeros(4, dtype=torch.float64)
    for row in logits:
        best, chosen = row.topk(2)
        weights[chosen] += best.softmax(0) / 40
    torch.testing.assert_close(mixture.routing(), weights)


@pytest.mark.parametrize(
    ("form", "counts"), [("uniform", [1, 1, 1, 1]), ("generalist", [3, 1, 1, 1])]
)
def test_the_best_load_balance_is_one(base: PreTrainedModel, form: str, counts: list[int]) -> None:
    # Each token chooses one expert with certainty, so that f and P are both the shares.
    chosen = torch.cat([torch.full((2 * c,), j) for j, c in enumerate(counts)])
    logits = 60.0 * torch.nn.functional.one_hot(chosen, 4).double()
    loss = routed_with(logits, 1, base).load_balance(form)  # pyright: ignore[reportArgumentType]
    assert loss.item() == pytest.approx(1, abs=1e-12)


def test_load_balance_of_two_experts_is_constant(base: PreTrainedModel, ids: Tensor) -> None:
    adapter = attached(base, Layout())
    base(ids)
    assert not adapter.balances
    for form in ("uniform", "generalist"):
        loss = adapter.load_balance(form)
        assert loss.item() == pytest.approx(1, abs=1e-12)
        assert not loss.requires_grad


def test_load_balance_is_a_mean_and_trains_routers(base: PreTrainedModel, ids: Tensor) -> None:
    adapter = attached(base, Layout(1, 3))
    base(ids)
    assert adapter.balances
    layers = [m.load_balance("uniform") for m in base.modules() if isinstance(m, Mixture)]
    loss = adapter.load_balance("uniform")
    torch.testing.assert_close(loss, sum(layers) / len(layers))
    loss.backward()
    routers = adapter.tensors(of_roles("router")).values()
    assert all(p.grad is not None and p.grad.any() for p in routers)
    assert all(w.sum().item() == pytest.approx(1) for w in adapter.routing().values())


def test_no_router_no_balance(base: PreTrainedModel) -> None:
    for layout in (Layout(1, 0), Layout(2, 2, routed=False), Layout(0, 0)):
        adapter = Adapter(base, layout, seed=0, client="ada", common=lambda _: False)
        assert not adapter.tensors(of_roles("router"))
        assert not adapter.balances
        assert adapter.routing() == {}
        with pytest.raises(CoterieError, match="no router"):
            adapter.load_balance("uniform")


@pytest.mark.parametrize(("experts", "k"), product([1, 3], [0, 4]))
def test_top_k_larger_than_experts_is_refused(experts: int, k: int) -> None:
    with pytest.raises(CoterieError, match=f"top_k is {k}"):
        Layout(experts, 0, top_k=k)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2)], ids=["two", "four, top 2"])
def test_under_autocast_near_float32(base: PreTrainedModel, ids: Tensor, layout: Layout) -> None:
    base.float()
    adapter = attached(base, layout)
    exact = base(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = base(ids, labels=ids).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32
               for p in adapter.tensors().values())  # fmt: skip


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2)], ids=["two", "four, top 2"])
def test_routing_figures_omit_padding(base: PreTrainedModel, ids: Tensor, layout: Layout) -> None:
    adapter = attached(base, layout)
    short = ids[:1, :-4]
    base(short)
    expected = {**adapter.routing(), "balance": adapter.load_balance("uniform").detach()}
    first = first_experts(base)
    real = torch.ones_like(ids[:1], dtype=torch.bool)
    real[:, -4:] = False
    with real_tokens(real):
        base(ids[:1])
    figures = {**adapter.routing(), "balance": adapter.load_balance("uniform").detach()}
    for name, value in expected.items():
        torch.testing.assert_close(figures[name], value)
    assert all(torch.equal(first_experts(base)[path], chosen) for path, chosen in first.items())
    base(ids[:1])  # without the mask the padding would count
    assert not all(torch.allclose(adapter.routing()[path], expected[path]) for path in first)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_of_the_wide_part_only_the_frozen_products_are_kept(
    base: PreTrainedModel, ids: Tensor, layout: Layout
) -> None:
    # These make up most of the activations of a long window, however many experts there are.
    attached(base, layout)
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    mlp = next(module for module in base.modules() if isinstance(module, Mixture))
    x = torch.randn(ids.numel(), 12, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(x)
    assert shapes.count((ids.numel(), 20)) == len(mlp.shape.up)
