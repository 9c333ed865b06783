"""Trained parameters describe themselves, whatever the base calls the layers they stand on."""

import re
from collections.abc import Callable
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from coterie.adapters import (
    Adapter,
    AmoleAdapter,
    AmoleLayout,
    Layout,
    Parameter,
    of_roles,
    pairs_of,
)
from coterie.adapters.prompt import prompt_encoder, soft_prompt
from coterie.bases.sites import chosen_linears, place_of

PLACES = {
    "gpt2": {
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
    },
    "llama": {
        **{f"mlp.{name}_proj": f"mlp.{name}" for name in ("up", "gate", "down")},
        **{f"self_attn.{name}_proj": f"attention.{name}" for name in "qkv"},
        "self_attn.o_proj": "attention.out",
    },
}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}


def common(part: Parameter) -> bool:
    return part.role == "generalist"


def adapter_of(base: nn.Module, **layout: Any) -> Adapter:
    numbers: dict[str, Any] = {"generalists": 1, "specialists": 2}
    return Adapter(base, Layout(**numbers | layout), 0, "ada", common)


def expected(base: PreTrainedModel, frozen: str = "") -> dict[str, tuple[Any, ...]]:
    """Return role, factor, expert, layer, place and start of each parameter, by name.

    The parameters are one generalist, two specialists, a router, and the pairs on attention.
    `frozen` precedes the names of A.
    """
    parts: dict[str, tuple[Any, ...]] = {}
    kind = base.config.model_type
    for layer, (end, place) in product(range(2), PLACES[kind].items()):
        path = f"{LAYERS[kind]}.{layer}.{end}"
        dense = [("dense", "dense", None)]
        experts = [("generalist.0", "generalist", 0)]
        experts += [(f"specialist.{n}", "specialist", n) for n in (0, 1)]
        for prefix, role, number in experts if place.startswith("mlp.") else dense:
            at = (number, layer, place)
            A = "frozen" if frozen else role
            parts[f"{frozen}{prefix}/{path}.A"] = (A, "A", *at, "kaiming")
            parts[f"{prefix}/{path}.B"] = (role, "B", *at, "zero")
        if place == "mlp.up":
            mlp = path.rpartition(".")[0]
            parts[f"router/{mlp}.weight"] = ("router", None, None, layer, "mlp", "normal")
    return parts


def described(parts: dict[str, Parameter]) -> dict[str, tuple[Any, ...]]:
    values = attrgetter("role", "factor", "expert", "layer", "place", "start")
    return {name: values(part) for name, part in parts.items()}


@pytest.mark.parametrize("frozen", ["", "frozen/"])
def test_parts_of_mixtures_have_these_roles(base: PreTrainedModel, frozen: str) -> None:
    adapter = adapter_of(base, freeze_A=bool(frozen))
    parts = adapter.parameters()
    assert described(parts) == expected(base, frozen)
    assert list(parts) == sorted(parts) == list(adapter.tensors())
    for name, part in parts.items():
        assert part.name == name
        assert part.tensor is adapter.tensors()[name]
        assert part.path in name


def test_layers_that_a_pattern_names_have_their_places_too(base: PreTrainedModel) -> None:
    pattern = {"gpt2": "c_fc|c_attn", "llama": "up_proj|k_proj"}[base.config.model_type]
    parts = adapter_of(base, generalists=0, specialists=0, targets=pattern).parameters().values()
    places = {"gpt2": {"mlp.up", "attention.qkv"}, "llama": {"mlp.up", "attention.k"}}
    assert {part.place for part in parts} == places[base.config.model_type]
    assert {(part.role, part.layer) for part in parts} == {("dense", 0), ("dense", 1)}


def test_pairs_are_each_a_with_its_own_b(base: PreTrainedModel) -> None:
    parts = adapter_of(base).parameters()
    pairs = pairs_of(parts)
    assert len(pairs) == sum(part.factor == "A" for part in parts.values())
    assert [A.name for A, _ in pairs] == sorted(A.name for A, _ in pairs)
    for A, B in pairs:
        assert (A.factor, B.factor) == ("A", "B")
        assert A.name.removesuffix(".A") == B.name.removesuffix(".B")
        assert A.tensor.shape[0] == B.tensor.shape[1]
    some = {n: p for n, p in parts.items() if p.role == "generalist"}
    assert {part.role for pair in pairs_of(some) for part in pair} == {"generalist"}
    without = {name: part for name, part in some.items() if part.factor != "B"}
    assert pairs_of(without) == []
    backwards = dict(reversed(some.items()))
    assert [A.name for A, _ in pairs_of(backwards)] == [A.name for A, _ in pairs_of(some)]


@pytest.mark.parametrize("router", ["token", "vanilla"])
def test_amole_s_parts_are_views_of_its_stacks(base: PreTrainedModel, router: Any) -> None:
    layout = AmoleLayout(experts=9, rank=3, router=router)
    places = {"c_attn": "attention.qkv", "q_proj": "attention.q", "v_proj": "attention.v"}
    held = dict.fromkeys(chosen_linears(base, layout.targets), (1, 4))
    adapter = AmoleAdapter(base, layout, 0, held)
    parts, wanted = adapter.parameters(), {}
    for path in held:
        number: Any = re.search(r"\d+", path)
        at = (int(number[0]), places[path.rpartition(".")[2]])
        wanted[f"shared/{path}.A"] = ("shared", "A", None, *at, "kaiming")
        wanted[f"shared/{path}.B"] = ("shared", "B", None, *at, "zero")
        for e in (1, 4):
            wanted[f"domain.{e}/{path}.A"] = ("domain", "A", e, *at, "kaiming")
            wanted[f"domain.{e}/{path}.B"] = ("domain", "B", e, *at, "zero")
        name = {"token": "projection", "vanilla": "gate"}[router]
        wanted[f"{name}/{path}"] = ("projection", None, None, *at, "kaiming")
    assert described(parts) == wanted
    assert list(parts) == sorted(wanted)
    assert len(pairs_of(parts)) == 3 * len(held)
    for path in held:  # what is written into a part is in the stack, and the other way round
        stack = adapter.tensors(of_roles("domain"))[f"domain/{path}.A"]
        parts[f"domain.4/{path}.A"].tensor.data.fill_(7)
        assert stack[1].eq(7).all()
        assert not stack[0].eq(7).any()
        stack.data[0] = 3
        assert adapter.parameters()[f"domain.1/{path}.A"].tensor.eq(3).all()


PROMPTS: dict[str, tuple[Callable[[PreTrainedModel], Any], list[str]]] = {
    "soft prompt": (lambda base: soft_prompt(base, 4, 0, 0.02), []),
    "encoder": (
        lambda base: prompt_encoder(base, 4, 6, 0),
        [f"mlp_head.{i}.{end}" for i in (0, 2, 4) for end in ("bias", "weight")],
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_stand_on_no_layer(base: PreTrainedModel, kind: str) -> None:
    make_prompt, more = PROMPTS[kind]
    names = [f"prompt/{name}" for name in ("embedding.weight", *more)]
    adapter = make_prompt(base)
    parts = adapter.parameters()
    assert list(parts) == names == list(adapter.tensors(of_roles("prompt")))
    for name, part in parts.items():
        assert part.tensor is adapter.tensors()[name]
        assert (part.role, part.path, part.factor, part.expert) == ("prompt", "", None, None)
        assert (part.layer, part.place) == (None, "")
    assert pairs_of(parts) == []


def test_what_is_not_known_is_called_by_its_own_name() -> None:
    assert place_of("model.layers.3.odd.proj") == "proj"
    assert place_of("lone") == "lone"
    assert place_of("gpt_neox.layers.0.attention.dense") == "attention.out"
    assert place_of("transformer.h.0.self_attention.dense") == "attention.out"
    assert place_of("gpt_neox.layers.0.mlp.dense_h_to_4h") == "mlp.up"
    assert place_of("gpt_neox.layers.0.mlp") == "mlp"
    assert place_of("model.layers.0.linear_attn.in_proj_qkv") == "mixer.in"
