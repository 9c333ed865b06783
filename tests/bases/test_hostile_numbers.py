"""Bases whose files state sizes that no model has: each is refused before anything is built."""

import struct
from typing import Any

import pytest
from test_gguf import cache, model, write
from test_incomplete_bases import configure

from coterie.bases import checks, load_base, load_skeleton, load_tokenizer
from coterie.bases.checks import check_numbers
from coterie.bases.gguf_header import read_header
from coterie.errors import CoterieError

__all__ = ["cache", "model"]
COUNTS: dict[str, Any] = {
    **{"num_hidden_layers": 2**40, "vocab_size": 10**12, "n_embd": 2**31},
    **dict.fromkeys(("n_layer", "n_head", "num_labels", "n_inner"), 10**9),
    "task_specific_params": {"text": [{"num_beams": 10**10}]},
    "attention_types": [[["global", "local"], 10**9]],
}


@pytest.mark.parametrize("key", COUNTS)
def test_numbers_that_no_model_has_are_refused(key, folder) -> None:
    configure(folder, **{key: COUNTS[key]})
    for load in (load_skeleton, load_tokenizer, lambda base: load_base(base, "fp32", 8)):
        with pytest.raises(CoterieError, match=rf"config.json of .*base' sets {key}\S* to [0-9,]+"):
            load(str(folder))


def test_a_model_of_too_many_modules_is_refused(folder, monkeypatch) -> None:
    load_skeleton(str(folder))
    monkeypatch.setattr(checks, "MAX_MODULES", 10)
    with pytest.raises(CoterieError, match="describes a model of more than 10 modules"):
        load_skeleton(str(folder))


def test_numbers_of_published_models_are_accepted() -> None:
    numbers: dict[str, Any] = {"num_hidden_layers": 126, "n_routed_experts": 384, "head_dim": 128}
    numbers |= {"moe_intermediate_size": 2048, "shared_expert_intermediate_size": 20480}
    numbers |= {"vocab_size": 262_144, "max_position_embeddings": 10_485_760}
    numbers |= {"rope_theta": 10_000_000_000, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
    numbers |= {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 2**40}}
    check_numbers("config.json", numbers | {"layer_types": ["full_attention"] * 5000})


def header(*fields: bytes) -> bytes:
    """Return the header of a GGUF file without tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


LLAMA = field("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
HUGE = struct.pack("<Q", 2**60)
HEADERS = {
    "blocks": (
        header(LLAMA, field("llama.block_count", 4, struct.pack("<I", 2**31))),
        "sets llama.block_count to 2,147,483,648, but at most 4,096 is accepted",
    ),
    "experts": (header(LLAMA, field("llama.expert_count", 10, HUGE)), "sets llama.expert_count to"),
    "an array": (header(field("a", 9, struct.pack("<IQ", 0, 2**60))), "states a wrong length"),
    "texts": (header(field("a", 9, struct.pack("<IQ", 8, 2**60))), "states a wrong length"),
    "a text": (header(field("a", 8, struct.pack("<Q", 2**63))), "states a wrong length"),
    "fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends within its header"),
    "nested arrays": (header(field("a", 9, struct.pack("<IQ", 9, 1) * 9)), "too many arrays"),
    "a type": (header(field("a", 77, b"")), "unknown type 77"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_no_gguf_file_is_refused(name, tmp_path) -> None:
    content, message = HEADERS[name]
    (tmp_path / "a.gguf").write_bytes(content + b"\0" * 64)
    with pytest.raises(CoterieError, match=f"a.gguf could not be read: .*{message}"):
        load_tokenizer(str(tmp_path / "a.gguf"))


def test_a_gguf_file_too_small_for_its_model_is_refused(model, tmp_path) -> None:
    file = write(tmp_path / "small.gguf", model)
    assert read_header(file).fields["llama.block_count"] == model.config.num_hidden_layers
    key = b"llama.block_count" + struct.pack("<I", 4)
    content = file.read_bytes()
    place = content.index(key) + len(key)
    file.write_bytes(content[:place] + struct.pack("<I", 2000) + content[place + 4 :])
    with pytest.raises(CoterieError, match=r"a model of [0-9,]+ weights, but the file has only"):
        load_skeleton(str(file))


def test_headers_in_either_byte_order_are_read(tmp_path) -> None:
    content = b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q", 1) + b"a"
    (tmp_path / "a.gguf").write_bytes(content + struct.pack(">IIQHH", 9, 2, 2, 1, 2))
    assert read_header(tmp_path / "a.gguf").fields == {"a": [1, 2]}
