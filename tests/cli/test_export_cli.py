"""`coterie export`, and the commands that use a bundle."""

import io
import sys
from pathlib import Path

import pytest

import coterie
from coterie.cli.export import FORMATS
from coterie.exports import exporting
from coterie.exports.parity import Parity


@pytest.fixture(scope="module")
def finished(chats, bases, tmp_path_factory) -> Path:
    """A run on conversations, whose model is a mixture of experts."""
    run = chats | {"base": str(bases / "llama"), "baselines": []}
    return coterie.run(run, out=tmp_path_factory.mktemp("talks") / "run").path


PARITY = "The logits differ from the trained model's by at most 1.7e-05 (largest logit: 17)"


@pytest.fixture
def measured(monkeypatch) -> None:
    """Compare nothing; the comparison is tested elsewhere."""
    monkeypatch.setattr(exporting, "measure", lambda *_: Parity(1.7e-5, 17.04, 64, "transformers"))


def test_the_formats_of_the_option_are_those_of_the_function() -> None:
    assert (exporting.AUTO, *exporting.FORMATS) == FORMATS


def test_a_model_is_exported(finished, measured, succeeds, refuses, tmp_path) -> None:
    out = tmp_path / "mine"
    printed = succeeds("export", finished, "--client", "anna", "--to", out)
    first, second, *_, last = printed.splitlines()
    assert first.startswith(f"{out} contains a mixture-of-experts checkpoint (not peft, because a")
    assert second == f"{PARITY}, as computed with transformers."
    assert last == f"{out / 'README.md'} shows how to load it."
    assert "So?" not in (out / "README.md").read_text()
    refuses("already contains an export", "export", finished, "--client", "anna", "--to", out)
    formats = "--format gif: choose one of auto, peft, merged, moe, bundle, gguf."
    refuses(formats, "export", finished, "--client", "anna", "--to", out, "--format", "gif")


def test_a_bundle_chats(finished, measured, succeeds, refuses, bases, tmp_path, monkeypatch):
    bundle = tmp_path / "mine"
    command = ("export", finished, "--client", "anna", "--to", bundle, "--format", "bundle")
    succeeds(*command)
    monkeypatch.chdir(bases)  # where the base lies
    options = ("--temperature", 0, "--tokens", 5)
    of_run = succeeds("generate", finished, "--client", "anna", "--prompt", "So", *options)
    of_bundle = succeeds("generate", bundle, "--prompt", "So", *options)
    assert of_bundle == of_run != ""
    outputs = []
    for model in ([finished, "--client", "anna"], [bundle]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("So?\n"))
        outputs.append(succeeds("chat", *model, *options))
    assert outputs[0] == outputs[1] != ""
    refuses("--with compares models of runs", "chat", bundle, "--with", "base")
    refuses("has no prompt template; use --prompt", "generate", bundle, "--field", "a=b")
