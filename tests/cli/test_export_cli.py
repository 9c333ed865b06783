"""`coterie export`, and the commands that use a bundle."""

import io
import json
import sys
from pathlib import Path

import pytest

import coterie
from coterie.cli.export import FORMATS
from coterie.exports import exporting
from coterie.exports.parity import Parity


@pytest.fixture(scope="module")
def finished(values, bases, tmp_path_factory) -> Path:
    """A run on conversations, whose model is a mixture of experts."""
    folder = tmp_path_factory.mktemp("talks")
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "The sea."}]
    (folder / "anna.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 12, "utf-8")
    run = values(
        base=str(bases / "llama"),
        rounds=1,
        data={"window": 40, "messages": {}},
        data_root=str(folder),
        clients=[{"name": name, "path": "anna.jsonl"} for name in ("anna", "ben")],
        evaluation={"keep": "last"},
    )
    return coterie.run(run, out=folder / "run").path


PARITY = "The logits differ from the trained model's by at most 1.7e-05 (largest logit: 17)"


@pytest.fixture
def measured(monkeypatch) -> None:
    """Compare nothing; the comparison is tested elsewhere."""
    monkeypatch.setattr(exporting, "measure", lambda *_: Parity(1.7e-5, 17.04, 64, "transformers"))


def test_the_formats_of_the_option_are_those_of_the_function() -> None:
    assert (exporting.AUTO, *exporting.FORMATS) == FORMATS


def test_a_model_is_exported(finished, measured, coterie_command, refuses, tmp_path) -> None:
    out = tmp_path / "mine"
    result = coterie_command("export", finished, "--client", "anna", "--to", out)
    assert result.code == 0
    first, second, *_, last = result.out.splitlines()
    assert first.startswith(f"{out} contains a mixture-of-experts checkpoint (not peft, because a")
    assert second == f"{PARITY}, as computed with transformers."
    assert last == f"{out / 'README.md'} shows how to load it."
    assert "So?" not in (out / "README.md").read_text()
    refuses("already contains an export", "export", finished, "--client", "anna", "--to", out)
    formats = "--format gif: choose one of auto, peft, merged, moe, bundle, gguf."
    refuses(formats, "export", finished, "--client", "anna", "--to", out, "--format", "gif")


def test_a_bundle_chats(finished, measured, coterie_command, refuses, bases, tmp_path, monkeypatch):
    bundle = tmp_path / "mine"
    command = ("export", finished, "--client", "anna", "--to", bundle, "--format", "bundle")
    assert coterie_command(*command).code == 0
    monkeypatch.chdir(bases)  # where the base lies
    options = ("--temperature", 0, "--tokens", 5)
    of_run = coterie_command("generate", finished, "--client", "anna", "--prompt", "So", *options)
    of_bundle = coterie_command("generate", bundle, "--prompt", "So", *options)
    assert of_bundle.out == of_run.out != ""
    outputs = []
    for model in ([finished, "--client", "anna"], [bundle]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("So?\n"))
        result = coterie_command("chat", *model, *options)
        assert result.code == 0
        outputs.append(result.out)
    assert outputs[0] == outputs[1] != ""
    refuses("--with compares models of runs", "chat", bundle, "--with", "base")
    refuses("has no prompt template; use --prompt", "generate", bundle, "--field", "a=b")
