"""What is said of a base that cannot be loaded."""

import io
import json

import pytest

from coterie.bases import EMBEDDED, load_base, load_skeleton, load_tokenizer
from coterie.errors import CoterieError


@pytest.mark.parametrize("damage", ["cut", "another model"])
def test_a_damaged_tokenizer_is_said_in_a_sentence(damage, tmp_path) -> None:
    words = json.loads((EMBEDDED / "tiny-gpt2" / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["type"] = "Riddle"
    text = json.dumps(words)
    (tmp_path / "tokenizer.json").write_text(text[:1000] if damage == "cut" else text)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / "tiny-gpt2" / name).read_bytes())
    with pytest.raises(CoterieError, match="could not be loaded"):
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
    """Nobody is asked, either, who could say yes."""
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
        with pytest.raises(CoterieError, match="could not be loaded"):
            load(str(place))
    assert not marker.exists()


def test_weights_as_a_pickle_are_not_read(tmp_path) -> None:
    for path in (EMBEDDED / "tiny-gpt2").iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(CoterieError, match="could not be loaded"):
        load_base(str(tmp_path), "fp32", 64)
