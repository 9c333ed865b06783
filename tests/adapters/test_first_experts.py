"""Each token's first expert is the one that the router scores highest."""

import torch
from torch import nn

from coterie.adapters import Adapter, Layout, Mixture, first_experts


def test_first_experts_are_the_routers_highest_scores(base) -> None:
    layout = Layout(generalists=1, specialists=2, top_k=2)
    adapter = Adapter(base, layout, seed=0, client="a", common=lambda _: False)
    adapter.attach(base)
    seen: dict[str, torch.Tensor] = {}
    mixtures = {path: m for path, m in base.named_modules() if isinstance(m, Mixture)}
    for path, mixture in mixtures.items():

        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...], path: str = path) -> None:
            seen[path] = inputs[0]

        mixture.register_forward_pre_hook(see)
    ids = torch.arange(24).view(2, 12)
    base(input_ids=ids)
    found = first_experts(base)
    assert list(found) == list(mixtures)
    for path, mixture in mixtures.items():
        assert mixture.router is not None
        scores = torch.einsum("btd,nd->btn", seen[path], mixture.router)
        assert found[path].tolist() == scores.argmax(-1).flatten().tolist()
    assert len({expert for one in found.values() for expert in one.tolist()}) > 1


def test_without_a_router_there_is_none(base) -> None:
    adapter = Adapter(base, Layout(routed=False), seed=0, client="a", common=lambda _: False)
    adapter.attach(base)
    assert first_experts(base) == {}
