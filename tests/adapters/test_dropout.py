"""LoRA dropout against the naive form: every pair's A reads its input times a mask of its own."""

from dataclasses import replace
from typing import Any

import naive_mixture
import pytest
import torch
from naive_amole import NaiveAmole
from tensors import fill
from torch import Tensor, nn
from transformers import PreTrainedModel

from coterie.adapters import Adapter, AmoleAdapter, AmoleLayout, Layout, LoraLinear, of_roles
from coterie.adapters import dropout as dropping
from coterie.adapters.dropout import drawing_masks
from coterie.bases.sites import chosen_linears, mlp_shape

RATE = 0.3
KINDS = ("two", "four, top 2", "four, top 1", "four, averaged")
LAYOUTS = {name: replace(naive_mixture.LAYOUTS[name], dropout=RATE) for name in KINDS}
AMOLE = AmoleLayout(experts=9, rank=3, alpha=7.0, dropout=RATE)


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every mask that is drawn, in order."""
    drawn: list[Tensor] = []
    original = dropping.mask_like

    def mask_like(x: Tensor, rate: float) -> Tensor:
        drawn.append(original(x, rate))
        return drawn[-1]

    monkeypatch.setattr(dropping, "mask_like", mask_like)
    monkeypatch.setattr("coterie.adapters.mixture.mask_like", mask_like)
    return drawn


def filled(base: nn.Module, layout: Layout | AmoleLayout) -> Any:
    if isinstance(layout, Layout):
        adapter = Adapter(base, layout, seed=3, client="ada", common=lambda _: False)
    else:
        held = dict.fromkeys(chosen_linears(base, layout.targets), (1, 4, 5))
        adapter = AmoleAdapter(base, layout, 3, held)
    fill(adapter.tensors(), 0.3, 5)
    return adapter


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_mixtures_pairs_have_masks_of_their_own(
    base: PreTrainedModel, layout: Layout, masks: list[Tensor]
) -> None:
    adapter = filled(base, layout)
    adapter.require_grad(of_roles("dense", "generalist", "specialist", "router"))
    path = next(name for name, _ in base.named_modules() if name.endswith("1.mlp"))
    mlp = base.get_submodule(path)
    base.requires_grad_(False)
    x, dy = torch.randn(2, 15, 12, dtype=torch.float64, generator=chance()).unbind()
    x.requires_grad_()
    parameters = {n: p for n, p in adapter.tensors().items() if path in n}
    adapter.attach(base)
    with drawing_masks(chance()):
        y = base.get_submodule(path)(x)
    shape: Any = mlp_shape(mlp)
    assert len(masks) == len(shape.up) * layout.experts + 1
    got = torch.autograd.grad(y, [x, *parameters.values()], dy)
    wanted = naive_mixture.naive_mixture(mlp, layout, path, parameters, x, masks)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-9)
    expected = torch.autograd.grad(wanted, [x, *parameters.values()], dy)
    for name, a, b in zip(["x", *parameters], got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_single_pairs_a_reads_what_is_left(base: PreTrainedModel, masks: list[Tensor]) -> None:
    adapter = filled(base, LAYOUTS["two"])
    adapter.attach(base)
    linear = next(module for module in base.modules() if isinstance(module, LoraLinear))
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=chance())
    with drawing_masks(chance()):
        y = linear(x)
    A, B = linear.lora.A, linear.lora.B
    plain, low = linear.base(x).flatten(0, 1), (x.flatten(0, 1) * masks[0]) @ A.T
    torch.testing.assert_close(y.flatten(0, 1), plain + linear.gain * low @ B.T)


@pytest.mark.parametrize("shared", [True, False])
def test_amoles_experts_have_masks_of_their_own_and_the_router_none(
    base: PreTrainedModel, shared: bool, masks: list[Tensor]
) -> None:
    layout, held = replace(AMOLE, shared=shared), (1, 4, 5)
    adapter = filled(base, layout)
    path, linear = next(iter(chosen_linears(base, layout.targets).items()))
    p = {name: part.tensor for name, part in adapter.parameters().items()}
    x = torch.randn(4, 12, dtype=torch.float64, generator=chance())
    adapter.attach(base)
    with drawing_masks(chance()):
        y = base.get_submodule(path)(x[None])[0]
    naive = NaiveAmole(linear, path, layout, held, p)
    naive.masks = masks
    torch.testing.assert_close(y, naive(x))


@pytest.mark.parametrize("layout", [LAYOUTS["two"], AMOLE], ids=["mixture", "amole"])
def test_nothing_drops_out_but_in_training(
    base: PreTrainedModel, ids: Tensor, layout: Any, masks: list[Tensor]
) -> None:
    # In training, the given generator decides, not torch's own.
    filled(base, layout).attach(base)
    plain = base(ids).logits
    assert not masks
    before, logits = torch.random.get_rng_state(), []
    for seed in (1, 1, 2):
        torch.manual_seed(len(logits))
        with drawing_masks(torch.Generator().manual_seed(seed)):
            logits.append(base(ids).logits)
    torch.random.set_rng_state(before)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert not torch.allclose(logits[0], plain)
    assert torch.equal(base(ids).logits, plain)


def test_a_mask_keeps_the_mean() -> None:
    with drawing_masks(chance()):
        mask = dropping.mask_like(torch.zeros(100_000), RATE)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - RATE)).item()}
    assert mask.mean().item() == pytest.approx(1, abs=0.01)
