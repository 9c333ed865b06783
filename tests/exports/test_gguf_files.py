"""The correction of GGUF files, and what is said of a converter that is missing or fails."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import coterie
from coterie.errors import CoterieError
from coterie.exports.gguf import converter, correct_flags, to_gguf

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.fixture
def written(tmp_path) -> Path:
    """A file as the converter writes it, with a flag that adds a token, and without another."""
    file = tmp_path / "raw.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<end>", "a", "▁a"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("output.weight", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("begins", [False, True])
def test_tokenizer_flags_are_set_and_the_rest_is_kept(begins, written, other, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(other)
    if begins:
        special = [("<end>", tokenizer.bos_token_id)]
        post = TemplateProcessing(single="<end> $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = post
    corrected = tmp_path / "corrected.gguf"
    correct_flags(written, corrected, tokenizer)
    before, after = fields(written), fields(corrected)
    assert after.pop("tokenizer.ggml.add_bos_token") == begins
    assert not after.pop("tokenizer.ggml.add_space_prefix")
    assert not after.pop("tokenizer.ggml.add_eos_token")
    for name in ("general.architecture", "tokenizer.chat_template", "tokenizer.ggml.tokens"):
        assert after[name] == before[name]
    assert after["tokenizer.chat_template"] == TEMPLATE
    [tensor] = gguf.GGUFReader(corrected).tensors
    assert tensor.data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_space_that_the_tokenizer_adds_is_added(written, other, tmp_path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(other)
    tokenizer.convert_ids_to_tokens = lambda _: "▁a"
    correct_flags(written, tmp_path / "corrected.gguf", tokenizer)
    assert fields(tmp_path / "corrected.gguf")["tokenizer.ggml.add_space_prefix"]


def test_a_missing_converter_is_said_in_a_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(CoterieError, match=r"names .* does not contain convert_hf_to_gguf\.py"):
        converter()
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CoterieError, match=r"is not on PATH; download the source of llama\.cpp"):
        converter()
    script = tmp_path / "convert_hf_to_gguf.py"
    script.touch(mode=0o755)
    assert converter() == script


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sentencepiece_of_nobody", "needs the package sentencepiece_of_nobody; run: pip"),
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized')", "into words"),
        ("import sys; sys.exit('Model Riddle is not supported')", "failed: Model Riddle is not"),
        ("pass", "failed: it was killed"),
    ],
)
def test_a_failed_conversion_is_one_sentence(program, words, bases, monkeypatch, tmp_path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(program)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(CoterieError, match=words):
        to_gguf(bases / "llama", tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["convert_hf_to_gguf.py"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "always renormalises the weights"),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, "never renormalises the weights"),
        ({"model_type": "mixtral", "sliding_window": 16}, "ignores the sliding window of mixtral"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(config, words, monkeypatch, tmp_path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes | config))
    with pytest.raises(CoterieError, match=words):
        to_gguf(tmp_path, tmp_path / "model.gguf")


def test_without_the_package_its_extra_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CoterieError, match=r"install the extra: pip install 'coterie\[gguf\]'"):
        to_gguf(tmp_path, tmp_path / "model.gguf")


def test_an_export_without_a_converter_leaves_nothing(finished, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CoterieError, match=r"needs llama.cpp's convert_hf_to_gguf.py"):
        coterie.export(finished("comigs-1g1s"), "poet", tmp_path / "out", format="gguf")
    assert not list(tmp_path.iterdir())
