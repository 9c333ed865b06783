"""Bases in the format that their checkpoint keeps, or in another that the run file names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.bases import Base, BaseSpec, load_base
from coterie.config.run import RunConfig
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, deploy

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def kept(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of a base that is kept in a format."""
    folder = tmp_path_factory.mktemp("kept")
    for name, dtype in KINDS.items():
        for family in ("gpt2", "llama"):
            place = folder / f"{family}-{name}"
            model: Any = AutoModelForCausalLM.from_pretrained(bases / family, dtype=dtype)
            model.save_pretrained(place)
            AutoTokenizer.from_pretrained(bases / family).save_pretrained(place)
    return lambda family, name: str(folder / f"{family}-{name}")


def weights_of(base: Base) -> dict[str, Tensor]:
    return dict(base.model.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_a_base_kept_in_bf16_has_its_checkpoint_s_bits(kept, family, precision) -> None:
    actual = weights_of(load_base(kept(family, "bf16"), precision, 16))
    stored = load_file(Path(kept(family, "bf16")) / "model.safetensors")
    assert all(torch.equal(actual[name], stored[name]) for name in actual)
    assert {tensor.dtype for tensor in actual.values()} == {torch.bfloat16}


def test_float16_becomes_bfloat16(kept) -> None:
    base = load_base(kept("llama", "fp16"), "bf16", 16)
    stored = load_file(Path(kept("llama", "fp16")) / "model.safetensors")
    for name, weight in weights_of(base).items():
        assert torch.equal(weight, stored[name].bfloat16())
    assert base.model.model.rotary_emb.inv_freq.dtype == torch.float32  # pyright: ignore


NAMED_FORMATS = [
    (None, "fp32", torch.float32, torch.float32),
    ("fp32", "fp32", torch.float32, torch.float32),
    ("fp32", "bf16", torch.float32, torch.bfloat16),
    ("fp32", None, torch.float32, torch.float32),
    ("bf16", "bf16", torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("weights", "precision", "outer", "linear"), NAMED_FORMATS)
@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_weights_have_named_formats(kept, bases, stored, weights, precision, outer, linear) -> None:
    folder = kept("llama", "bf16") if stored == "bf16" else str(bases / "llama")
    model: Any = load_base(BaseSpec(name=folder, weights=weights), precision, 16).model
    assert model.get_input_embeddings().weight.dtype == outer
    assert model.model.layers[0].mlp.up_proj.weight.dtype == linear
    assert model.model.norm.weight.dtype == outer


def test_digests_tell_formats_and_weights_apart(kept, bases) -> None:
    def digest(folder: str, weights: Any) -> str:
        return load_base(BaseSpec(name=folder, weights=weights), "bf16", 16).digest

    bf16, fp32 = kept("llama", "bf16"), str(bases / "llama")
    assert digest(bf16, None) == digest(bf16, "bf16") == digest(fp32, "bf16")
    assert len({digest(bf16, None), digest(bf16, "fp32"), digest(fp32, None)}) == 3


@pytest.fixture(scope="module")
def halved(config: Callable[..., RunConfig], kept: Callable[..., str]) -> Callable[..., RunConfig]:
    """A run on a base that is kept in bf16."""
    training = {"steps": 2, "batch": 2, "precision": "bf16"}

    def make(family: str, **changes: Any) -> RunConfig:
        return config(base=kept(family, "bf16"), rounds=2, training=training, **changes)

    return make


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_bf16_base_resumes_to_the_same_bits(halved, family, resumed) -> None:
    whole = resumed(halved(family))
    trained = whole.load("client-poet")["adapter"]
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    model = coterie.load(whole.path, "poet")
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16  # pyright: ignore
    losses = [line["value"] for line in whole.metrics() if line["name"] == "loss/experts"]
    assert losses
    assert all(5 < loss < 12 for loss in losses)


def test_a_base_kept_in_bf16_ends_in_the_same_bits_when_deployed(halved, tmp_path) -> None:
    run = halved("llama")
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)


def test_scores_in_bf16_are_near_those_in_fp32(halved, kept, tmp_path) -> None:
    run = halved("llama", method="pretrained")
    fp32 = run.training.model_copy(update={"precision": "fp32"})
    exact = run.model_copy(update={"training": fp32})
    results = [coterie.run(run, out=tmp_path / run.precision).results for run in (run, exact)]
    scores = [result["pretrained"]["trained"]["poet"]["perplexity"] for result in results]
    assert scores[0] == pytest.approx(scores[1], rel=1e-2)
