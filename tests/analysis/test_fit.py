"""`coterie base --fit` finds settings that fit a GPU, from the base's configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from looped import succeed

from coterie.analysis.fit import CONTEXT, SPARE, fitting, parsed_size
from coterie.analysis.need import need_of
from coterie.bases import load_tokenizer
from coterie.config.run import RunConfig, parse
from coterie.errors import CoterieError

KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 151936, 14, 2, 64, True),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 128256, 32, 8, 64, True),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 151936, 32, 8, 128, True),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 128256, 32, 8, 128, False),
}
"""The shapes of published models, in the order of KEYS."""


def write_published(folder: Path, name: str) -> Path:
    """Write the configuration of a published model, with the tokenizer of a built-in base."""
    path, shape = folder / name, dict(zip(KEYS, SHAPES[name], strict=True))
    load_tokenizer("tiny-gpt2").save_pretrained(path)
    more: dict[str, Any] = {"dtype": "bfloat16", "max_position_embeddings": 32768}
    more["architectures"] = [f"{str(shape['model_type']).title()}ForCausalLM"]
    (path / "config.json").write_text(json.dumps(shape | more))
    return path


def run_on(base: Path | str) -> RunConfig:
    clients = [{"name": "anna", "path": "x"}, {"name": "ben", "path": "x"}]
    sections = {"data": {"window": 128}, "training": {"batch": 64}}
    values = {"base": str(base), "clients": clients, "method": "comigs-1g1s", **sections}
    return parse({**values, "device": "cuda"})  # for which settings are found


@pytest.mark.parametrize(
    ("name", "size", "weights"),
    [
        pytest.param("qwen2.5-0.5b", "8GB", "bf16"),
        pytest.param("llama-3.2-1b", "8GB", "bf16", marks=pytest.mark.thorough),
        pytest.param("qwen3-4b", "6.5GB", "nf4", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "24GB", "bf16", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "14GB", "int8", marks=pytest.mark.thorough),
    ],
)
def test_the_lines_fit(name, size, weights, tmp_path) -> None:
    config = run_on(write_published(tmp_path, name))
    table, lines = fitting(config, "anna", parsed_size(size))
    assert len(table.rows) == 6
    values = yaml.safe_load(lines)
    assert values["base"]["weights"] == weights
    need = need_of(parse({**config.as_dict(), **values}), "anna", "cuda")
    assert need.memory / (1 - SPARE) + CONTEXT <= parsed_size(size)


def test_a_larger_gpu_gets_larger_batches() -> None:
    config = run_on("tiny-llama")
    texts = [fitting(config, "anna", parsed_size(size))[1] for size in ("1.3GB", "80GB")]
    small, large = map(yaml.safe_load, texts)
    assert large["training"] == {"batch": 64, "micro_batch": 64, "checkpointing": False}
    assert large["base"]["weights"] == "bf16"
    assert small["training"]["micro_batch"] < 64
    assert large["data"] == small["data"] == {"window": 128}


def test_what_fits_nothing_is_told_the_smallest_need() -> None:
    with pytest.raises(CoterieError, match=r"Nothing fits 1\.1 GB.* needs at least .* GB, in nf4"):
        fitting(run_on("tiny-llama"), "anna", parsed_size("1.08GB"))
    config = parse({**run_on("tiny-llama").as_dict(), "method": "pretrained"})
    with pytest.raises(CoterieError, match="There is no estimate for the method 'pretrained'"):
        fitting(config, "anna", parsed_size("8GB"))


def test_sizes_have_decimal_or_binary_units() -> None:
    assert (parsed_size("24GB"), parsed_size(" 1.5 gib")) == (24 * 10**9, 3 * 2**29)
    for wrong in ("24", "GB", "24 potatoes", "-1GB", "24KB"):
        with pytest.raises(CoterieError, match="give a size such as 24GB"):
            parsed_size(wrong)


def test_the_command_takes_a_base_or_a_run(tmp_path) -> None:
    output = succeed("base", "tiny-llama", "--fit", "8GB")
    assert "auto on" in output
    assert "data: {window: 256}" in output  # the base's context
    run = {"base": "tiny-llama", "clients": [{"name": "anna"}], "data": {"window": 64}}
    (tmp_path / "us.yaml").write_text(yaml.safe_dump({**run, "method": "fedit"}))
    output = succeed("base", tmp_path / "us.yaml", "--fit", "8GB")
    assert "fedit on" in output
    assert "data: {window: 64}" in output
