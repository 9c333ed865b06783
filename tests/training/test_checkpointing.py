"""Gradient checkpointing and stored activations change memory and time alone: losses, gradients and
what modules keep are equal to the bit, whatever is drawn in the forward pass."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
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

SIZES: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 3, "hidden_size": 12}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=12, n_head=2, vocab_size=61))


def llama() -> Any:
    config = LlamaConfig(intermediate_size=20, num_attention_heads=2, **SIZES)
    return LlamaForCausalLM(config)


def opt() -> Any:
    sizes: dict[str, Any] = {"ffn_dim": 20, "word_embed_proj_dim": 12, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**SIZES, **sizes))


def mixture(base: Any, specialists: int = 1, dropout: float = 0.0) -> Adapter:
    layout = Layout(1, specialists, rank=2, attention_rank=2, dropout=dropout)
    return Adapter(base, layout, seed=0, client="ada", common=lambda _: False)


def dense(base: Any, dropout: float = 0.0) -> Adapter:
    """FedIT's, on attention alone."""
    layout = Layout(0, 0, attention_rank=2, dropout=dropout)
    return Adapter(base, layout, seed=0, client="ada", common=lambda _: False)


def amole(base: Any, dropout: float = 0.0) -> AmoleAdapter:
    layout = AmoleLayout(experts=5, rank=2, dropout=dropout)
    held = dict.fromkeys(chosen_linears(base, layout.targets), (0, 2, 3, 4))
    return AmoleAdapter(base, layout, 0, held)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "comigs-1g1s": mixture,
    "comigs-1g1s, dropout": partial(mixture, dropout=0.3),
    "top 2 of 4": partial(mixture, specialists=3),
    "top 2 of 4, dropout": partial(mixture, specialists=3, dropout=0.3),
    "fedit": dense,
    "fedit, dropout": partial(dense, dropout=0.3),
    "fedamole": amole,
    "fedamole, dropout": partial(amole, dropout=0.3),
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


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def penalty(adapter: Any) -> Tensor:
    if isinstance(adapter, AmoleAdapter):
        return adapter.load_balance()
    routed = isinstance(adapter, Adapter) and adapter.balances
    return adapter.load_balance("uniform") if routed else torch.zeros(())


def taught(base: Any, adapter: Any, batch: Batch, **training: Any) -> dict[str, Tensor]:
    """What a step's passes give and leave, with gradients; the backward pass is outside."""
    chance = torch.Generator().manual_seed(5)
    for parameter in adapter.tensors().values():
        parameter.data.normal_(std=0.3, generator=chance)
        parameter.requires_grad_()
    model = adapter.attach(base)
    with training_pass(context(base, **training), "experts", 3):
        loss = language_model_loss(model, *batch)
        balance = penalty(adapter)
    torch.manual_seed(77)  # nobody's
    found = {"loss": loss.detach(), "balance": balance.detach(), **adapter.routing()}
    names, parameters = zip(*adapter.tensors().items(), strict=True)
    grads = torch.autograd.grad(loss + 10 * balance, parameters, allow_unused=True)
    found |= {name: g for name, g in zip(names, grads, strict=True) if g is not None}
    assert not base.training
    assert all(torch.equal(w, adapter.routing()[path]) for path, w in adapter.routing().items())
    return found | {f"after/{path}": w for path, w in adapter.routing().items()}


@pytest.mark.parametrize("kind", [gpt2, llama])
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("base_dropout", [0.0, 0.2])
def test_gradients_are_equal_to_the_bit(
    kind: Any, name: str, base_dropout: float, batch: Batch
) -> None:
    base = made(kind)
    adapter = ADAPTERS[name](base)
    plain = taught(base, adapter, batch, base_dropout=base_dropout)
    found = taught(base, adapter, batch, base_dropout=base_dropout, checkpointing=True)
    assert plain.keys() == found.keys()
    assert len(plain) > 2
    for what, tensor in plain.items():
        assert torch.equal(found[what], tensor), what
    if base_dropout or "dropout" in name:
        again = taught(base, adapter, batch)
        assert ("dropout" in name and not base_dropout) or not torch.equal(
            again["loss"], plain["loss"]
        )


@pytest.mark.parametrize("kind", [gpt2, llama])
@pytest.mark.parametrize("specialists", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_stored_activations_give_equal_gradients(
    kind: Any, specialists: int, dropout: float, batch: Batch
) -> None:
    base = made(kind)
    adapter = mixture(base, specialists, dropout)
    plain, found = (taught(base, adapter, batch, store_activations=on) for on in (False, True))
    assert plain.keys() == found.keys()
    assert all(torch.equal(found[what], tensor) for what, tensor in plain.items())


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


@pytest.mark.parametrize(("kind", "wide", "up"), [(gpt2, 48, 1), (llama, 20, 2)])
def test_stored_activations_replace_the_frozen_outputs(
    kind: Any, wide: int, up: int, batch: Batch
) -> None:
    """Three layers store each of two experts' p and z, instead of u for both."""
    base = made(kind)
    adapter = mixture(base)
    tokens = batch.only(torch.tensor([1]))  # without padding
    few, many = (saved_values(base, adapter, tokens, store_activations=on) for on in (False, True))
    assert many - few == 3 * 11 * wide * (2 * (up + 1) - up)


def test_layers_that_drop_out_by_themselves_do_so_again(batch: Batch) -> None:
    """OPT's layers ask for their own mode."""
    base = made(opt)
    adapter = dense(base)
    plain = taught(base, adapter, batch, base_dropout=0.2)
    found = taught(base, adapter, batch, base_dropout=0.2, checkpointing=True)
    assert all(torch.equal(found[what], tensor) for what, tensor in plain.items())


@pytest.mark.parametrize("kind", [gpt2, llama])
def test_two_passes_before_a_backward_pass_are_told_apart(kind: Any, batch: Batch) -> None:
    """As in distillation at a temperature: each has masks and padding of its own."""
    base = made(kind)
    adapter = mixture(base, 3, 0.3)
    found = []
    for on in (False, True):
        taught(base, adapter, batch)
        losses = []
        for turn, part in enumerate((batch, batch.only(torch.tensor([1, 3])))):
            with training_pass(context(base, checkpointing=on), "public", turn):
                losses.append(language_model_loss(base, *part))
        total = torch.stack(losses).sum() + adapter.load_balance("uniform")
        found.append(torch.autograd.grad(total, list(adapter.tensors(of_roles("dense")).values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_activations_are_not_kept(batch: Batch) -> None:
    """What is saved for the backward pass: of every layer little more than what enters it."""
    base = made(llama)
    adapter = mixture(base)
    many, few = (saved_values(base, adapter, batch, checkpointing=on) for on in (False, True))
    assert few < many / 5


def test_layers_are_as_before_afterwards(batch: Batch) -> None:
    base = made(gpt2)
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer)]

    def fail() -> None:
        with training_pass(context(base, checkpointing=True), "experts"):
            assert all("forward" in vars(layer) for layer in layers)
            with torch.no_grad():  # nothing to compute again
                base(batch.ids)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(layers) == 3
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_base_without_such_layers_is_refused() -> None:
    bare: Any = nn.Linear(2, 2)
    with (
        pytest.raises(CoterieError, match="Linear does not support gradient checkpointing"),
        training_pass(context(bare, checkpointing=True), "experts"),
    ):
        pass
