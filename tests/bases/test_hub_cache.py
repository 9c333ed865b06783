"""Bases that are damaged in the Hugging Face hub's cache: the message names the file."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from coterie.alignment.read import read_vocabulary
from coterie.bases import BaseSpec, load_base, load_tokenizer
from coterie.errors import CoterieError

COMMIT = "a" * 40


@pytest.fixture
def cached(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the base org/small in a cache without access to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "models--org--small" / "refs").mkdir(parents=True)
    (tmp_path / "models--org--small" / "refs" / "main").write_text(COMMIT)
    folder = tmp_path / "models--org--small" / "snapshots" / COMMIT
    return Path(shutil.copytree(bases / "gpt2", folder))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "half", "dangling link"])
def test_the_message_names_a_damaged_file(cached, file, damage) -> None:
    content = (cached / file).read_bytes()
    (cached / file).unlink()
    if damage == "half":
        (cached / file).write_bytes(content[: len(content) // 2])
    elif damage == "dangling link":
        (cached / file).symlink_to(cached / "blob")
    with pytest.raises(CoterieError, match="cache of the Hugging Face hub") as refusal:
        load_base("org/small", "fp32", 8)
    for part in (str(cached), file, "hf download org/small --force-download"):
        assert part in str(refusal.value)
    assert "built-in" not in str(refusal.value)


def test_a_tokenizer_without_any_file_is_missing(cached) -> None:
    for file in cached.glob("tokenizer*"):  # transformers would create an empty tokenizer
        file.unlink()
    with pytest.raises(CoterieError, match=r"has no tokenizer; copy tokenizer\.json"):
        load_tokenizer("org/small")


def test_the_remedy_repeats_the_revision(cached) -> None:
    (cached / "tokenizer.json").unlink()
    with pytest.raises(CoterieError, match=f"org/small --revision {COMMIT} --force-download"):
        load_tokenizer(BaseSpec(name="org/small", revision=COMMIT))


def test_align_names_the_damaged_file(cached) -> None:
    (cached / "tokenizer.json").write_text("{")
    with pytest.raises(CoterieError, match=r"tokenizer\.json is not valid JSON"):
        read_vocabulary("org/small")


@pytest.mark.parametrize("name", ["org/other", "not a name"])
def test_a_base_outside_the_cache_is_not_damaged(cached, name) -> None:
    load_base("org/small", "fp32", 8)  # which is whole
    with pytest.raises(CoterieError, match="it is not a built-in base"):
        load_tokenizer(name)
