"""Whole exports: the format that `auto` chooses, the folder, and everything that can go wrong."""

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from every_method import marks
from safetensors.torch import load_file, save_file
from sources import FAR, logits
from transformers import AutoConfig, AutoModelForCausalLM

import coterie
from coterie import CoterieError
from coterie.bases import EMBEDDED
from coterie.exports import exporting, moe
from coterie.exports.parity import Parity
from coterie.runs import RunFolder
from coterie.testing.small import write_tokenizer

AUTO = {
    ("fedit", "llama"): "peft",
    ("fedit", "gpt2"): "peft",
    ("exact", "llama"): "peft",
    ("fedprompt", "llama"): "peft",
    ("local-full", "gpt2"): "merged",
    ("pretrained", "llama"): "merged",
    ("comigs-1g1s", "llama"): "moe",
    ("two sets", "llama"): "moe",
    ("comigs-1g1s", "gpt2"): "bundle",
    ("fedamole", "llama"): "bundle",
    ("beside", "llama"): "bundle",
}
FAST = [(method, "llama") for method in ("fedit", "comigs-1g1s", "fedamole")]
FAST += [("comigs-1g1s", "gpt2")]
Finished = Callable[..., Path]


@pytest.mark.parametrize(
    ("method", "base"), [pytest.param(*key, marks=marks(key, FAST, AUTO)) for key in AUTO]
)
def test_auto_chooses_an_exact_format(method, base, finished, in_this_process, tmp_path) -> None:
    run, expected = finished(method, base), AUTO[method, base]
    done = coterie.export(run, "poet", tmp_path / "out")
    assert (done.format, done.reason is None) == (expected, expected == "peft")
    assert done.difference <= 2e-5 * done.largest
    described = json.loads((done.path / "coterie.json").read_text())
    assert described["export"] == expected
    assert described["method"] == RunFolder(run).description["config"]["method"]["name"]
    private_words_are_absent(done.path, run, base)


def test_a_pooled_model_is_exported_under_any_name(finished, in_this_process, tmp_path) -> None:
    run = finished("centralized")
    for client in ("everyone", "poet"):
        card = (coterie.export(run, client, tmp_path / client).path / "README.md").read_text()
        assert "one model, trained on the texts of all clients together" in card
        assert "Method: `centralized`, with 3 clients" in card
        assert "assed on to other clients" not in card
        assert ("perplexity" in card) == (client == "poet")  # the test text is a client's
    assert weights(tmp_path / "everyone") == weights(tmp_path / "poet")


def test_the_server_s_own_model_is_exported(teachers, in_this_process, tmp_path) -> None:
    run = coterie.run(teachers(rounds=1), out=tmp_path / "run").path
    done = coterie.export(run, "server", tmp_path / "out")
    assert (done.format, done.difference is not None) == ("peft", True)
    assert "the server's model" in (done.path / "README.md").read_text()
    name = next(iter(RunFolder(run).description["clients"]))
    assert weights(done.path) != weights(coterie.export(run, name, tmp_path / "client").path)


def weights(folder: Path) -> dict[str, bytes]:
    """Return the content of each file with tensors in a folder."""
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def private_words_are_absent(folder: Path, run: Path, base: str) -> None:
    """Check that no file names a local path or a client, and that the card is complete."""
    for file in folder.rglob("*"):
        data = file.read_bytes()
        for word in (str(run.parent), "/tmp", "/work", "poet", "whaler"):
            assert word.encode() not in data or file.name == "tokenizer.json", (file.name, word)
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata)["license"] == "unknown"
    for expected in (
        f"Base: {base}; licence of the base: unknown",
        "with 3 clients",
        "perplexity",
        "- Passed on to other clients: nothing.",
        "- Privacy: no noise is added to anything.",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("format", "method"),
    [
        ("moe", "comigs-1g1s"),
        pytest.param("peft", "fedit", marks=pytest.mark.slow),
        pytest.param("merged", "fedit", marks=pytest.mark.slow),
        pytest.param("bundle", "fedamole", marks=pytest.mark.slow),
    ],
)
def test_another_process_loads_the_folder(format: str, method: str, finished, tmp_path) -> None:
    done = coterie.export(finished(method), "poet", tmp_path / "out", format=format)
    assert done.format == format
    assert done.tool == {"peft": "peft", "bundle": "coterie"}.get(format, "transformers")
    assert done.difference is not None
    assert 0 <= done.difference <= 2e-5 * done.largest


def test_the_other_process_cannot_import_coterie(finished, monkeypatch, tmp_path) -> None:
    usage = moe.MOE.usage
    needy = replace(moe.MOE, usage=lambda *facts: f"import coterie\n{usage(*facts)}")
    monkeypatch.setitem(exporting.FORMATS, "moe", needy)
    with pytest.raises(CoterieError, match=r"loaded again: ModuleNotFoundError: import of coterie"):
        coterie.export(finished("comigs-1g1s"), "poet", tmp_path / "out", format="moe")
    assert not list(tmp_path.iterdir())


def scale(file: Path, factor: float) -> None:
    """Multiply a weight in a file of weights."""
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= factor
    save_file(tensors, file, {"format": "pt"})


def test_a_bundle_opens_without_the_run(finished, in_this_process, tmp_path) -> None:
    run = shutil.copytree(finished("fedamole"), tmp_path / "run")
    base = RunFolder(run).description["config"]["base"]
    expected = logits(coterie.load(run, "poet"))
    done = coterie.export(run, "poet", tmp_path / "out", format="bundle")
    shutil.rmtree(run)
    moved = done.path.rename(tmp_path / "elsewhere")
    assert torch.equal(logits(coterie.load(moved, base=base)), expected)
    assert coterie.tokenizer(moved).get_vocab()
    with pytest.raises(CoterieError, match=r"export it with `coterie export` or coterie.export"):
        coterie.load(moved, base=base).save_pretrained(tmp_path / "saved")
    with pytest.raises(CoterieError, match=r"The base 'llama' could not be loaded"):
        coterie.load(moved)
    other = shutil.copytree(base, tmp_path / "llama")
    scale(other / "model.safetensors", 1.001)
    with pytest.raises(CoterieError, match=r"is not the base that the model in .* was trained on"):
        coterie.load(moved, base=str(other))
    described = json.loads((moved / "coterie.json").read_text())
    (moved / "coterie.json").write_text(json.dumps(described | {"format": 9}))
    with pytest.raises(CoterieError, match=r"coterie\.json is damaged: format"):
        coterie.load(moved, base=base)


def test_a_format_that_computes_something_else_is_refused(finished, tmp_path) -> None:
    for method, format, exact in [
        ("comigs-1g1s", "peft", "exact formats are moe and bundle"),
        ("comigs-1g1s", "merged", "exact formats are moe and bundle"),
        ("fedit", "moe", "exact formats are peft and merged and bundle"),
        ("fedamole", "merged", "the exact format is bundle"),
    ]:
        with pytest.raises(CoterieError, match=rf"as {format}, because .*; {exact}"):
            coterie.export(finished(method), "poet", tmp_path / "out", format=format)
    with pytest.raises(CoterieError, match=r"no format 'onnx'; choose one of auto, peft, merged"):
        coterie.export(finished("fedit"), "poet", tmp_path / "out", format="onnx")
    assert not list(tmp_path.iterdir())


def test_lost_expert_updates_are_noticed(finished, in_this_process, monkeypatch, tmp_path) -> None:
    expert = moe._expert

    def without_update(mixture: Any, experts: Any) -> Any:
        monkeypatch.setattr(mixture, "gain", 0.0)
        return expert(mixture, experts)

    monkeypatch.setattr(moe, "_expert", without_update)
    with pytest.raises(CoterieError, match=r"model differ by .* nothing was exported as moe"):
        coterie.export(finished("comigs-1g1s"), "poet", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_untrained_base_that_was_kept_is_exported(finished, in_this_process, tmp_path) -> None:
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 1.0}
    run = finished("fedit-ft", "tiny-llama", training=training, evaluation={"keep": "best"})
    assert (RunFolder(run).result or {})["kept"]["poet"] == 0
    done = coterie.export(run, "poet", tmp_path / "out")
    assert done.format == "merged"
    assert "the model is the base itself" in done.notes[0]
    exported = AutoModelForCausalLM.from_pretrained(done.path)
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED / "tiny-llama", dtype=torch.float32)
    assert torch.equal(logits(exported), logits(base))
    assert "licence of the base: apache-2.0" in (done.path / "README.md").read_text()


def test_a_base_in_bf16_is_exported_in_float32(finished, bases, in_this_process, tmp_path) -> None:
    """Check that the export does not round small updates to bf16."""
    shutil.copytree(bases / "llama", bases / "llama-bf16", dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.bfloat16)
    model.save_pretrained(bases / "llama-bf16")
    training = {"steps": 1, "batch": 2, "precision": "bf16", "learning_rate": 1e-4}
    run = finished("comigs-2g", "llama-bf16", training=training)
    done = coterie.export(run, "poet", tmp_path / "out")
    assert done.difference <= 2e-5 * done.largest
    exported = load_file(done.path / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    before = load_file(bases / "llama-bf16" / "model.safetensors")
    change = exported[name] - before["model.layers.0.mlp.up_proj.weight"].float()
    rounded = exported[name].bfloat16() - before["model.layers.0.mlp.up_proj.weight"]
    assert change.norm() > 0
    assert (rounded.float() - change).norm() > 0.05 * change.norm()


def test_a_run_that_cannot_be_exported_says_why(finished, tmp_path) -> None:
    run = shutil.copytree(finished("fedit"), tmp_path / "run")
    with pytest.raises(CoterieError, match=r"is not a bundle; name the client"):
        coterie.load(run)
    with pytest.raises(CoterieError, match=r"has no client 'nobody'.*diarist, poet, whaler"):
        coterie.export(run, "nobody", tmp_path / "out")
    with pytest.raises(CoterieError, match=r"is not a run folder"):
        coterie.export(tmp_path, "poet", tmp_path / "out")
    described = json.loads((run / "run.json").read_text())
    described["config"]["base"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(described))
    with pytest.raises(CoterieError, match=r"The base '.*gone' could not be loaded"):
        coterie.export(run, "poet", tmp_path / "out")
    (run / "result.json").unlink()
    refusal = r"is not finished; finish it with `coterie run --resume"
    with pytest.raises(CoterieError, match=refusal):
        coterie.export(run, "poet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_that_has_changed_is_refused(values, bases, tmp_path) -> None:
    base = shutil.copytree(bases / "llama", tmp_path / "base")
    run = coterie.run(values(base=str(base), method="fedit", rounds=1), out=tmp_path / "run")
    scale(base / "model.safetensors", -1.0)
    with pytest.raises(CoterieError, match=r"The base '.*base' has changed since the run in"):
        coterie.export(run, "poet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_bases_adapter(weights: str, values, bases, in_this_process, tmp_path) -> None:
    """Check that the card shows how to quantise the base in the same way."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    config = AutoConfig.from_pretrained(bases / "llama", **wide)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    base = {"name": str(tmp_path / "base"), "weights": weights}
    run = coterie.run(values(base=base, method="fedit", **FAR), out=tmp_path / "run")
    for format in ("peft", "bundle"):
        done = coterie.export(run, "poet", tmp_path / format, format=format)
        assert done.difference <= (exporting.QUANTISED if format == "peft" else 0) * done.largest
    assert "quantization_config=BitsAndBytesConfig" in (tmp_path / "peft/README.md").read_text()
    for format in ("merged", "moe"):
        with pytest.raises(CoterieError, match=r"exact formats are peft and bundle"):
            coterie.export(run, "poet", tmp_path / format, format=format)


def test_folders_of_others_are_never_replaced(finished, in_this_process, tmp_path) -> None:
    run, out = finished("fedit"), tmp_path / "out"
    out.mkdir()
    first = coterie.export(run, "poet", out, format="bundle")  # an empty folder is accepted
    with pytest.raises(CoterieError, match=r"already contains an export; .*--force"):
        coterie.export(run, "poet", out)
    assert (first.format, coterie.export(run, "poet", out, force=True).format) == ("bundle", "peft")
    assert not (out / "adapter.safetensors").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear Anna")
    (tmp_path / "file").write_text("Dear Ben")
    for name in ("mine", "file"):
        with pytest.raises(CoterieError, match=r"exists and is not an export"):
            coterie.export(run, "poet", tmp_path / name, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mine", "file"}


@pytest.mark.parametrize("format", ["peft", "merged", "bundle"])
def test_a_full_disk_leaves_the_earlier_export(format, finished, in_this_process, tmp_path) -> None:
    run, out = finished("fedit"), tmp_path / "out"
    coterie.export(run, "poet", out, format="bundle")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with limited(2000), pytest.raises(CoterieError, match=rf"Could not write {out}"):
        coterie.export(run, "poet", out, format=format, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file be longer than a number of bytes in the with block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_difference_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(CoterieError, match=r"by up to nan"):
        exporting._check(exporting.MOE, exporting.TOLERANCE, Parity(float("nan"), 17.0, 64, "peft"))
