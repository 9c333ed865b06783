"""`coterie base`: a base is shown, and what a run with it needs, without its weights."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["base", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_base_is_shown_without_its_weights(bases, monkeypatch) -> None:
    monkeypatch.setattr("coterie.bases.loading.AutoModelForCausalLM.from_pretrained", None)
    monkeypatch.chdir(bases)
    text = shown("llama")
    assert "LlamaForCausalLM" in text
    assert "64 tokens" in text
    assert "experts inside LlamaMLP" in text
    assert "memory" not in text


def test_a_run_is_estimated(values, tmp_path) -> None:
    (tmp_path / "us.yaml").write_text(yaml.safe_dump(values()))
    text = shown(str(tmp_path / "us.yaml"))
    assert "comigs-1g1s on" in text
    assert "peak memory of one client's process" in text
    assert "training step (2 samples at once)" in text
    assert "scoring (16 windows at once)" in text
    assert "largest upload of a client" in text
    assert "run folder with all clients" in text
    text = shown(str(tmp_path / "us.yaml"), "--set", "method.mlp.placement=beside")
    assert "experts beside GPT2MLP" in text
    assert "inside" not in text
    text = shown(str(tmp_path / "us.yaml"), "--set", "method=fedprompt")
    assert "There is no estimate" in text


def test_what_is_no_base_is_said() -> None:
    with pytest.raises(CoterieError, match="'nosuch' could not be loaded"):
        CliRunner().invoke(app, ["base", "nosuch"], catch_exceptions=False)
    with pytest.raises(CoterieError, match=r"There is no run file nosuch\.yaml"):
        CliRunner().invoke(app, ["base", "nosuch.yaml"], catch_exceptions=False)
    assert not Path("nosuch").exists()
