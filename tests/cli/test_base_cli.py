"""`coterie base`: a base is shown, and what a run with it needs, without its weights."""

from collections.abc import Callable
from functools import partial

import pytest
import yaml


@pytest.fixture
def shown(succeeds) -> Callable[..., str]:
    """A function that runs `coterie base` and returns its output."""
    return partial(succeeds, "base", width=200)


def test_a_base_is_shown_without_its_weights(shown, bases, monkeypatch) -> None:
    monkeypatch.setattr("coterie.bases.loading.AutoModelForCausalLM.from_pretrained", None)
    monkeypatch.chdir(bases)
    text = shown("llama")
    vocabulary = "1,024 tokens; 1,024 embeddings"
    for words in ("LlamaForCausalLM", "64 tokens", vocabulary, "experts inside LlamaMLP"):
        assert words in text
    assert "memory" not in text


def test_a_run_is_estimated(shown, values, tmp_path) -> None:
    (tmp_path / "us.yaml").write_text(yaml.safe_dump(values()))
    text = shown(tmp_path / "us.yaml")
    for words in (
        "comigs-1g1s on",
        "peak memory of one client's process",
        "training step (2 samples at once)",
        "scoring (16 windows at once)",
        "largest upload of a client",
        "run folder with all clients",
    ):
        assert words in text
    text = shown(tmp_path / "us.yaml", "--set", "method.mlp.placement=beside")
    assert "experts beside GPT2MLP" in text
    assert "inside" not in text
    assert "There is no estimate" in shown(tmp_path / "us.yaml", "--set", "method=fedprompt")
