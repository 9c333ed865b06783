"""Bases that are incomplete, damaged or no bases: each is refused with a sentence of its own."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM
from typer.testing import CliRunner

import coterie
from coterie.bases import EMBEDDED, BaseSpec, load_base, load_skeleton
from coterie.cli import app
from coterie.errors import CoterieError

Tensors = dict[str, torch.Tensor]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
EMBEDDING = "transformer.wte.weight"
SHARD = "model-0000{}-of-00002.safetensors"


def change(folder: Path, with_tensors: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with_tensors(tensors)
    save_file(tensors, file, {"format": "pt"})


def configure(folder: Path, file: str = "config.json", **values: object) -> None:
    content = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps(content | values))


def drop(folder: Path, part: str) -> None:
    change(folder, lambda t: [t.pop(name) for name in list(t) if part in name])


def fill(folder: Path, part: str, value: float) -> None:
    change(folder, lambda t: [t[name].view(-1)[-1:].fill_(value) for name in t if part in name])


def add_layer(folder: Path) -> None:
    def copy(tensors: Tensors) -> None:
        names = [name for name in tensors if "h.1." in name]
        tensors.update({name.replace("h.1.", "h.2."): tensors[name] + 0 for name in names})

    change(folder, copy)


def rename(folder: Path) -> None:
    change(folder, lambda t: t.update({f"base_model.model.{name}": t.pop(name) for name in [*t]}))


def shard(folder: Path, second: Callable[[Path], object] = Path.stat) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: SHARD.format(1 + i % 2) for i, name in enumerate(tensors)}
    for file in set(names.values()):
        part = {n: tensors[n] for n in names if names[n] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    second(folder / SHARD.format(2))


def cut(folder: Path, name: str, part: float = 0.5) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * part)])


def replace_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')


def add_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(folder)


def forget_tokens(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_encoder(folder: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=1024, num_attention_heads=1, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def bare_adapter(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    write_adapter(folder)


def put(name: str, text: str) -> Callable[[Path], object]:
    """Return a function that writes a text in the place of a file of a base."""
    return lambda folder: (folder / name).write_text(text)


MODEL, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer is missing": (lambda f: drop(f, "h.1."), r"lacks transformer\.h\.1\..* and 9 more"),
    "a bias is missing": (lambda f: drop(f, "ln_f.bias"), r"lacks transformer\.ln_f\.bias;"),
    "the embedding is missing": (lambda f: drop(f, "wte"), r"lacks .*transformer\.wte\.weight"),
    "config.json has more layers": (lambda f: configure(f, n_layer=9), r"lacks transformer\.h\.2"),
    "fewer layers": (
        lambda f: configure(f, n_layer=1),
        r"does not describe transformer\.h\.1\..* more tensors",
    ),
    "a further layer": (add_layer, r"does not describe transformer\.h\.2\..* more tensors"),
    "names have a prefix": (rename, r"incomplete: it lacks lm_head\.weight"),
    "another vocab_size": (
        lambda f: configure(f, vocab_size=1100),
        r"wte\.weight has shape \[1024, 32\] in the checkpoint, but \[1100, 32\]",
    ),
    "another width": (lambda f: configure(f, n_embd=16), r"does not match its config\.json"),
    "another context": (lambda f: configure(f, n_positions=33), r"transformer\.wpe\.weight has"),
    "NaN": (
        lambda f: fill(f, "h.1.mlp.c_fc.weight", float("nan")),
        r"h\.1\.mlp\.c_fc\.weight cont",
    ),
    "infinity": (lambda f: fill(f, "ln_f.weight", float("inf")), r"ln_f\.weight contains values"),
}
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half the weights": (
        lambda f: cut(f, MODEL),
        r"model\.safetensors is damaged or incomplete \([\d,]+ bytes",
    ),
    "empty weights": (lambda f: cut(f, "model.safetensors", 0), r"incomplete \(0 bytes"),
    "a pointer as weights": (put(MODEL, POINTER), r"model\.safetensors is a Git LFS pointer"),
    "a web page as weights": (put(MODEL, "<html>" * 50), r"model\.safetensors is damaged"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"contains no weights"),
    "a pickle": (lambda f: replace_weights(f, "pytorch_model.bin"), r"pickle \(pytorch_model\.bin"),
    "GGUF": (lambda f: replace_weights(f, "m.gguf"), r"stores its weights in m\.gguf"),
    "a shard is missing": (
        lambda f: shard(f, Path.unlink),
        r"lacks the weight file model-00002-of-00002",
    ),
    "a pointer as a shard": (
        lambda f: shard(f, lambda file: file.write_text(POINTER)),
        r"model-00002-of-00002\.safetensors is a Git LFS",
    ),
    "an adapter": (bare_adapter, r"PEFT adapter of 'some/model'"),
    "an adapter beside a model": (write_adapter, r"PEFT adapter of 'some/model'"),
    "no architecture": (
        lambda f: configure(f, model_type="riddle"),
        r"architecture 'riddle' of .* is unknown to transformers",
    ),
    "an encoder-decoder": (lambda f: configure(f, model_type="t5"), r"not a causal language model"),
    "an encoder": (write_encoder, r"not a causal language model"),
    "no config.json": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "half a config.json": (lambda f: cut(f, "config.json"), r"config\.json is not valid JSON"),
    "a pointer as config.json": (put(CONFIG, POINTER), r"config\.json is a Git LFS pointer"),
    "a list as config.json": (put(CONFIG, "[]"), r"config\.json does not contain a JSON object"),
    "a word for a number": (lambda f: configure(f, n_layer="six"), r"Field 'n_layer' expected int"),
    "heads that do not divide": (lambda f: configure(f, n_head=3), r"divisible by num_heads"),
    "no tokenizer": (without_tokenizer, r"has no tokenizer"),
    "a pointer as tokenizer": (put(TOKENIZER, POINTER), r"tokenizer\.json is a Git LFS pointer"),
    "null as tokenizer": (
        put(TOKENIZER, "null"),
        r"tokenizer\.json does not contain a JSON object",
    ),
    "an empty vocabulary": (forget_tokens, r"has only special tokens"),
    "more tokens than embeddings": (
        add_tokens,
        r"1,026 tokens with ids up to 1,025, but the base's embedding has only 1,024 rows",
    ),
}


@pytest.mark.parametrize("fault", WEIGHTS | FILES)
def test_a_run_refuses_the_base_before_it_makes_a_folder(fault, folder, config, tmp_path) -> None:
    damage, message = (WEIGHTS | FILES)[fault]
    damage(folder)
    config = config(method="fedavg", base=str(folder))
    with pytest.raises(CoterieError, match=message) as refused:
        coterie.run(config, out=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", FILES)
def test_the_command_that_shows_a_base_refuses_its_files(fault, folder) -> None:
    damage, message = FILES[fault]
    damage(folder)
    with pytest.raises(CoterieError, match=message):
        CliRunner().invoke(app, ["base", str(folder)], catch_exceptions=False)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_base_with_nan_is_refused(weights, folder) -> None:
    pytest.importorskip("bitsandbytes")
    fill(folder, "h.1.mlp.c_fc.weight", float("nan"))
    with pytest.raises(CoterieError, match=r"h\.1\.mlp\.c_fc\.weight contains values"):
        load_base(BaseSpec(name=str(folder), weights=weights), "bf16", 16)


def old_buffers(folder: Path) -> None:
    masks = {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e4)}
    names = {f"transformer.h.{n}.attn.{name}": masks[name] + 0 for n in (0, 1) for name in masks}
    change(folder, lambda t: t.update(names))


PUBLISHED = {
    "causal masks": old_buffers,
    "shards": shard,
    "another head": lambda f: change(f, lambda t: t.update({"v_head.weight": torch.ones(1, 4)})),
    "tied head": lambda f: change(f, lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 0})),
    "an unrelated file": lambda f: (f / "trainer_state.json").write_text(POINTER),
}


@pytest.mark.parametrize("as_published", PUBLISHED.values(), ids=PUBLISHED)
def test_what_a_checkpoint_may_have_more_or_less_loads(as_published, folder) -> None:
    whole = load_base(str(folder), "fp32", 16).digest
    as_published(folder)
    assert load_base(str(folder), "fp32", 16).digest == whole


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path) -> None:
    folder = Path(shutil.copytree(EMBEDDED / "tiny-llama", tmp_path / "llama"))
    whole = load_base(str(folder), "fp32", 16).digest
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(5)]
    change(folder, lambda t: t.update({name: torch.ones(16) for name in names}))
    assert load_base(str(folder), "fp32", 16).digest == whole
    bias = torch.ones(load_skeleton(str(folder)).config.hidden_size)
    change(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": bias}))
    refusal = r"does not describe model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(CoterieError, match=refusal):
        load_base(str(folder), "fp32", 16)


def test_one_function_loads_and_checks_the_weights_of_every_base() -> None:
    loaders = {
        path.name
        for path in Path(coterie.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
        if ast.unparse(node.value).endswith(("Model", "ForCausalLM"))
    }
    assert loaders == {"whole.py"}
