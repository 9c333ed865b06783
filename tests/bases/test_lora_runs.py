"""Runs whose base has an existing LoRA adapter: methods, resuming, deployments, loading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import METHODS, some
from lora_folders import write_lora
from peft import PeftModel
from transformers import AutoModelForCausalLM

import coterie
from coterie.bases import load_tokenizer
from coterie.errors import CoterieError
from coterie.messages.envelope import Order
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, assert_same_states, deploy, site

MODES = ("comigs-1g1s", "local-full", "fedamole", "fedit", "fedptuning")
FAST = ("comigs-1g1s", "local-full")


@pytest.fixture(scope="module")
def adapter(bases, tmp_path_factory) -> Path:
    targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    return write_lora(tmp_path_factory.mktemp("adapter") / "lora", bases / "gpt2", **targets)


@pytest.fixture(scope="module")
def merged(bases, adapter, tmp_path_factory) -> Path:
    """The base and the adapter as one base, made by PEFT alone."""
    folder = tmp_path_factory.mktemp("merged") / "gpt2"
    base: Any = AutoModelForCausalLM.from_pretrained(bases / "gpt2")
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(folder)
    load_tokenizer(str(bases / "gpt2")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", some(FAST, MODES))
def test_a_run_equals_one_on_the_merged_base(name, config, adapter, merged, tmp_path) -> None:
    bases = {"adapted": {"adapter": str(adapter)}, "merged": {"base": str(merged)}, "alone": {}}
    runs = {k: config(method=METHODS[name], rounds=2, **base) for k, base in bases.items()}
    paths = [coterie.run(run, out=tmp_path / k).path for k, run in runs.items()]
    adapted, plain, alone = map(RunFolder, paths)
    assert_same_states(adapted, plain)
    scores = [(run.outcome or {})["trained"] for run in (adapted, plain, alone)]
    assert scores[0] == scores[1] != scores[2]


@pytest.fixture(scope="module")
def finished(config, adapter, tmp_path_factory) -> Path:
    return coterie.run(config(adapter=str(adapter)), out=tmp_path_factory.mktemp("r") / "run").path


def test_a_loaded_model_has_the_adapter_under_its_own(finished, merged, config, tmp_path) -> None:
    same = coterie.run(config(base=str(merged)), out=tmp_path / "run").path
    ids = torch.arange(30)[None]
    actual, expected = (coterie.load(path, "poet")(ids).logits for path in (finished, same))
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_a_deployment_has_the_same_bits(config, adapter, finished, tmp_path) -> None:
    run = config(adapter=str(adapter))
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, RunFolder(finished))


def test_a_client_reads_no_adapter_that_only_the_server_names(config, adapter, tmp_path) -> None:
    run = config(adapter=str(adapter))
    order = Order(run="0" * 16, client="poet", kind="join", turn=0, config=run.visible_to("poet"))
    client = site(run, "poet", tmp_path)
    assert client.config(order).base == run.base
    with pytest.raises(CoterieError, match="copy of the adapter with --adapter"):
        replace(client, adapter=None).config(order)
    plain = order.model_copy(update={"config": config().visible_to("poet")})
    assert client.config(plain).base == config().base


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_a_changed_adapter_is_refused(change, config, bases, killed_in_round, tmp_path) -> None:
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    folder = write_lora(tmp_path / "lora", bases / "gpt2", **targets)
    killed_in_round(2, config(adapter=str(folder)), tmp_path / "run")
    if change == "changed":
        write_lora(folder, bases / "gpt2", 0.1, **targets)
        words = "LoRA adapter that `adapter` names has changed since the run in"
    else:
        folder.rename(tmp_path / "elsewhere")
        words = "`adapter`: there is no folder .*; correct the path"
    with pytest.raises(CoterieError, match=words):
        coterie.resume(tmp_path / "run")
    with pytest.raises(CoterieError, match=words):
        coterie.load(tmp_path / "run", "poet")
