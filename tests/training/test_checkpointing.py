"""Gradient checkpointing and stored activations change memory and time alone: losses, gradients and
what modules keep are equal to the bit, whatever is drawn in the forward pass."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import gpt2, llama
from tensors import equal, fill
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from coterie import CoterieError
from coterie.adapters import Adapter, AmoleAdapter, AmoleLayout, Layout, of_roles
from coterie.adapters.prompt import soft_prompt
from coterie.bases.sites import chosen_linears
from coterie.losses import tokens as loss_module
from coterie.losses.tokens import Batch, language_model_loss
from coterie.training.context import ClientContext
from coterie.training.passes import training_pass
from coterie.training.spec import TrainingSpec


def opt() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 3, "hidden_size": 12}
    sizes |= {"ffn_dim": 20, "word_embed_proj_dim": 12, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**sizes))


def mixture(base: Any, specialists: int = 1, dropout: float = 0.0, generalists: int = 1) -> Adapter:
    layout = Layout(generalists, specialists, rank=2, attention_rank=2, dropout=dropout)
    return Adapter(base, layout, seed=0, client="ada", common=lambda _: False)


def amole(base: Any, dropout: float = 0.0) -> AmoleAdapter:
    layout = AmoleLayout(experts=5, rank=2, dropout=dropout)
    held = dict.fromkeys(chosen_linears(base, layout.targets), (0, 2, 3, 4))
    return AmoleAdapter(base, layout, 0, held)


dense = partial(mixture, generalists=0, specialists=0)
KINDS: dict[str, Callable[..., Any]] = {
    "comigs-1g1s": mixture,
    "top 2 of 4": partial(mixture, specialists=3),
    "fedit": dense,  # on attention alone
    "fedamole": amole,
}
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    **KINDS,
    **{f"{name}, dropout": partial(kind, dropout=0.3) for name, kind in KINDS.items()},
    "fedprompt": lambda base: soft_prompt(base, 3, 0, 0.5),
}


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are read in pieces."""
    monkeypatch.setitem(loss_module.PIECE_COST, "cpu", 3)


@pytest.fixture
def batch() -> Batch:
    chance = torch.Generator().manual_seed(1)
    real = torch.arange(11) < torch.tensor([4, 11, 10, 5])[:, None]
    return Batch(torch.randint(1, 61, (4, 12), generator=chance), real, real)


def context(base: Any, **training: Any) -> ClientContext:
    held = SimpleNamespace(model=base, device=torch.device("cpu"), precision="fp32")
    spec = TrainingSpec(precision="fp32", **training)
    return cast(ClientContext, SimpleNamespace(name="ada", seed=0, base=held, training=spec))


def made(kind: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    return (kind() if kind is opt else kind(layers=3)).eval()


def penalty(adapter: Any) -> Tensor:
    if isinstance(adapter, AmoleAdapter):
        return adapter.load_balance()
    routed = isinstance(adapter, Adapter) and adapter.balances
    return adapter.load_balance("uniform") if routed else torch.zeros(())


def taught(base: Any, adapter: Any, batch: Batch, **training: Any) -> dict[str, Tensor]:
    """Return the results and gradients of a step; the backward pass is outside the context."""
    fill(adapter.tensors(), 0.3, 5)
    for parameter in adapter.tensors().values():
        parameter.requires_grad_()
    model = adapter.attach(base)
    with training_pass(context(base, **training), "experts", 3):
        loss = language_model_loss(model, *batch)
        balance = penalty(adapter)
    torch.manual_seed(77)  # nobody's
    results = {"loss": loss.detach(), "balance": balance.detach(), **adapter.routing()}
    names, parameters = zip(*adapter.tensors().items(), strict=True)
    grads = torch.autograd.grad(loss + 10 * balance, parameters, allow_unused=True)
    results |= {name: g for name, g in zip(names, grads, strict=True) if g is not None}
    assert not base.training
    assert all(torch.equal(w, adapter.routing()[path]) for path, w in adapter.routing().items())
    return results | {f"after/{path}": w for path, w in adapter.routing().items()}


MIXTURES = ("comigs-1g1s", "top 2 of 4", "comigs-1g1s, dropout", "top 2 of 4, dropout")
CASES: list[tuple[Any, str, float, str]] = [
    *product([gpt2, llama], ADAPTERS, [0.0, 0.2], ["checkpointing"]),
    *product([gpt2, llama], MIXTURES, [0.0], ["store_activations"]),
    (opt, "fedit", 0.2, "checkpointing"),  # whose layers ask for their own mode
]


@pytest.mark.parametrize(("kind", "name", "base_dropout", "option"), CASES)
def test_gradients_are_equal_to_the_bit(
    kind: Any, name: str, base_dropout: float, option: str, batch: Batch
) -> None:
    base = made(kind)
    adapter, training = ADAPTERS[name](base), {"base_dropout": base_dropout}
    plain = taught(base, adapter, batch, **training)
    assert equal(plain, taught(base, adapter, batch, **training, **{option: True}))
    assert len(plain) > 2
    if base_dropout:
        assert not torch.equal(taught(base, adapter, batch)["loss"], plain["loss"])


def saved_values(base: Any, adapter: Adapter, batch: Batch, **training: Any) -> int:
    """Count the values of the tensors that a forward pass saves for the backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    adapter.require_grad(lambda _: True)
    with hooks, training_pass(context(base, **training), "experts"):
        language_model_loss(adapter.attach(base), *batch)
    return sum(sizes)


@pytest.mark.parametrize(("kind", "wide", "up"), [(gpt2, 20, 1), (llama, 20, 2)])
def test_stored_activations_replace_the_frozen_outputs(kind, wide, up, batch) -> None:
    # Three layers store p and z of each of two experts, instead of u for both.
    base = made(kind)
    adapter = mixture(base)
    tokens = batch.only(torch.tensor([1]))  # without padding
    few, many = (saved_values(base, adapter, tokens, store_activations=on) for on in (False, True))
    assert many - few == 3 * 11 * wide * (2 * (up + 1) - up)


@pytest.mark.parametrize("kind", [gpt2, llama])
def test_two_passes_before_a_backward_pass_are_told_apart(kind: Any, batch: Batch) -> None:
    # Distillation at a temperature has such passes: each has its own masks and padding.
    base = made(kind)
    adapter = mixture(base, 3, 0.3)
    gradients = []
    for on in (False, True):
        taught(base, adapter, batch)
        losses = []
        for turn, part in enumerate((batch, batch.only(torch.tensor([1, 3])))):
            with training_pass(context(base, checkpointing=on), "public", turn):
                losses.append(language_model_loss(base, *part))
        total = torch.stack(losses).sum() + adapter.load_balance("uniform")
        gradients.append(
            torch.autograd.grad(total, list(adapter.tensors(of_roles("dense")).values()))
        )
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_activations_are_not_kept(batch: Batch) -> None:
    # Little more than its inputs is saved of each layer for the backward pass.
    base = made(llama)
    adapter = mixture(base)
    many, few = (saved_values(base, adapter, batch, checkpointing=on) for on in (False, True))
    assert few < many / 5


def test_layers_are_as_before_afterwards(batch: Batch) -> None:
    base = made(gpt2)
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer)]
    checkpointed = training_pass(context(base, checkpointing=True), "experts")
    with suppress(KeyError), checkpointed, torch.no_grad():  # nothing to compute again
        assert all("forward" in vars(layer) for layer in layers)
        base(batch.ids)
        raise KeyError
    assert len(layers) == 3
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_base_without_such_layers_is_refused() -> None:
    bare: Any = nn.Linear(2, 2)
    with (
        pytest.raises(CoterieError, match="Linear does not support gradient checkpointing"),
        training_pass(context(bare, checkpointing=True), "experts"),
    ):
        pass
