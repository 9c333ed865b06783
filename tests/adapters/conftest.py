"""Tiny random bases, in float64 so that equal formulas agree to rounding."""

from collections.abc import Callable

import pytest
import torch
from small_models import VOCABULARY, gpt2, llama
from transformers import PreTrainedModel


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def make(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    return request.param


@pytest.fixture
def base(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().double()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
