"""Exports of runs that merged an existing LoRA adapter into their base."""

import shutil

import pytest
from lora_folders import write_lora
from sources import FAR, logits

import coterie
from coterie.errors import CoterieError


def test_every_export_contains_the_bases_adapter(values, bases, in_this_process, tmp_path) -> None:
    adapter = write_lora(tmp_path / "lora", bases / "llama")
    name = str(bases / "llama")
    run = values(base=name, adapter=str(adapter), method="fedit", **FAR, rounds=1)
    path = coterie.run(run, out=tmp_path / "run").path
    with pytest.raises(CoterieError, match="the run merged another adapter into its base"):
        coterie.export(path, "poet", tmp_path / "out", format="peft")
    merged = coterie.export(path, "poet", tmp_path / "merged")
    assert merged.format == "merged"
    bundle = coterie.export(path, "poet", tmp_path / "bundle", format="bundle").path
    expected = logits(coterie.load(path, "poet"))
    shutil.rmtree(path)
    shutil.rmtree(adapter)
    assert (logits(coterie.load(bundle, base=name)) - expected).abs().max() < 1e-4
    for file in (merged.path, bundle):
        assert str(tmp_path) not in (file / "README.md").read_text()
