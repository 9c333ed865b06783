"""FedAMoLE's layers against a loop over tokens and experts, and adapters over one base."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_amole import NaiveAmole
from safetensors.torch import load, save
from tensors import equal, fill
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters import AmoleAdapter, AmoleLayout, LoraLinear, detach, of_roles
from coterie.adapters.layout import Layout
from coterie.bases.padding import real_tokens
from coterie.bases.sites import chosen_linears
from coterie.errors import CoterieError
from coterie.methods.tensors import copied, copy

ROLES: tuple[str, ...] = ("shared", "domain", "projection")
LAYOUT = AmoleLayout(experts=9, rank=3, alpha=7.0)
CASES: dict[str, tuple[AmoleLayout, list[int]]] = {
    "four, top 2": (LAYOUT, [1, 4, 5, 8]),
    "four, top 1": (replace(LAYOUT, top_k=1), [0, 2, 3, 8]),
    "four, top 3, paper": (replace(LAYOUT, top_k=3, renormalise=False, score_scale="dim"),
                           [1, 4, 5, 8]),
    "four, gate": (replace(LAYOUT, router="vanilla"), [1, 4, 5, 8]),
    "four, gate, paper": (replace(LAYOUT, router="vanilla", renormalise=False), [0, 4, 5, 7]),
    "four, none shared": (replace(LAYOUT, shared=False), [1, 4, 5, 8]),
    "four, first choices": (replace(LAYOUT, load="first"), [1, 4, 5, 8]),
    "two, first choices": (replace(LAYOUT, load="first"), [3, 7]),
    "two": (LAYOUT, [3, 7]),
    "one": (LAYOUT, [6]),
    "none": (LAYOUT, []),
    "none at all": (replace(LAYOUT, shared=False), []),
}  # fmt: skip


def adapter_of(
    base: PreTrainedModel, layout: AmoleLayout = LAYOUT, held: Sequence[int] = (1, 4, 5, 8)
) -> AmoleAdapter:
    """Return an adapter of random values, with one expert fewer on the last layer."""
    paths = list(chosen_linears(base, layout.targets))
    choice = dict.fromkeys(paths[:-1], held) | {paths[-1]: held[:-1]}
    adapter = AmoleAdapter(base, layout, 3, choice)
    fill(values(adapter), 0.5, 0)
    return adapter


def attached(base: PreTrainedModel, *arguments: Any) -> AmoleAdapter:
    adapter = adapter_of(base, *arguments)
    adapter.attach(base)
    adapter.require_grad(of_roles(*ROLES))
    return adapter


def values(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """Return the values that may be sent, by name; they are views, not copies."""
    return {name: part.tensor.data for name, part in adapter.parameters().items()}


def put_naive(base: PreTrainedModel, adapter: AmoleAdapter) -> dict[str, Tensor]:
    """Replace layers by naive ones, and return their values, by name, which require gradients."""
    p = {name: t.clone().requires_grad_() for name, t in values(adapter).items()}
    for path, linear in chosen_linears(base, adapter.layout.targets).items():
        held = [int(name[7:].split("/")[0]) for name in p if name.startswith("domain.")
                and name.endswith(f"/{path}.A")]  # fmt: skip
        base.set_submodule(path, NaiveAmole(linear, path, adapter.layout, held, p))
    return p


def naive_layers(base: PreTrainedModel) -> dict[str, NaiveAmole]:
    return {path: m for path, m in base.named_modules() if isinstance(m, NaiveAmole)}


def gradients(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """Return the gradients, by the names that are sent."""
    grads: dict[str, Tensor] = {}
    for name, parameter in adapter.tensors().items():
        assert parameter.grad is not None, name
        role, _, rest = name.partition("/")
        if role == "domain":
            held = adapter.linears[rest[:-2]].held
            pairs = zip(held, parameter.grad, strict=True)
            grads |= {f"domain.{e}/{rest}": grad for e, grad in pairs}
        else:
            grads[name] = parameter.grad
    return grads


def masked_loss(base: PreTrainedModel, ids: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean cross-entropy of the real tokens that follow real tokens."""
    with real_tokens(real):
        logits = base(ids).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.mean() if real is None else losses[real[:, 1:].flatten()].mean()


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_formula_s(
    make: Callable[[], PreTrainedModel], ids: Tensor, case: str
) -> None:
    torch.manual_seed(0)
    base = make().double()
    layout, held = CASES[case]
    real = torch.ones(3, 8, dtype=torch.bool)
    real[0, 5:] = real[2, 7:] = False
    adapter = attached(base, layout, held)
    loss = masked_loss(base, ids, real)
    balance, routing = adapter.load_balance(), adapter.routing()
    (loss + 0.1 * balance).backward()

    detach(base)
    p = put_naive(base, adapter)
    naive_loss = masked_loss(base, ids, real)
    rows = real.flatten().nonzero().flatten().tolist()
    layers = naive_layers(base)
    counted = layout.top_k if layout.load == "top_k" else 1
    terms = [m.load_balance(rows) for m in layers.values() if len(m.held) > counted]
    expected = sum(terms, torch.tensor(0.0, dtype=torch.double))
    assert adapter.balances == bool(terms)
    torch.testing.assert_close(loss, naive_loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(balance.double(), expected, rtol=1e-10, atol=0)
    for path, layer in layers.items():
        weights = torch.tensor(layer.weights or [[]] * 24, dtype=torch.double)
        torch.testing.assert_close(routing[path], weights[rows].mean(0), rtol=1e-10, atol=1e-12)
    if naive_loss.requires_grad:
        (naive_loss + 0.1 * expected).backward()
    actual = gradients(adapter)
    assert actual.keys() == p.keys()
    for name, value in p.items():
        grad = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(actual[name], grad, rtol=1e-8, atol=1e-12)
    if len(held) > 2:
        assert all(g.any() for name, g in actual.items() if not name.startswith("domain."))


def test_bf16_is_close(make: Callable[[], PreTrainedModel], ids: Tensor) -> None:
    torch.manual_seed(0)
    base = make()
    # All experts work, since rounding may tip a choice between two.
    adapter = attached(base, replace(LAYOUT, top_k=4))
    for tensor in values(adapter).values():
        tensor.mul_(0.3)  # large corrections make attention sharp, and that amplifies rounding
    exact = base(ids).logits
    masked_loss(base, ids, None).backward()
    parameters: dict[str, Any] = adapter.tensors()
    grads = copied({name: p.grad for name, p in parameters.items()})
    for p in parameters.values():
        p.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        logits = base(ids).logits
        loss = masked_loss(base, ids, None)
    loss.backward()
    assert not torch.equal(logits, exact)
    assert (logits.float() - exact).norm() < 0.02 * exact.norm()
    for name, grad in grads.items():
        assert parameters[name].grad.dtype == torch.float32
        assert (parameters[name].grad - grad).norm() < 0.03 * grad.norm(), name


def test_padding_changes_nothing(base: PreTrainedModel, ids: Tensor) -> None:
    def figures(ids: Tensor, real: Tensor | None) -> list[Tensor]:
        adapter = attached(base)
        loss = masked_loss(base, ids, real)
        balance = adapter.load_balance()
        routing = list(adapter.routing().values())
        (loss + balance).backward()
        with adapter.recording() as recording, real_tokens(real):
            base(ids)
        detach(base)
        recorded = [*recording.sums.values(), recording.counts.double()]
        return [loss.detach(), balance.detach(), *routing, *gradients(adapter).values(), *recorded]

    real = torch.tensor([True] * 8 + [False] * 5).expand(3, 13)
    plain, padded = figures(ids, None), figures(F.pad(ids, (0, 5), value=7), real)
    for expected, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(expected, other, rtol=1e-9, atol=1e-12)


def test_recording_sums_embeddings_by_sample(base: PreTrainedModel, ids: Tensor) -> None:
    adapter = attached(base)
    real = torch.ones(3, 8, dtype=torch.bool)
    real[0, 5:] = real[2, 1:] = False
    inputs: dict[str, Tensor] = {}
    for path, module in adapter.linears.items():

        def keep(_: nn.Module, x: tuple[Tensor], path: str = path) -> None:
            inputs[path] = x[0]

        module.register_forward_pre_hook(keep)
    with adapter.recording() as recording:
        for rows in ([0, 1], [2]):
            with real_tokens(real[rows]):
                base(ids[rows])
    base(ids)  # after it, nothing is recorded any more; and all inputs at once, for the test
    assert recording.counts.tolist() == [5, 8, 1]
    p = values(adapter)
    for path, sums in recording.sums.items():
        held = adapter.linears[path].held
        matrices = [p[f"domain.{e}/{path}.A"] for e in held] + [p[f"projection/{path}"]]
        assert sums.shape == (3, len(held) + 1, 3)
        assert not sums.requires_grad
        for i, count in enumerate((5, 8, 1)):
            for j, A in enumerate(matrices):
                expected = sum(A @ x for x in inputs[path][i, :count])
                torch.testing.assert_close(sums[i, j], expected)


def test_values_travel_by_expert_and_come_back(base: PreTrainedModel, ids: Tensor) -> None:
    adapter, other = adapter_of(base), adapter_of(base)
    fill(values(other), 0.5, 1)
    tensors = load(save(values(adapter)))
    paths = list(chosen_linears(base, LAYOUT.targets))
    last, d = paths[-1], base.config.hidden_size
    assert tensors[f"domain.4/{last}.A"].shape == (3, d)
    assert tensors[f"projection/{last}"].shape == (3, d)
    assert f"domain.8/{paths[0]}.B" in tensors
    assert f"domain.8/{last}.B" not in tensors
    assert list(values(adapter)) == sorted(tensors)
    adapter.attach(base)
    expected = base(ids).logits
    other.attach(base)
    assert not torch.equal(base(ids).logits, expected)
    copy(tensors, values(other))
    assert torch.equal(base(ids).logits, expected)
    assert equal(values(other), tensors)


@pytest.mark.parametrize("router", ["token", "vanilla"])
def test_first_values_are_the_expert_s_own(make: Any, ids: Tensor, router: str) -> None:
    layout = replace(LAYOUT, router=router)
    with torch.device("meta"):
        hollow = make()
    base = make()
    paths = list(chosen_linears(base, layout.targets))
    server = AmoleAdapter(hollow, layout, 3, dict.fromkeys(paths, range(9)))
    every = values(server)
    assert len(every) == len(paths) * (2 + 18 + 1)
    for held in ([2], [0, 2, 8], []):
        client = values(AmoleAdapter(base, layout, 3, dict.fromkeys(paths, held)))
        assert equal(client, {name: every[name] for name in client})
    assert all(t.device.type == "cpu" for t in every.values())
    for name, tensor in every.items():
        if name.endswith(".B"):
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5  # Kaiming uniform with a = sqrt 5
            assert 0.5 * bound < tensor.abs().max().item() <= bound
    assert not torch.equal(every[f"domain.1/{paths[0]}.A"], every[f"domain.2/{paths[0]}.A"])
    assert not torch.equal(every[f"domain.1/{paths[0]}.A"], every[f"domain.1/{paths[-1]}.A"])
    other = values(AmoleAdapter(base, layout, 4, dict.fromkeys(paths, (2,))))
    assert not torch.equal(other[f"domain.2/{paths[0]}.A"], every[f"domain.2/{paths[0]}.A"])
    bare = base(ids).logits
    server.attach(base)
    torch.testing.assert_close(base(ids).logits, bare)


def test_targets(base: PreTrainedModel) -> None:
    family = base.config.model_type
    names = {"gpt2": {"c_attn"}, "llama": {"q_proj", "v_proj"}}[family]
    assert {path.rpartition(".")[2] for path in chosen_linears(base, LAYOUT.targets)} == names
    up = {"gpt2": "c_fc", "llama": "up_proj"}[family]
    assert len(chosen_linears(base, "up_.*|c_fc")) == 2
    path, linear = next(iter(chosen_linears(base, LAYOUT.targets).items()))
    base.set_submodule(path, LoraLinear(linear, "", Layout()))
    assert next(iter(chosen_linears(base, LAYOUT.targets).values())) is linear
    with pytest.raises(CoterieError, match=up):
        chosen_linears(base, "proj")


def test_what_is_refused(base: PreTrainedModel) -> None:
    paths = list(chosen_linears(base, LAYOUT.targets))
    with pytest.raises(CoterieError, match="at least 1"):
        replace(LAYOUT, top_k=0)
    with pytest.raises(CoterieError, match="missing"):
        AmoleAdapter(base, LAYOUT, 3, dict.fromkeys(paths[1:], (0,)))
    for wrong in ([9], [1, 0], [1, 1]):
        with pytest.raises(CoterieError, match="from 0 to 8 in ascending"):
            AmoleAdapter(base, LAYOUT, 3, dict.fromkeys(paths, wrong))
    adapter = adapter_of(base, replace(LAYOUT, router="vanilla"))
    with pytest.raises(CoterieError, match="no token embedding"), adapter.recording():
        pass
    with pytest.raises(CoterieError, match="first forward pass"):
        adapter.load_balance()
