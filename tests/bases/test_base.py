"""Errors for bases that cannot be loaded."""

import io
import json
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from transformers import AutoConfig, AutoModelForCausalLM

from coterie.bases import EMBEDDED, BaseSpec, load_base, load_skeleton, load_tokenizer
from coterie.errors import CoterieError


@pytest.mark.parametrize("damage", ["cut", "another model"])
def test_a_damaged_tokenizer_is_said_in_a_sentence(damage, tmp_path) -> None:
    words = json.loads((EMBEDDED / "tiny-gpt2" / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["type"] = "Riddle"
    text = json.dumps(words)
    (tmp_path / "tokenizer.json").write_text(text[:1000] if damage == "cut" else text)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / "tiny-gpt2" / name).read_bytes())
    message = r"tokenizer\.json is not valid JSON" if damage == "cut" else "could not be loaded"
    with pytest.raises(CoterieError, match=message):
        load_tokenizer(str(tmp_path))


def test_what_is_not_the_base_s_fault_is_not_blamed_on_it(monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("coterie.bases.loading.AutoTokenizer.from_pretrained", full)
    with pytest.raises(MemoryError):
        load_tokenizer("tiny-gpt2")


CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(GPT2Config):
    model_type = "own"


class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize(
    "load",
    [lambda place: load_base(place, "fp32", 64), load_skeleton, load_tokenizer],
    ids=["base", "skeleton", "tokenizer"],
)
@pytest.mark.parametrize("known", [True, False], ids=["gpt2", "own"])
def test_python_that_comes_with_a_base_is_never_run(load, known, tmp_path, monkeypatch) -> None:
    place, marker = tmp_path / "own", tmp_path / "ran"
    place.mkdir()
    for path in (EMBEDDED / "tiny-gpt2").iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    (place / "own.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    for name, more in {
        "config.json": {"auto_map": names, **({} if known else {"model_type": "own"})},
        "tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
            **({} if known else {"tokenizer_class": "OwnTokenizer"}),
        },
    }.items():
        content = json.loads((place / name).read_text(encoding="utf-8")) | more
        (place / name).write_text(json.dumps(content))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    if known:
        assert load(str(place))  # with the code of transformers
    else:
        with pytest.raises(CoterieError, match=r"code shipped with a base|not be loaded"):
            load(str(place))
    assert not marker.exists()


@pytest.mark.parametrize("nested", [False, True], ids=["text alone", "with pictures"])
def test_a_window_is_at_most_the_base_s_context(nested, tmp_path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 8192}
    text["max_position_embeddings"] = 40
    config = AutoConfig.for_model("gemma3_text", **text)
    if nested:
        vision = {**sizes, "image_size": 32, "patch_size": 16}
        config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    load_tokenizer("tiny-gpt2").save_pretrained(tmp_path)
    load_base(str(tmp_path), "fp32", 40)
    with pytest.raises(CoterieError, match=r"window is 41 tokens, but .* reads at most 40"):
        load_base(str(tmp_path), "fp32", 41)


@pytest.mark.parametrize(
    ("weights", "message"),
    [(None, "set base.weights: nf4 or `base` to a"), ("nf4", "tiny-gpt2 in nf4; set `base` to a")],
)
def test_too_little_memory_for_a_base_is_said_in_a_sentence(weights, message, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        torch.empty(2**46)

    monkeypatch.setattr("coterie.bases.loading.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(CoterieError) as refused:
        load_base(BaseSpec(name="tiny-gpt2", weights=weights), "bf16", 64)
    assert message in str(refused.value)
    assert str(refused.value).startswith("The machine has too little memory for the base tiny-gpt2")


def test_a_gated_base_is_said_to_be_gated(monkeypatch) -> None:
    def refused(*_: object, **__: object) -> None:
        answer = httpx2.Response(403, request=httpx2.Request("GET", "https://hub"))
        try:
            raise GatedRepoError("Access to model x is restricted.", response=answer)
        except GatedRepoError as error:
            raise OSError("You are trying to access a gated repo.") from error

    monkeypatch.setattr("coterie.bases.loading._find", lambda *_: None)
    monkeypatch.setattr("coterie.bases.loading.PreTrainedConfig.get_config_dict", refused)
    with pytest.raises(CoterieError, match=r"'some/base' is gated: accept its licence"):
        load_tokenizer("some/base")


@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_of_one_sequence_copies_no_weight(rows) -> None:
    # The last positions of several sequences are not contiguous. That of one sequence counts as
    # contiguous, but has the strides of the whole sequence.
    model = load_base("tiny-llama", "fp32", 16).model
    strides: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: strides.append(inputs[0].stride()))
    model(input_ids=torch.arange(9).expand(rows, 9), logits_to_keep=1)
    assert strides == [(192, 192, 1)]
