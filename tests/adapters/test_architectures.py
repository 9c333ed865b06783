"""Adapters on the architectures that people bring: they begin as the base, and do what they say."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SMALL, WITHOUT_MLP, small_model, table
from every_method import some
from naive_mixture import naive_mixture
from tensors import equal, fill
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from coterie.adapters import Adapter, AmoleAdapter, AmoleLayout, Layout, detach, pairs_of
from coterie.adapters.beside import Beside
from coterie.adapters.coverage import coverage
from coterie.bases.sites import (
    QUERY_VALUE,
    StandIn,
    chosen_linears,
    expert_sites,
    layers,
    mlp_shape,
)
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss
from coterie.methods.tensors import copy

PAIRS = Layout(0, 0, attention_rank=3, scale="rank", routed=False)
IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "experts": Layout(),
    "beside": Layout(placement="beside"),
    "fedit": Layout(generalists=0, specialists=0, targets=QUERY_VALUE),
    "linear": Layout(placement="linear", attention_rank=0, targets=QUERY_VALUE),
}


QUICK = ("opt", "phi3", "mamba", "falcon_h1")
"""One of each shape; the others are slow."""


@pytest.fixture(params=some((*QUICK, "mixtral"), ARCHITECTURES))
def base(request: pytest.FixtureRequest) -> PreTrainedModel:
    return exact(request.param)


def exact(name: str) -> PreTrainedModel:
    """Return a model in float64, or in float32 if it has grouped experts, as torch requires."""
    base = small_model(name)
    mixed = any("Experts" in type(module).__name__ for module in base.modules())
    return base if mixed else base.double()


def adapter_of(base: nn.Module, layout: Layout) -> Adapter:
    return Adapter(base, layout, 0, "ada", lambda _: True)


def test_an_adapter_begins_as_the_base_and_learns_everywhere(base) -> None:
    want = base(IDS).logits
    held = dict.fromkeys(chosen_linears(base, QUERY_VALUE), (0, 2))
    amole = AmoleAdapter(base, AmoleLayout(experts=3), 0, held)
    for adapter in (*(adapter_of(base, layout) for layout in LAYOUTS.values()), amole):
        adapter.attach(base)
        torch.testing.assert_close(base(IDS).logits, want)
        fill(adapter.tensors(), 0.2, 1)
        for parameter in adapter.tensors().values():
            parameter.requires_grad_(True)
        language_model_loss(base, IDS).backward()
        for name, parameter in adapter.tensors().items():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
        detach(base)
        assert torch.equal(base(IDS).logits, want)


def merged(base: PreTrainedModel, adapter: Adapter, gain: float) -> PreTrainedModel:
    """Return a copy of a base to whose linear layers an adapter's only pairs are added."""
    base = deepcopy(base)
    with torch.no_grad():
        for A, B in pairs_of(adapter.parameters()):
            weight: Any = base.get_submodule(A.path).weight
            product = gain * B.tensor @ A.tensor
            weight += product.t() if isinstance(base.get_submodule(A.path), Conv1D) else product
    return base


SINGLE = {"expert": (Layout(1, 0), 8), "attention": (PAIRS, 3)}


@pytest.mark.parametrize("name", some(QUICK, sorted(ARCHITECTURES.keys() - WITHOUT_MLP)))
@pytest.mark.parametrize(("layout", "rank"), SINGLE.values(), ids=SINGLE)
def test_a_single_expert_is_a_change_of_weights(name, layout, rank) -> None:
    # MLPs may have fused or multiplied gates, residuals and other layers.
    base = exact(name)
    adapter = adapter_of(base, layout)
    fill(adapter.tensors(), 0.2, 1)
    before, want = base(IDS).logits, merged(base, adapter, layout.gain(rank))(IDS).logits
    assert (want - before).abs().max() > 0.01
    torch.testing.assert_close(adapter.attach(base)(IDS).logits, want)


@pytest.mark.parametrize("name", ["phi3", "bloom", "falcon_h1", "llama"])
def test_two_experts_are_two_mlps_weighed_by_the_router(name) -> None:
    base = small_model(name).double()
    adapter = adapter_of(base, layout := Layout(attention_rank=0))
    fill(adapter.tensors(), 0.2, 1)
    path, (mlp, _) = next(iter(expert_sites(base).items()))
    x, residual = torch.randn(2, 5, 32).double(), torch.randn(2, 5, 32).double()
    also = (residual,) if name == "bloom" else ()
    want = naive_mixture(mlp, layout, path, adapter.tensors(), x, also=also)
    adapter.attach(base)
    torch.testing.assert_close(base.get_submodule(path)(x, *also), want)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_beside_a_block_add_to_what_it_gives(name, top_k) -> None:
    base = exact(name)
    layout = Layout(generalists=1, specialists=2, top_k=top_k)
    adapter = adapter_of(base, layout)
    fill(adapter.tensors(), 0.2, 1)
    adapter.attach(base)
    [path, *_] = expert_sites(base)
    stand_in = base.get_submodule(path)
    assert isinstance(stand_in, Beside)
    x, parts = torch.randn(2, 5, 32), adapter.parameters()
    scores = x @ parts[f"router/{path}.weight"].tensor.t()
    best, chosen = scores.topk(top_k, -1)
    weights = best.softmax(-1) if top_k > 1 else scores.softmax(-1).gather(-1, chosen)
    block = stand_in.base(x)
    want = block[0] if isinstance(block, tuple) else block
    for i, expert in enumerate(("generalist.0", "specialist.0", "specialist.1")):
        A, B = (parts[f"{expert}/{path}.{factor}"].tensor for factor in "AB")
        share = (weights * (chosen == i)).sum(-1, keepdim=True)
        want = want + share * layout.gain(8) * x @ A.t() @ B.t()
    got = stand_in(x)
    torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, want)
    assert isinstance(got, tuple) is isinstance(block, tuple)


def test_a_server_without_weights_makes_the_same_parts(base) -> None:
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(base.config)
    for layout in LAYOUTS.values():
        empty, loaded = (adapter_of(model, layout) for model in (hollow, base))
        parts = ({n: p.role for n, p in each.parameters().items()} for each in (empty, loaded))
        assert next(parts) == next(parts)
        assert equal(empty.tensors(), loaded.tensors())
        assert {tensor.device.type for tensor in empty.tensors().values()} == {"cpu"}
        fill(empty.tensors(), 0.2, 1)
        copy(empty.tensors(), loaded.tensors())
        expected = loaded.attach(base)(IDS).logits
        torch.testing.assert_close(empty.attach(base)(IDS).logits, expected, rtol=0, atol=1e-5)


def test_every_layer_is_covered(base) -> None:
    everywhere = frozenset(range(len(layers(base))))
    covered = coverage(base, adapter_of(base, Layout()).parameters().values())
    assert covered.total == len(everywhere) == base.config.num_hidden_layers
    assert not covered.others
    for kind in ("experts", "LoRA"):
        has = (numbers for (other, _), numbers in covered.covered.items() if other == kind)
        assert everywhere == frozenset().union(*has)


def test_what_is_not_covered_is_said() -> None:
    base = small_model("qwen3_5_text")
    layout = Layout(generalists=0, specialists=0, targets="q_proj|o_proj")
    covered = coverage(base, adapter_of(base, layout).parameters().values())
    assert covered.lines() == (
        "LoRA on Qwen3_5Attention (o_proj, q_proj) in 1 of 4 layers",
        "no LoRA in the other 3 layers (Qwen3_5GatedDeltaNet, Qwen3_5MLP)",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_that_does_more_than_its_layers_tell_is_refused(dtype) -> None:
    base = small_model("llama").to(dtype)
    mlp = base.model.layers[1].mlp
    mlp.forward = lambda x: 1.1 * type(mlp).forward(mlp, x)
    adapter_of(base, Layout(placement="beside")).attach(base)
    with pytest.raises(CoterieError, match=r"changes the outputs of .* by \d"):
        adapter_of(base, Layout()).attach(base)
    assert not any(isinstance(module, StandIn) for module in base.modules())


def test_attention_that_reads_its_layers_weights_is_refused() -> None:
    base = small_model("llama")
    attention = base.model.layers[1].self_attn

    def forward(hidden_states: Tensor, **kwargs: object) -> object:
        shift = attention.q_proj.weight.mean()
        return type(attention).forward(attention, hidden_states + shift, **kwargs)

    attention.forward = forward
    with pytest.raises(CoterieError, match="LlamaForCausalLM cannot run with an adapter"):
        adapter_of(base, LAYOUTS["fedit"]).attach(base)
    assert not any(isinstance(module, StandIn) for module in base.modules())


def test_only_what_reads_text_gets_adapters() -> None:
    vision = {**SMALL, "image_size": 28, "patch_size": 14}
    parts: Any = {"text_config": {**SMALL, "head_dim": 8}, "vision_config": vision}
    config = AutoConfig.for_model("gemma3", mm_tokens_per_image=4, **parts)
    base = AutoModelForCausalLM.from_config(config).eval()
    assert any("vision" in path for path, _ in base.named_modules())
    for layout in (*LAYOUTS.values(), Layout(generalists=0, specialists=0, targets=".*_proj")):
        adapter = adapter_of(base, layout)
        adapter.attach(base)
        assert all("language_model" in part.path for part in adapter.parameters().values())


def test_an_mlp_is_known_by_its_layers() -> None:
    assert mlp_shape(nn.Linear(2, 2)) is None
    base = small_model("mixtral")
    assert [shape for _, shape in expert_sites(base).values()] == [None, None]
    with pytest.raises(CoterieError, match="has no MLP to which experts can be attached"):
        adapter_of(base, Layout(placement="inside"))


def test_unknown_architectures_are_named() -> None:
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2))
    for layer in rwkv.rwkv.blocks:
        layer.attention = nn.Identity()
    for layout, why in ((PAIRS, "supported attention"), (Layout(placement="inside"), "MLP to wh")):
        with pytest.raises(CoterieError, match=f"RwkvForCausalLM has no {why}"):
            adapter_of(rwkv, layout)


def test_the_page_shows_where_adapters_stand() -> None:
    page = Path(__file__).parents[2] / "docs" / "use" / "bases.md"
    behind = "docs/use/bases.md is behind; run scripts/document_architectures.py"
    assert table() in page.read_text(encoding="utf-8"), behind
