"""Small bases with an adapter whose values are not zero."""

import pytest
import torch
from small_models import VOCABULARY, gpt2, llama
from tensors import fill
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Adapter, Layout, of_roles
from coterie.losses import head


@pytest.fixture(params=["gpt2", "llama", "llama, tied"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A base of which the logits of 21 tokens are computed in five pieces."""
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", VOCABULARY * 5)
    torch.manual_seed(0)
    base = gpt2() if request.param == "gpt2" else llama(tied="tied" in request.param)
    return base.double().eval()


@pytest.fixture
def adapter(base: PreTrainedModel) -> Adapter:
    """An attached adapter of which all parameters are trained."""
    adapter = Adapter(base, Layout(), seed=0, client="ada", common=lambda _: False)
    fill(adapter.tensors(), 0.3, 5)
    base.requires_grad_(False)
    adapter.require_grad(of_roles("dense", "generalist", "specialist", "router"))
    adapter.attach(base)
    return adapter


@pytest.fixture(params=[None, 0.5], ids=["plain head", "scaled head"])
def plain(request: pytest.FixtureRequest, base: PreTrainedModel, monkeypatch) -> bool:
    """Whether the head is plain; otherwise, the model's own logits are used."""
    if request.param is not None:
        monkeypatch.setattr(base.config, "logit_scale", request.param, raising=False)
    return request.param is None


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
