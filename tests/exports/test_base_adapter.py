"""Exports of runs that merged an existing LoRA adapter into their base."""

import shutil

import pytest
from lora_folders import write_lora
from sources import logits

import coterie
from coterie.errors import CoterieError


def test_every_export_contains_the_bases_adapter(values, bases, in_this_process, tmp_path) -> None:
    adapter = write_lora(tmp_path / "lora", bases / "llama")
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.05}
    run = values(
        base=str(bases / "llama"),
        adapter=str(adapter),
        method="fedit",
        training=training,
        evaluation={"keep": "last"},
        rounds=1,
    )
    path = coterie.run(run, out=tmp_path / "run").path
    with pytest.raises(CoterieError, match="the run merged another adapter into its base"):
        coterie.export(path, "poet", tmp_path / "out", format="peft")
    merged = coterie.export(path, "poet", tmp_path / "merged")
    assert merged.format == "merged"
    bundle = coterie.export(path, "poet", tmp_path / "bundle", format="bundle").path
    expected = logits(coterie.load(path, "poet"))
    shutil.rmtree(path)
    shutil.rmtree(adapter)
    assert (logits(coterie.load(bundle, base=str(bases / "llama"))) - expected).abs().max() < 1e-4
    for file in (merged.path, bundle):
        assert str(tmp_path) not in (file / "README.md").read_text()
