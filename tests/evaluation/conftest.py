import random
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
from naive_near import changed
from peft import PromptTuningConfig, PromptTuningInit, get_peft_model

from coterie.data.kinds.text import pieces


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Pieces of a book, and the same with ever more words changed."""
    draw = random.Random(0)
    book = (files("coterie") / "assets" / "demo-writers" / "whaler.txt").read_text(encoding="utf-8")
    own = list(pieces(book[:36_000], 600))[:50]
    return own + [changed(text, n % 25 + 1, draw) for n, text in enumerate(own)]


@pytest.fixture(scope="session")
def answering(questions) -> dict[str, Any]:
    """The settings of a run in which three writers answer questions with yes or no."""
    instructions = {"template": "{{ instruction }}?", "choices": ["yes", "no"]}
    clients = [{"name": n, "path": f"{n}.jsonl"} for n in ("diarist", "poet", "whaler")]
    data = {"window": 48, "instructions": instructions}
    return {"data_root": str(questions), "data": data, "clients": clients}


@pytest.fixture
def soft_prompted() -> Callable[[Any], Any]:
    """A function that puts a random soft prompt of four tokens before a model."""

    def wrap(model: Any) -> Any:
        torch.manual_seed(3)
        options: Any = {"num_virtual_tokens": 4, "prompt_tuning_init": PromptTuningInit.RANDOM}
        return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", **options)).eval()

    return wrap
