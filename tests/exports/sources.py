"""Models to export that no run has trained: small random bases with random adapters."""

from pathlib import Path
from typing import Any, cast

import torch
from architectures import small_model
from transformers import PreTrainedModel

from coterie.adapters import Adapter, Layout, Trainable, detach
from coterie.bases import Base, BaseSpec
from coterie.config.run import RunConfig
from coterie.exports.source import Source
from coterie.runs import RunFolder

FAR: dict[str, Any] = {
    "training": {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.05},
    "evaluation": {"keep": "last"},
}
"""Settings of a run that moves far from its base."""
IDS = torch.tensor([[5, 9, 33, 71, 20, 6, 41, 100, 3, 77]])


def randomise(adapter: Trainable) -> None:
    """Draw random values for an adapter, with widely different scores of every router."""
    torch.manual_seed(1)
    for name, tensor in adapter.tensors().items():
        tensor.data.normal_(std=1.0 if name.startswith("router") else 0.2)


def source_of(model: PreTrainedModel, adapter: Trainable | None, config: RunConfig) -> Source:
    """Return a source with a given model and the configuration of any run."""
    base = Base(model, cast(Any, None), "fp32", torch.device("cpu"))
    attach = (adapter or Trainable(())).attach
    return Source(
        folder=RunFolder(Path("nowhere")),
        config=config,
        client="poet",
        base=base,
        spec=BaseSpec(name="somebody/base"),
        digest=None,
        dtype=torch.float32,
        adapter=adapter,
        attach=lambda: attach(model),
        tokenizer=cast(Any, None),
    )


def random_source(name: str, layout: Layout, config: RunConfig, **settings: Any) -> Source:
    """Return a source with a random adapter on a small random base of an architecture."""
    model = small_model(name, **settings)
    adapter = Adapter(model, layout, 0, "poet", lambda _: True)
    randomise(adapter)
    return source_of(model, adapter, config)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits for IDS, without those of a soft prompt."""
    return model.eval()(IDS).logits[:, -IDS.shape[1] :].float()


def check(source: Source, model: Any, expected: torch.Tensor) -> None:
    """Check that a model computes what a source computed, which differs from the base."""
    detach(source.base.model)
    change = (logits(source.base.model) - expected).abs().max()
    difference = (logits(model) - expected).abs().max()
    assert difference < 2e-5 * expected.abs().max()
    assert difference < 1e-3 * change
