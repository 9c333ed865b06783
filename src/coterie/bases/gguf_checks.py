"""Checks that the model read from a GGUF file is the one that the file describes.

The reader of transformers ignores keys and tensors that it does not know, and uses the defaults of
its architecture for keys that the file lacks. Here, every key and every tensor is either used with
the value in the file, or listed as one that changes nothing, or refused.
"""

import re
from collections.abc import Iterator
from math import isclose, prod
from textwrap import shorten
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from coterie.bases.gguf_header import Header
from coterie.bases.whole import listed

REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
"""Settings of every architecture for which transformers would otherwise use a default."""
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
"""Settings of which every file has one."""
DEFAULTS: dict[str, Any] = {"attention.sliding_window": 0, "rope.freq_base": 10000.0}
"""The values that llama.cpp uses if a file lacks the key."""
DESCRIPTIVE = re.compile(r"general\.|quantize\.imatrix\.|split\.")
"""Keys that describe a file, of which `check_header` checks those that matter."""
SHAPES = {"feed_forward_length", "expert_feed_forward_length", "vocab_size", "tensor_data_layout"}
"""Settings that the shapes of the tensors repeat, and one that only describes their origin."""
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "rope.scale_linear": 1,
    "rope.scaling.factor": 1,
}
"""Values with which a setting that transformers does not read changes nothing."""
TOKENIZER = re.compile(
    r"tokenizer\.(ggml\.(add_(bos|eos)_token|add_space_prefix|merges|model|pre|scores|tokens"
    r"|token_type(_count)?|\w+_token_id)|chat_templates?(\..+)?|huggingface\.json)"
)
"""Keys of the tokenizer that are used, or that do not affect the ids of a text."""
TOKENIZER_NEUTRAL: dict[str, Any] = {
    "add_sep_token": False,
    "escape_whitespaces": True,
    "remove_extra_whitespaces": False,
}
TENSORS_IGNORED = re.compile(r"\.attn_rot_embd\.weight$")
"""Tensors that repeat the frequencies of RoPE, which every reader computes."""
MERGE = "merge its parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf` of llama.cpp"
"""The advice for split files in error messages."""
Setting = tuple[str, Any]


def check_header(header: Header) -> None:
    """Check the keys of a GGUF file that do not depend on the model's configuration.

    Raises:
        ValueError: The file is a part of a split file, contains no model, or lacks a key; or a key
            of its tokenizer is not supported.
    """
    fields = header.fields
    if (parts := fields.get("split.count", 1)) > 1:
        part = fields.get("split.no", 0) + 1
        raise ValueError(f"it is part {part} of {parts} of a split file; {MERGE}.")
    if (kind := fields.get("general.type", "model")) != "model":
        raise ValueError(f"it contains no model (general.type is {kind!r}).")
    required = ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"]
    architecture = fields.get("general.architecture")
    required += [f"{architecture}.{name}" for name in REQUIRED]
    if missing := [key for key in required if key not in fields]:
        raise ValueError(f"its header lacks {', '.join(missing)}.")
    if not any(f"{architecture}.{name}" in fields for name in EPSILONS):
        raise ValueError(f"its header lacks {architecture}.{EPSILONS[0]}.")
    for key, value in fields.items():
        if key.startswith("tokenizer.") and not TOKENIZER.fullmatch(key):
            neutral = TOKENIZER_NEUTRAL.get(key.removeprefix("tokenizer.ggml."))
            if neutral is None or value != neutral:
                raise _unsupported(key, value)


def check_settings(header: Header, config: PreTrainedConfig) -> None:
    """Check that a configuration has the values of all keys of a GGUF file.

    Raises:
        ValueError: A key is not supported, or the configuration has another value.
    """
    prefix = f"{header.architecture}."
    expected = {
        f"{prefix}{name}": value for name, value in (NEUTRAL | dict(_settings(config))).items()
    }
    defaults = {f"{prefix}{name}": value for name, value in DEFAULTS.items()}
    for key, value in (defaults | header.fields).items():
        if key.startswith("tokenizer.") or DESCRIPTIVE.match(key):
            continue
        if key not in expected:
            if key in defaults or key.removeprefix(prefix) in SHAPES:
                continue
            raise _unsupported(key, value)
        if not _equal(value, expected[key]):
            raise ValueError(
                f"according to its header, {key} is {_shown(value)}, but transformers would use "
                f"{_shown(expected[key])}."
            )


def _settings(config: PreTrainedConfig) -> Iterator[Setting]:
    """Yield the settings of a configuration, with their names in GGUF files."""
    values: Any = config.get_text_config()
    heads, width = values.num_attention_heads, values.hidden_size
    head_width = getattr(values, "head_dim", None) or width // heads
    yield "block_count", values.num_hidden_layers
    yield "context_length", values.max_position_embeddings
    yield "embedding_length", width
    yield "attention.head_count", heads
    yield "attention.head_count_kv", getattr(values, "num_key_value_heads", None) or heads
    # llama.cpp scales the scores of Gemma's attention by the width of a head.
    yield "attention.key_length", getattr(values, "query_pre_attn_scalar", head_width)
    yield "attention.value_length", head_width
    yield "attention.sliding_window", getattr(values, "sliding_window", None) or 0
    for name in (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ):
        if (epsilon := getattr(values, name, None)) is not None:
            yield from ((key, epsilon) for key in EPSILONS)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual"):
        if (value := getattr(values, name, None)) is not None:
            yield name, value
    for name in ("num_experts", "num_local_experts"):
        if (count := getattr(values, name, None)) is not None:
            yield "expert_count", count
            yield "expert_used_count", values.num_experts_per_tok
    rope: Any = getattr(values, "rope_parameters", None)
    if rope:
        rope = rope.get("full_attention", rope)
        yield "rope.freq_base", rope["rope_theta"]
        fraction = rope.get("partial_rotary_factor", 1)
        yield "rope.dimension_count", int(head_width * fraction)
        kind = rope.get("rope_type", "default")
        yield "rope.scaling.type", "none" if kind == "default" else kind


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and isclose(value, expected, rel_tol=1e-6)
    return value == expected


def _unsupported(key: str, value: Any) -> ValueError:
    return ValueError(f"its header sets {key} to {_shown(value)}, which Coterie does not support.")


def _shown(value: Any) -> str:
    return shorten(repr(value), 60)


def check_tensors(header: Header, skeleton: PreTrainedModel) -> None:
    """Check that a GGUF file has exactly the tensors of the model that its header describes.

    Args:
        header: The file's header.
        skeleton: The model that transformers builds for this header, without weights.

    Raises:
        ValueError: The file lacks tensors, has others, or has tensors of another size.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    layers = header.fields[f"{header.architecture}.block_count"]
    names = get_tensor_name_map(numbers[header.architecture], layers)
    expected: dict[str, int] = {}
    for name, tensor in skeleton.named_parameters():  # tied weights only once
        parts = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        parts = parts if name.endswith(".experts.gate_up_proj") else [name]
        for part in parts:
            stem = names.get_name(part, (".weight", ".bias")) or part
            full = stem if stem.endswith((".weight", ".bias")) else f"{stem}.weight"
            expected[full] = tensor.numel() // len(parts)
    stored = {
        name: prod(shape)
        for name, shape in header.tensors.items()
        if not TENSORS_IGNORED.search(name)
    }
    if missing := [name for name in expected if name not in stored]:
        raise ValueError(f"it is not whole: it lacks {listed(missing)}; download it again.")
    if surplus := [name for name in stored if name not in expected]:
        raise ValueError(
            f"it contains {listed(surplus)}, which transformers does not read for the architecture "
            f"{header.architecture!r}; use another base."
        )
    if unequal := [name for name in stored if stored[name] != expected[name]]:
        raise ValueError(
            f"{unequal[0]} has {stored[unequal[0]]:,} numbers, but its header describes "
            f"{expected[unequal[0]]:,}; download it again."
        )
